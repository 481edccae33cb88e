"""What a connection has shared with its peer: the arena one way, a staging area the other."""

import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass

from kvstore.errors import InvalidRequest

NO_BYTES = memoryview(b"")
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class Peer:
    """`shares`: the peer maps the arena. `staging`: its area, read-only here; empty for none."""

    shares: bool = False
    staging: memoryview = NO_BYTES


def is_own_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user, on this host."""
    if sock.family != socket.AF_UNIX:
        return False
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return bool(uid == os.geteuid())


def map_staging(fd: int, size: int, size_max: int) -> memoryview:
    """Map a peer's staging area. Raises `InvalidRequest`.

    It must be sealed against shrinking: a peer that cut it short under our hands would kill us.
    """
    if not 0 < size <= size_max:
        raise InvalidRequest(f"a staging area has 1 to {size_max} B, not {size}")
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size < size:
            raise InvalidRequest(f"the staging area is no memfd of {size} B sealed against SHRINK")
        return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
    except OSError as e:
        raise InvalidRequest(f"the staging area can't be mapped: {e}") from e


def read_only(fd: int) -> int:
    """The same memory behind a descriptor that can't write. Raises `OSError`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
