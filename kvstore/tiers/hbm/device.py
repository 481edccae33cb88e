"""What the HBM tier needs of a device, and nothing else.

A device owns one pool of memory, allocated once. Bytes move by copies that are queued on a stream
and done some time later; an event recorded behind them tells when. So whoever queues a copy MUST
keep both ends as they are until an event behind it is done. Offsets and lengths are bytes in the
device's pool.

Two devices implement it: `cupy_device` (CUDA) and `simulated` (host memory behind the same rules).
Streams are used by one thread at a time; everything else may be called from any thread.
"""

import os
from dataclasses import dataclass
from typing import Any, Protocol

SIMULATED = "simulated"
CUDA = "cuda"


class DeviceError(Exception):
    """The device refused or failed a copy. What the copy was to fill is of unknown content."""


class DeviceHangs(DeviceError):
    """A copy was not done in time. It may still be done later, so neither of its ends may be used
    for anything else, ever."""


class NoDevice(Exception):
    """There is no such device here. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """A pool as another process of this host opens it (`kvstore.tiers.hbm.opened`).

    `kind`: `cuda` or `simulated`. `device`: its index. `size_bytes`: of the pool. `handle`: what
    the kind needs: a CUDA IPC handle (64 B), or the name of a simulated device's memory.
    """

    kind: str
    device: int
    size_bytes: int
    handle: bytes


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether every copy queued before it is done. Raises `DeviceError` where one failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done, at most so long; whether it is. Raises `DeviceError`."""
        ...


class Stream(Protocol):
    """Copies in order; two streams overtake each other freely. Queueing raises `DeviceError`."""

    def copy_in(self, offset: int, source: memoryview) -> None:
        """Host to device."""
        ...

    def copy_out(self, into: memoryview, offset: int) -> None:
        """Device to host."""
        ...

    def copy_within(self, to: int, offset: int, length: int) -> None:
        """Device to device, within the pool; the ranges MUST NOT overlap."""
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
        ...


class Device(Protocol):
    """See the module."""

    @property
    def index(self) -> int:
        """Its number among the devices of its kind."""
        ...

    @property
    def kind(self) -> str:
        """`cuda` or `simulated`."""
        ...

    @property
    def name(self) -> str:
        """For people: the card's name, or that it is simulated."""
        ...

    def allocate(self, size_bytes: int) -> None:
        """Take the pool's memory; once, before anything else. Raises `DeviceError`."""
        ...

    def register(self, host: memoryview) -> None:
        """Pin the host's memory, so that copies from and to it are asynchronous. Raises
        `DeviceError`."""
        ...

    def stream(self) -> Stream:
        """A new stream. Raises `DeviceError`."""
        ...

    def export(self) -> PoolHandle:
        """The pool's handle for other processes. Raises `DeviceError`."""
        ...

    def pool(self) -> "OpenedPool":
        """The pool for readers in this process; theirs MUST be gone before `close`. Raises
        `DeviceError`."""
        ...

    def close(self) -> None:
        """Give the pool back and let go of the host's memory. No copy may be under way."""
        ...


class OpenedPool(Protocol):
    """A pool as its readers have it, in another process or in this one; read-only for them."""

    handle: PoolHandle

    def array(self, offset: int, length: int) -> Any:
        """The bytes where they lie: a `uint8` CuPy array, or a NumPy array that can't be written
        for a simulated device. Valid as long as this object is."""
        ...

    def copy_out(self, into: memoryview, offset: int) -> None:
        """Copy `len(into)` bytes to the host, and wait for them. Raises `DeviceError`."""
        ...

    def close(self) -> None:
        """Let go of it; arrays handed out MUST be gone."""
        ...


def memory_name(fd: int) -> bytes:
    """A name by which another process of this user opens our memfd."""
    return b"%d:%d:%s" % (os.getpid(), fd, os.readlink(f"/proc/self/fd/{fd}").encode())


def open_memory(name: bytes) -> int:
    """A read-only descriptor of the memory that `memory_name` named. Raises `OSError` where its
    process is gone or is another by now."""
    pid, fd, link = name.split(b":", 2)
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{found}").encode() != link:
        os.close(found)
        raise FileNotFoundError(f"{path} is not the memory that it was ({link.decode()})")
    return found
