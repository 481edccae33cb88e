"""One connection of the data port: frames in, frames out, one call at a time.

While nothing is under way the connection reads by a callback of the event loop, and calls that the
engine answers at once are answered inside it: that is a socket round trip and nothing else. All
other calls, and bodies, are moved by one task, which hands bulk to a worker thread; reading stands
still meanwhile, which is the back-pressure. What the peer has sent ahead waits in the socket.
"""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    MessageTooLarge,
    Overloaded,
    Unavailable,
)
from kvstore.server.port import frames, sockets
from kvstore.server.port.calls import AT_ONCE, Reply, Request
from kvstore.server.port.frames import HEADER_BYTES, METHODS, Head, Kind, MalformedFrame
from kvstore.server.port.peer import Peer, is_own_user, map_staging
from kvstore.server.port.tokens import Verdict
from kvstore.server.status import to_name
from kvstore.server.wire import Parts
from kvstore.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.server.port.port import DataPort

INBOX_BYTES = 256 << 10
AT_ONCE_BODY_BYTES = 2 << 20
"""An answer of at most this is sent from the event loop, a copy of some hundred microseconds; more
goes to a worker, which takes about as long to wake."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Connection:
    """See the module. `due_s`: on the loop's clock, when it has stood still too long."""

    def __init__(self, port: "DataPort", sock: socket.socket) -> None:
        self._port, self._sock = port, sock
        # by number: asyncio makes a text of a socket that it does not know yet, at every turn
        self._fd = sock.fileno()
        self._loop = port.loop
        self._peer: Peer | None = None
        self._inbox = bytearray(INBOX_BYTES)
        self._have = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.due_s = self._loop.time() + port.config.handshake_s_max
        self._loop.add_reader(self._fd, self._readable)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._task is not None

    def close(self) -> None:
        """End it. A worker that moves its bytes is woken, and the task closes the socket."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._task is None:
            self._sock.close()
        else:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError as e:
                _log.debug("shutting down: %s", e)
        self._port.forget(self)

    def time_out(self) -> None:
        """It has stood still too long."""
        if self._peer is None or self._have or self.busy:
            self._port.count("port_stalled")
        self.close()

    # reading

    def _readable(self) -> None:
        try:
            got = self._receive(memoryview(self._inbox)[self._have :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            got = 0
        if not got:
            self._ended()
            return
        self._have += got
        if self._peer is not None:  # an opening that trickles in gets no more time
            self._progress(self._port.config.stall_s_max)
        self._go_on()

    def _receive(self, into: memoryview) -> int:
        if self._peer is not None:
            return self._sock.recv_into(into)
        if self._sock.family != socket.AF_UNIX:
            return self._sock.recv_into(into)
        got, fds = sockets.receive_with_fds(self._sock, into, 1)
        self._port.keep_fds(self, fds)
        return got

    def _ended(self) -> None:
        if self._have or self.busy:
            self._port.count("port_broken")
        self.close()

    def _progress(self, wait_s: float) -> None:
        self.due_s = self._loop.time() + wait_s

    def _go_on(self) -> None:
        """Take frames from the inbox until one is not all there or has to be waited for."""
        try:
            while self._task is None and not self._closed and self._take_frame():
                pass
        except MalformedFrame as e:
            self._refuse(InvalidRequest(str(e)), "port_malformed_frames")
        except MessageTooLarge as e:
            self._refuse(e, "port_malformed_frames")

    def _take_frame(self) -> bool:
        data = memoryview(self._inbox)[: self._have]
        if len(data) < HEADER_BYTES:
            return False
        head = frames.parse_head(data)
        self._check_limits(head)
        total = HEADER_BYTES + head.message_bytes
        if len(data) < total:
            if total > len(self._inbox):
                self._inbox = bytearray(data) + bytearray(total - len(data))
            return False
        message = frames.check_message(data, head)
        rest = bytes(data[total:])
        self._have = 0
        if head.body_bytes or self._peer is None:
            body = rest[: head.body_bytes]
            self._keep(rest[head.body_bytes :])
            if self._peer is None:
                self._open(message)
            else:
                self._begin(self._call(head, message, body))
            return True
        self._keep(rest)
        self._dispatch(head, message)
        return True

    def _keep(self, ahead: bytes) -> None:
        """Bytes that the peer sent behind the frame."""
        if len(self._inbox) != INBOX_BYTES:
            self._inbox = bytearray(max(INBOX_BYTES, len(ahead)))
        self._inbox[: len(ahead)] = ahead
        self._have = len(ahead)
        if not ahead:
            self._progress(self._port.config.idle_s_max)

    def _check_limits(self, head: Head) -> None:
        wanted = Kind.CALL if self._peer is not None else Kind.OPEN
        if head.kind is not wanted:
            raise MalformedFrame(f"expected {wanted.name}, not {head.kind.name}")
        if head.method >= len(METHODS):
            raise MalformedFrame(f"method {head.method} is unknown")
        message_max = self._port.message_bytes_max
        body_max = self._port.config.frame_bytes_max if self._peer is not None else 0
        if head.message_bytes > message_max or head.body_bytes > body_max:
            raise MessageTooLarge(
                f"a frame of {head.message_bytes} + {head.body_bytes} B passes the limits of "
                f"{message_max} + {body_max} B"
            )

    # opening

    def _open(self, message: bytes) -> None:
        fds = self._port.take_fds(self)
        try:
            self._welcome(pb.PortOpenRequest.FromString(message), fds)
        except DecodeError as e:
            raise MalformedFrame(f"no PortOpenRequest: {e}") from e
        except KVStoreError as e:
            self._refuse(e, "port_refused_tokens")
        finally:
            for fd in fds:
                os.close(fd)

    def _welcome(self, request: Any, fds: list[int]) -> None:
        verdict = self._port.tokens.check(request.token)
        if verdict is not Verdict.GOOD:
            raise InvalidRequest(f"the token is {verdict.value}; get another one from Hello")
        peer, reply = Peer(), pb.PortOpenReply(instance_id=self._port.instance_id)
        arena = self._port.arena
        may_share = arena is not None and is_own_user(self._sock)
        if request.share and may_share and arena is not None:
            peer.shares = True
            reply.generations_offset = arena.generations_offset
            reply.arena_bytes = self._port.arena_map_bytes
            self._tell_hbm(reply)
        if request.staging_bytes and fds and may_share:
            limit = self._port.config.frame_bytes_max
            peer.staging = map_staging(fds[0], request.staging_bytes, limit)
            reply.staging = True
        self._peer = peer
        parts = frames.encode(Kind.OPENED, reply.SerializeToString())
        try:
            if peer.shares and arena is not None:
                self._sock.sendmsg(parts, sockets.with_fd(self._port.arena_fd))
            else:
                self._sock.sendmsg(parts)
        except OSError:
            self._ended()
            return
        self._port.count("port_connections")
        self._progress(self._port.config.idle_s_max)

    def _tell_hbm(self, reply: Any) -> None:
        hbm = self._port.hbm
        if hbm is None:
            return
        reply.hbm_generations = hbm.generations
        for pool in hbm.pools:
            reply.hbm_pools.add(
                kind=pool.kind,
                device=pool.device,
                size_bytes=pool.size_bytes,
                handle=pool.handle,
            )

    def _refuse(self, error: KVStoreError, counter: str) -> None:
        """The last frame of a connection that can't be trusted."""
        self._port.count(counter)
        name, details = to_name(error)
        message = pb.PortError(name=name, details=details).SerializeToString()
        try:
            sockets.send_now(self._sock, frames.encode(Kind.ERROR, message))
        except OSError as e:
            _log.debug("the peer is gone before it was refused: %s", e)
        self.close()

    # calls

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.remove_reader(self._fd)
        self.due_s = math.inf
        self._task = self._loop.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (OSError, EOFError):
            if not self._closed:
                self._port.count("port_broken")
                self.close()
        except Exception:
            _log.exception("a connection of the data port failed")
            self.close()
        finally:
            self._task = None
            if self._closed:
                self._sock.close()
        if not self._closed:
            self._progress(self._port.config.stall_s_max if self._have else self._idle_s)
            self._loop.add_reader(self._fd, self._readable)
            if self._port.draining:
                self.close()
            else:
                self._go_on()

    @property
    def _idle_s(self) -> float:
        return self._port.config.idle_s_max

    def _dispatch(self, head: Head, message: bytes) -> None:
        """Answer at once what can be, and let a task do the rest."""
        name, started_s = METHODS[head.method], time.perf_counter()
        release = _nothing
        try:
            reply = self._answer_at_once(name, message)
            if reply is None:
                self._begin(self._call(head, message, b""))
                return
            release = reply.release
            parts, result = self._reply_parts(head, reply), "ok"
        except Exception as e:
            parts, result = self._error_parts(head, name, e), type(e).__name__
        try:
            if sum(map(len, parts)) <= AT_ONCE_BODY_BYTES:
                parts = sockets.send_now(self._sock, parts)
        except OSError:
            release()
            self._ended()
            return
        finally:
            # the peer does not wait for it
            self._port.observe(name, result, started_s)
        if parts:
            self._begin(self._send_rest(parts, release))
        else:
            release()

    def _answer_at_once(self, name: str, message: bytes) -> Reply | None:
        assert self._peer is not None
        request = Request(message, self._peer)
        if name in AT_ONCE:
            return _finished(self._port.calls.by_name[name](request))
        return self._port.calls.read_at_once(request) if name == "BulkRead" else None

    async def _send_rest(self, parts: Parts, release: Callable[[], None]) -> None:
        try:
            await self._send(parts)
        finally:
            release()

    async def _call(self, head: Head, message: bytes, first: bytes) -> None:
        """Receive the body, answer, send."""
        name, started_s = METHODS[head.method], time.perf_counter()
        result, release = "caller gone", _nothing
        try:
            try:
                reply = await self._answer(name, head, message, first)
                release = reply.release
                parts, result = self._reply_parts(head, reply), "ok"
            except (OSError, EOFError):
                raise
            except Exception as e:
                parts, result = self._error_parts(head, name, e), type(e).__name__
            await self._send(parts)
        finally:
            release()
            self._port.observe(name, result, started_s)

    async def _answer(self, name: str, head: Head, message: bytes, first: bytes) -> Reply:
        if not head.body_bytes:
            return await self._finish(name, Request(message, self._peer or Peer()), head)
        wait_s = self._port.config.stall_s_max
        if not await self._port.receiving.take(head.body_bytes, self._loop.time() + wait_s):
            # what comes can't be taken, so the connection can't go on
            self.close()
            raise Overloaded("too many bytes of puts are on their way; try again later")
        body: memoryview | None = None
        try:
            body = sockets.room_for(head.body_bytes)
            body[: len(first)] = first
            await self._receive_body(body, len(first))
            request = Request(message, self._peer or Peer(), body)
        except BaseException:
            self._port.receiving.give_back(head.body_bytes)
            raise
        return await self._finish(name, request, head)

    async def _receive_body(self, body: memoryview, have: int) -> None:
        while have < len(body):
            self._progress(self._port.config.stall_s_max)
            got = await self._port.work(sockets.receive_some, self._sock, body[have:])
            have += got
            if have < len(body) and not got:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
        self.due_s = math.inf

    async def _finish(self, name: str, request: Request, head: Head) -> Reply:
        """The answer within the deadline. Work that takes longer runs to its end unheard."""
        timeout_s = self._port.timeout_s(head.timeout_ms)
        work = self._loop.create_task(self._port.calls.by_name[name](request))
        self._port.adopt(work, len(request.body))
        done, _ = await asyncio.wait((work,), timeout=timeout_s)
        if not done:
            work.add_done_callback(_release_late)
            raise Unavailable(f"no answer within the deadline of {timeout_s:.3g} s")
        return work.result()

    # sending

    def _reply_parts(self, head: Head, reply: Reply) -> Parts:
        limit = self._port.message_bytes_max
        if len(reply.message) > limit:
            reply.release()
            raise MessageTooLarge(
                f"the answer of {len(reply.message)} B passes the {limit} B of one message; "
                "ask for less at a time"
            )
        return frames.encode(
            Kind.REPLY, reply.message, reply.body, method=head.method, call=head.call
        )

    def _error_parts(self, head: Head, name: str, error: Exception) -> Parts:
        if isinstance(error, KVStoreError):
            known, details = to_name(error)
        else:
            _log.error("%s failed", name, exc_info=error)
            known, details = "KVStoreError", "the daemon failed; its log has the reason"
        message = pb.PortError(name=known, details=details).SerializeToString()
        return frames.encode(Kind.ERROR, message, method=head.method, call=head.call)

    async def _send(self, parts: Parts) -> None:
        if sum(map(len, parts)) <= AT_ONCE_BODY_BYTES:
            parts = sockets.send_now(self._sock, parts)
        while parts:
            self._progress(self._port.config.stall_s_max)
            left = await self._port.work(sockets.send_some, self._sock, parts)
            if len(left) == len(parts) and left:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            parts = left
        self.due_s = math.inf

    async def _wait(self, add: Any, remove: Any) -> None:
        """Until the socket is ready. The sweeper ends a connection that never is."""
        ready = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(self._fd, wake)
        try:
            while not ready.done() and not self._closed:
                await asyncio.wait((ready,), timeout=1.0)
        finally:
            remove(self._fd)
        if self._closed:
            raise EOFError


def _nothing() -> None:
    pass


def _release_late(work: "asyncio.Task[Reply]") -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()


def _finished(answer: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as e:
        result: _T = e.value
        return result
    answer.close()
    raise RuntimeError("a call that is answered at once has waited")
