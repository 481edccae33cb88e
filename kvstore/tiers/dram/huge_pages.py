"""Huge pages under an arena, made behind its users' backs.

A disk's read into 4 KiB pages costs a descriptor per page, and a device's queue may hold a few
hundred of them, which is a handful of block reads. Into huge pages reads were twice as fast where
this was measured (docs/ssd.md). Systems rarely give huge pages
to shared memory by themselves (`shmem_enabled` is `never`), but collapse a range when asked to
(`MADV_COLLAPSE`, Linux 6.1), whatever lies there and whoever uses it. A range whose pages a disk or
a device has pinned just then stays as it is.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from queue import SimpleQueue

HUGE_PAGE_BYTES = 2 << 20
ARENA_BYTES_MIN = 16 << 20
"""Smaller arenas are not worth a thread."""
AHEAD_SHARE = 64
"""Of an arena, one part in so many is made before it is needed. A writer that comes first meets a
page fault per 4 KiB, and then the collapse of what it writes to: five times the work."""
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_HOPELESS = (errno.EINVAL, errno.ENOSYS)


def map_aligned(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a memfd, mapped where a huge page of the file is one of memory, if
    the system lets that be; the file and the mapping become up to 2 MiB longer."""
    extra = 0
    for last in (False, False, False, True):
        os.ftruncate(fd, size + extra)
        arena = mmap.mmap(fd, size + extra)
        at = ctypes.c_char.from_buffer(arena)
        past = ctypes.addressof(at) % HUGE_PAGE_BYTES
        del at
        if last or not past or size < ARENA_BYTES_MIN:
            break
        # a mapping goes right below another: one that is longer by so much begins on a border
        arena.close()
        extra = (extra + past) % HUGE_PAGE_BYTES
    return arena


class HugePages:
    """Collapses ranges of `memory` once they are in use, on a thread of its own. Core thread."""

    def __init__(self, memory: memoryview) -> None:
        whole = len(memory) // HUGE_PAGE_BYTES
        worth_it = sys.platform == "linux" and len(memory) >= ARENA_BYTES_MIN
        self._wanted = bytearray(b"\1" * whole) if worth_it else bytearray()
        self._ahead = whole // AHEAD_SHARE
        self._memory: memoryview | None = memory
        self._queue: SimpleQueue[int | None] | None = None

    def used(self, offset: int, length: int) -> None:
        """Bytes from `offset` on are going to be written."""
        first = offset // HUGE_PAGE_BYTES
        end = -(-(offset + length) // HUGE_PAGE_BYTES) + self._ahead
        if 1 not in self._wanted[first:end]:
            return
        for number in range(first, min(end, len(self._wanted))):
            if self._wanted[number]:
                self._wanted[number] = 0
                self._started().put(number)

    def _started(self) -> "SimpleQueue[int | None]":
        if self._queue is None:
            self._queue = SimpleQueue()
            arguments = (self._queue, self._memory)
            name = "kvstore-huge-pages"
            threading.Thread(target=_collapse, args=arguments, name=name, daemon=True).start()
            # an arena that nobody closes takes its thread along
            weakref.finalize(self, self._queue.put, None)
        return self._queue

    def close(self) -> None:
        """Ask for nothing more, and let go of the memory."""
        self._wanted = bytearray()
        self._memory = None
        if self._queue is not None:
            self._queue.put(None)


def _collapse(queue: "SimpleQueue[int | None]", memory: memoryview) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    hopeless = False
    while (number := queue.get()) is not None:
        if hopeless:
            continue
        at = ctypes.c_char.from_buffer(memory, number * HUGE_PAGE_BYTES)
        address = ctypes.c_void_p(ctypes.addressof(at))
        # a range without any page is not collapsed; this gives it one and changes none
        libc.madvise(address, ctypes.c_size_t(mmap.PAGESIZE), _MADV_POPULATE_WRITE)
        if libc.madvise(address, ctypes.c_size_t(HUGE_PAGE_BYTES), _MADV_COLLAPSE):
            hopeless = ctypes.get_errno() in _HOPELESS
        del at
