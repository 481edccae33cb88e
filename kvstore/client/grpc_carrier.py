"""gRPC as the carrier of messages to a daemon.

One `grpc.Channel` serves both kinds: a blocking carrier waits in the call, a suspending one awaits
the call's future. (`grpc.aio` keeps one poller per process, which disturbs a program that has more
than one event loop.) Calls fail at once while the daemon is away, and the channel reconnects by
itself.
"""

import asyncio
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


class GrpcCarrier:
    """`kvstore.client.remote.Carrier` over a channel; waits on the calling thread."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url.text
        self._channel = grpc.insecure_channel(url.grpc_target, options=_OPTIONS)
        self._calls: dict[str, Any] = {}
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
        metadata = dict(e.trailing_metadata() or ())
        name = metadata.get(ERROR_METADATA_KEY)
        return from_status(e.code(), e.details() or "", name, self._url)

    async def unary(self, name: str, request: Parts, timeout_s: float) -> bytes:
        call = self._call(name, "unary_unary")
        try:
            return await self._wait_reply(call, b"".join(request), timeout_s)
        except (grpc.RpcError, ValueError) as e:
            raise self._error(e) from None

    async def collect(self, name: str, requests: Iterator[bytes], timeout_s: float) -> bytes:
        call = self._call(name, "stream_unary")
        try:
            return await self._wait_reply(call, requests, timeout_s)
        except (grpc.RpcError, ValueError) as e:
            raise self._error(e) from None

    async def stream(
        self, name: str, request: Parts, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        replies = self._call(name, "unary_stream")(b"".join(request), timeout=timeout_s)
        try:
            while (data := await self._next_reply(replies)) is not None:
                yield data
        except (grpc.RpcError, ValueError) as e:
            raise self._error(e) from None
        finally:
            replies.cancel()

    async def close(self) -> None:
        self._closed = True
        self._channel.close()

    async def _wait_reply(self, call: Any, request: Any, timeout_s: float) -> bytes:
        reply: bytes = call(request, timeout=timeout_s)
        return reply

    async def _next_reply(self, replies: Any) -> bytes | None:
        reply: bytes | None = next(replies, None)
        return reply


class SuspendingGrpcCarrier(GrpcCarrier):
    """The same, awaiting on the caller's event loop, whichever it is."""

    async def _wait_reply(self, call: Any, request: Any, timeout_s: float) -> bytes:
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
            await done
        except asyncio.CancelledError:
            future.cancel()
            raise
        reply: bytes = future.result()
        return reply

    async def _next_reply(self, replies: Any) -> bytes | None:
        reply: bytes | None = await asyncio.to_thread(next, replies, None)
        return reply
