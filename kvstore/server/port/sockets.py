"""Moving bytes over a non-blocking socket, for worker threads and for the event loop alike.

No function here waits long for its peer: what could not be moved is handed back, and the caller
decides how long to go on.
"""

import array
import os
import select
import socket
import time
from collections.abc import Sequence

import numpy as np

from kvstore.server.port.frames import PARTS_MAX
from kvstore.server.wire import Parts

PATIENCE_S = 0.02
"""Of a worker with a peer that takes or gives nothing; the event loop waits on."""
TURN_S = 0.2
"""After this long a worker turns to others, progress or not."""
SOCKET_BUFFER_BYTES = 4 << 20
_ALIGN_BYTES = 64
_FD_BYTES = array.array("i").itemsize


def room_for(size: int) -> memoryview:
    """Memory to receive into. Its start is aligned, without which a copy to or from it takes half
    as long again."""
    memory = np.empty(size + _ALIGN_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGN_BYTES
    return memory[start : start + size].data


def prepare(sock: socket.socket) -> None:
    """Options of every connection, on either side."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        # on TCP a fixed size would turn the kernel's own tuning off
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unsent(parts: Sequence[bytes | memoryview], sent: int) -> Parts:
    """What is left of buffers after so many bytes of them."""
    for i, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[i + 1 :]]
        sent -= len(part)
    return []


def send_now(sock: socket.socket, parts: Parts) -> Parts:
    """Send what the socket takes at once; returns the rest. Raises `OSError`."""
    while parts:
        try:
            parts = unsent(parts, sock.sendmsg(parts[:PARTS_MAX]))
        except (BlockingIOError, InterruptedError):
            break
    return parts


def _ready(sock: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(PATIENCE_S * 1000))


def send_some(sock: socket.socket, parts: Parts) -> Parts:
    """`send_now` with a little patience, for a worker. Raises `OSError`."""
    ends_s = time.monotonic() + TURN_S
    while parts and time.monotonic() < ends_s:
        left = send_now(sock, parts)
        if left and not _ready(sock, select.POLLOUT):
            return left
        parts = left
    return parts


def receive_some(sock: socket.socket, into: memoryview) -> int:
    """Fill `into` from the socket with a little patience, for a worker; returns how far it came.

    Raises `EOFError` where the peer has closed, and `OSError`.
    """
    ends_s, have = time.monotonic() + TURN_S, 0
    while have < len(into) and time.monotonic() < ends_s:
        try:
            got = sock.recv_into(into[have:])
        except (BlockingIOError, InterruptedError):
            if not _ready(sock, select.POLLIN):
                break
            continue
        if not got:
            raise EOFError
        have += got
    return have


def receive_with_fds(sock: socket.socket, into: memoryview, fds_max: int) -> tuple[int, list[int]]:
    """One receive, and the file descriptors that came with it. Raises `OSError`."""
    got, ancillary, _, _ = sock.recvmsg_into([into], socket.CMSG_SPACE(fds_max * _FD_BYTES))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    for fd in fds[fds_max:]:
        os.close(fd)
    return got, list(fds[:fds_max])


def with_fd(fd: int) -> list[tuple[int, int, "array.array[int]"]]:
    """Ancillary data that hands over a file descriptor."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
