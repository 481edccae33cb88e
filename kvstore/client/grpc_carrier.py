"""gRPC as the carrier of messages to a daemon.

One `grpc.Channel` serves both kinds: a blocking carrier waits in the call, a suspending one awaits
the call's future. (`grpc.aio` keeps one poller per process, which disturbs a program that has more
than one event loop.) Calls fail at once while the daemon is away, and the channel reconnects by
itself.

gRPC's own deadlines do not hold once a connection is full: while its peer takes nothing, calls on
it end neither by their deadline nor by `cancel`, and `close` does not either. So this side keeps
the time too. What could fill the connection goes as a future, which can be left behind; what is
small, over a connection that nothing speaks against, goes the direct way, a third faster.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc

from kvstore.client.url import StoreURL
from kvstore.errors import KVStoreError, Unavailable
from kvstore.server.messages import method_path
from kvstore.server.status import ERROR_METADATA_KEY, from_status
from kvstore.server.wire import Parts

MESSAGE_BYTES_MAX = 256 << 20
"""Of one message on this side; the daemon's own limit is lower and comes with Hello."""
RECONNECT_BACKOFF_MS_MIN = 50
RECONNECT_BACKOFF_MS_MAX = 1000
CONNECT_TIMEOUT_MS = 5000
GRACE_S = 1.0
"""Beyond a call's deadline, which is gRPC's to keep, before it is left behind."""
DIRECT_BYTES_MAX = 64 << 10
"""On their way in all direct calls: what a socket takes from a writer whose peer reads nothing."""
WINDOW_BYTES = 32 << 20
"""HTTP/2 flow-control window. Left to its probing, gRPC moves our messages at half the speed."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MIN),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.enable_retries", 0),
    # A connection per client: a shared one would share its back-off and its fate.
    ("grpc.use_local_subchannel_pool", 1),
)


class Traffic:
    """What of one channel is under way. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self.doubtful = False
        """Whether a call ran out of time and none has been answered since: what it sent may still
        fill the connection."""

    def enter(self, size: int) -> bool:
        """A request of `size` bytes goes out: whether it may go directly."""
        with self._lock:
            self._bytes += size
            return self._bytes <= DIRECT_BYTES_MAX and not self.doubtful

    def leave(self, size: int) -> None:
        """It was answered, or left behind."""
        with self._lock:
            self._bytes -= size


class GrpcCarrier:
    """`kvstore.client.remote.Carrier` over a channel; waits on the calling thread."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url.text
        self._channel = grpc.insecure_channel(url.grpc_target, options=_OPTIONS)
        self._calls: dict[str, Any] = {}
        self._traffic = Traffic()
        self._closed = False

    def _call(self, name: str, kind: str) -> Any:
        if self._closed:
            raise Unavailable(f"{self._url}: this client is closed")
        if name not in self._calls:
            self._calls[name] = getattr(self._channel, kind)(method_path(name))
        return self._calls[name]

    def _error(self, e: grpc.RpcError | ValueError) -> KVStoreError:
        if isinstance(e, ValueError):  # the channel was closed under the call
            return Unavailable(f"{self._url}: {e}")
        # any other error is an answer, or the end of a connection
        self._traffic.doubtful = e.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        metadata = dict(e.trailing_metadata() or ())
        name = metadata.get(ERROR_METADATA_KEY)
        return from_status(e.code(), e.details() or "", name, self._url)

    def _left_behind(self, call: Any, timeout_s: float) -> Unavailable:
        self._traffic.doubtful = True
        call.cancel()
        return Unavailable(f"{self._url}: no answer within the deadline of {timeout_s:.3g} s")

    async def unary(self, name: str, request: Parts, timeout_s: float) -> bytes:
        call, data = self._call(name, "unary_unary"), b"".join(request)
        direct = self._traffic.enter(len(data))
        try:
            reply = await self._wait_reply(call, data, timeout_s, direct)
            self._traffic.doubtful = False
            return reply
        except (grpc.RpcError, ValueError) as e:
            raise self._error(e) from None
        finally:
            self._traffic.leave(len(data))

    async def collect(self, name: str, requests: Iterator[bytes], timeout_s: float) -> bytes:
        call = self._call(name, "stream_unary")
        self._traffic.enter(DIRECT_BYTES_MAX)
        try:
            reply = await self._wait_reply(call, requests, timeout_s, direct=False)
            self._traffic.doubtful = False
            return reply
        except (grpc.RpcError, ValueError) as e:
            raise self._error(e) from None
        finally:
            self._traffic.leave(DIRECT_BYTES_MAX)

    async def stream(
        self, name: str, request: Parts, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        replies = self._call(name, "unary_stream")(b"".join(request), timeout=timeout_s)
        late: list[Unavailable] = []
        timer = threading.Timer(
            timeout_s + GRACE_S, lambda: late.append(self._left_behind(replies, timeout_s))
        )
        timer.daemon = True
        timer.start()
        try:
            while (data := await self._next_reply(replies)) is not None:
                yield data
        except (grpc.RpcError, ValueError) as e:
            raise (late[0] if late else self._error(e)) from None
        finally:
            timer.cancel()
            replies.cancel()

    async def close(self) -> None:
        self._closed = True
        closing = threading.Thread(target=self._channel.close, name="kvstore-close", daemon=True)
        closing.start()
        await self._wait_closed(closing)

    async def _wait_closed(self, closing: threading.Thread) -> None:
        closing.join(GRACE_S)

    async def _wait_reply(self, call: Any, request: Any, timeout_s: float, direct: bool) -> bytes:
        reply: bytes
        if direct:
            reply = call(request, timeout=timeout_s)
            return reply
        future = call.future(request, timeout=timeout_s)
        try:
            reply = future.result(timeout_s + GRACE_S)
            return reply
        except grpc.FutureTimeoutError:
            raise self._left_behind(future, timeout_s) from None

    async def _next_reply(self, replies: Any) -> bytes | None:
        reply: bytes | None = next(replies, None)
        return reply


class SuspendingGrpcCarrier(GrpcCarrier):
    """The same, awaiting on the caller's event loop, whichever it is."""

    async def _wait_reply(self, call: Any, request: Any, timeout_s: float, direct: bool) -> bytes:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def on_done(_: Any) -> None:
            # The loop may be gone when the answer to an abandoned call arrives.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        future = call.future(request, timeout=timeout_s)
        future.add_done_callback(on_done)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                await done
        except TimeoutError:
            raise self._left_behind(future, timeout_s) from None
        except asyncio.CancelledError:
            future.cancel()
            raise
        reply: bytes = future.result()
        return reply

    async def _next_reply(self, replies: Any) -> bytes | None:
        reply: bytes | None = await asyncio.to_thread(next, replies, None)
        return reply

    async def _wait_closed(self, closing: threading.Thread) -> None:
        await asyncio.to_thread(closing.join, GRACE_S)
