"""One connection to a daemon's data port, used by one call at a time; blocks the calling thread."""

import contextlib
import fcntl
import math
import mmap
import os
import select
import socket
import time
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.errors import KVStoreError, Unavailable
from kvstore.server.address import parse_authority
from kvstore.server.port import frames, sockets
from kvstore.server.port.frames import HEADER_BYTES, NUMBER_OF_METHOD, Head, Kind, MalformedFrame
from kvstore.server.status import from_name
from kvstore.server.wire import Parts
from kvstore.v1 import kvstore_pb2 as pb

INBOX_BYTES = 16 << 10
"""What is read ahead of a body, and copied; the rest of it goes straight where it belongs."""
_POLLED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class PortUnreachable(Exception):
    """No connection could be opened. Nothing was asked yet."""


class StreamLost(Exception):
    """The connection ended under a call. `answered`: whether an answer had begun to come."""

    def __init__(self, why: str, answered: bool) -> None:
        super().__init__(why)
        self.answered = answered


class Staging:
    """A writer's area of shared memory, which the daemon reads. `size` bytes, taken from the system
    as they are first written."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # the daemon takes none that could be cut short while it reads
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.view = memoryview(mmap.mmap(self.fd, size))
        except BaseException:
            os.close(self.fd)
            raise

    def close_fd(self) -> None:
        """The daemon has its own by now."""
        os.close(self.fd)
        self.fd = -1


class PortStream:
    """See the module. Made by `open`; after any error but the daemon's own it is of no use."""

    def __init__(self, sock: socket.socket, staging: Staging | None) -> None:
        self._sock = sock
        # asked only when nothing can be moved: a timeout of the socket's own costs two system calls
        # more each time
        sock.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._have = 0
        self._calls = 0
        self.unanswered = 0
        """Calls sent whose answer was not taken: the stream is of no use to others meanwhile."""
        self._staging = staging
        self.staging: memoryview | None = None
        self.opened = pb.PortOpenReply()
        self.arena_fd = -1
        self.used = False
        """Whether a call was made: an idle connection may have been closed since."""

    @classmethod
    def open(
        cls,
        address: str,
        host: str,
        token: bytes,
        staging_bytes: int,
        share: bool,
        timeout_s: float,
    ) -> "PortStream":
        """Connect and show the token. `host`: where the daemon's TCP addresses are, "" for as they
        are. `arena_fd` is the arena's where it is shared, and the caller's to close.

        Raises `PortUnreachable`; `KVStoreError` where the daemon refuses the token.
        """
        deadline = time.monotonic() + timeout_s
        try:
            sock = _connect(address, host, timeout_s)
        except OSError as e:
            raise PortUnreachable(f"{address}: {e.strerror or e}") from e
        staging = None
        try:
            staging = Staging(staging_bytes) if staging_bytes else None
            stream = cls(sock, staging)
            stream._shake_hands(token, staging_bytes, share, deadline)
        except (OSError, StreamLost) as e:
            sock.close()
            raise PortUnreachable(f"{address}: {e}") from e
        except BaseException:
            sock.close()
            raise
        finally:
            if staging is not None:
                staging.close_fd()
        return stream

    def _shake_hands(self, token: bytes, staging_bytes: int, share: bool, deadline: float) -> None:
        request = pb.PortOpenRequest(token=token, share=share, staging_bytes=staging_bytes)
        parts = frames.encode(Kind.OPEN, request.SerializeToString())
        self.unanswered = 1
        fds = sockets.with_fd(self._staging.fd) if self._staging is not None else []
        self._sock.sendmsg(parts, fds)
        _wait(self._readable, deadline)
        got, received = sockets.receive_with_fds(self._sock, self._inbox, 1)
        try:
            self._have = got
            if not got:
                raise StreamLost("closed by the daemon", answered=False)
            _, message = self.receive(deadline)
            self.opened = pb.PortOpenReply.FromString(message)
        except (DecodeError, KVStoreError, StreamLost):
            for fd in received:
                os.close(fd)
            raise
        if received:
            self.arena_fd = received[0]
        if self._staging is not None and self.opened.staging:
            self.staging = self._staging.view

    def send(self, method: str, message: bytes, body: Parts, deadline: float) -> None:
        """Ask. Raises `StreamLost`, and `Unavailable` after `deadline` (monotonic)."""
        self._calls = (self._calls + 1) & 0xFFFFFFFF
        timeout_ms = max(1, int((deadline - time.monotonic()) * 1000))
        parts = frames.encode(
            Kind.CALL,
            message,
            body,
            method=NUMBER_OF_METHOD[method],
            call=self._calls,
            timeout_ms=min(timeout_ms, 0xFFFFFFFF),
        )
        self.used = True
        self.unanswered += 1
        try:
            while parts := sockets.send_now(self._sock, parts):
                _wait(self._writable, deadline)
        except TimeoutError:
            raise Unavailable("the daemon took nothing within the deadline") from None
        except OSError as e:
            raise StreamLost(str(e), answered=False) from e

    def receive(self, deadline: float) -> tuple[Head, bytes]:
        """Header and message of the next answer; its body MUST be taken next.

        Raises the daemon's errors, `StreamLost`, and `Unavailable` after `deadline`.
        """
        self._fill(HEADER_BYTES, deadline, answered=False)
        try:
            head = frames.parse_head(self._inbox)
            total = HEADER_BYTES + head.message_bytes
            if total > len(self._inbox):
                larger = memoryview(bytearray(total))
                larger[: self._have] = self._inbox[: self._have]
                self._inbox = larger
            self._fill(total, deadline, answered=True)
            message = frames.check_message(self._inbox, head)
        except MalformedFrame as e:
            raise StreamLost(str(e), answered=True) from e
        self._consume(total)
        self.unanswered -= 1
        if head.kind is Kind.ERROR:
            error = pb.PortError.FromString(message)
            raise from_name(error.name, error.details, "data port")
        return head, message

    def _fill(self, size: int, deadline: float, answered: bool) -> None:
        while self._have < size:
            self._have += self._receive_into(self._inbox[self._have :], deadline, answered)

    def _consume(self, size: int) -> None:
        left = self._have - size
        if left:
            self._inbox[:left] = bytes(self._inbox[size : self._have])
        self._have = left

    def _receive_into(self, into: memoryview, deadline: float, answered: bool) -> int:
        try:
            # an answer is waited for, the rest of a body is mostly there
            got = self._receive_now(into) if answered else None
            while got is None:
                _wait(self._readable, deadline)
                got = self._receive_now(into)
        except TimeoutError:
            raise Unavailable("the daemon did not answer within the deadline") from None
        except OSError as e:
            raise StreamLost(str(e), answered) from e
        if not got:
            raise StreamLost("closed by the daemon", answered or bool(self._have))
        return got

    def _receive_now(self, into: memoryview) -> int | None:
        """How much came, 0 at the connection's end; None where nothing is there yet."""
        try:
            return self._sock.recv_into(into)
        except (BlockingIOError, InterruptedError):
            return None

    def receive_body(self, into: memoryview, deadline: float) -> None:
        """Fill `into` with the next bytes of the body."""
        have = min(self._have, len(into))
        if have:
            into[:have] = self._inbox[:have]
            self._consume(have)
        while have < len(into):
            have += self._receive_into(into[have:], deadline, answered=True)

    def call(self, method: str, message: bytes, body: Parts, deadline: float) -> bytes:
        """One message there, one back, without a body."""
        self.send(method, message, body, deadline)
        head, reply = self.receive(deadline)
        if head.body_bytes:
            raise StreamLost(f"an answer to {method} with a body", answered=True)
        return reply

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds its end. Any thread may ask."""
        poll = select.poll()
        try:
            poll.register(self._sock, _POLLED)
        except ValueError:
            return False
        return not poll.poll(0)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()


def _wait(ready: select.poll, deadline: float) -> None:
    """Until a socket is ready. Raises `TimeoutError` after `deadline` (monotonic)."""
    left_s = deadline - time.monotonic()
    # rounded up: a wait of nothing would only look
    if left_s <= 0 or not ready.poll(math.ceil(left_s * 1000)):
        raise TimeoutError


def _connect(address: str, host: str, timeout_s: float) -> socket.socket:
    scheme, _, rest = address.partition("://")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        target: Any = rest
    else:
        announced, port = parse_authority(rest)
        target = (host or announced, port)
        sock = socket.create_connection(target, timeout_s)
    try:
        sockets.prepare(sock)
        if scheme == "unix":
            sock.settimeout(timeout_s)
            sock.connect(target)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return sock
