"""Many O_DIRECT reads at a time from one thread, with the kernel's asynchronous I/O (`io_submit`).

Two system calls carry a whole queue of reads, and the GIL is held in neither: a thread per read
would pay for two switches of it. Called by number, since the C library has no wrapper; containers
that forbid io_uring allow these.
"""

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""io_setup, io_destroy, io_submit, io_getevents."""
_PREADV = 7
_IOCB = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("flags", "u4"),
        ("op", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("iovecs", "u8"),
        ("count", "u8"),
        ("offset", "i8"),
        ("reserved", "V16"),
    ]
)
_EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("result", "i8"), ("result2", "i8")])
_BUSY = (errno.EAGAIN, errno.EINTR)


class Transfer(NamedTuple):
    """One read: `buffers`, writable, `length` bytes in all, are filled one after the other from
    `offset` of a file."""

    handle: int
    buffers: Sequence[memoryview]
    offset: int
    length: int


Done = Callable[[int, int | OSError], None]
"""Told the position of a transfer that ended, and the bytes read or its error."""


class AioUnavailable(Exception):
    """The kernel does not do it, or not for us."""


def _system_call(*arguments: Any) -> int:
    result = int(_libc.syscall(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Queue:
    """One context of the kernel, for one thread at a time. Raises `AioUnavailable`."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._context: ctypes.c_ulong | None = None
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None or sys.byteorder != "little":
            raise AioUnavailable(f"not known on {sys.platform} {platform.machine()}")
        self._setup, self._destroy, self._submit, self._getevents = map(ctypes.c_long, numbers)
        context = ctypes.c_ulong(0)
        try:
            _system_call(self._setup, ctypes.c_long(depth), ctypes.byref(context))
        except OSError as e:
            raise AioUnavailable(f"io_setup: {e.strerror}") from e
        self._context = context
        self._events = np.zeros(depth, _EVENT)

    def __del__(self) -> None:
        if self._context is not None:
            _libc.syscall(self._destroy, self._context)

    def read(self, transfers: Sequence[Transfer], depth: int, done: Done) -> None:
        """Execute all, up to `depth` at a time (no more than the queue's), in any order. `done` is
        called once for each, on this thread, while others are still under way. Returns when nothing
        is under way any more, also where `done` raises."""
        iocbs, keep = _prepare(transfers)
        addresses = iocbs.ctypes.data + np.arange(len(iocbs), dtype=np.uint64) * _IOCB.itemsize
        first = int(addresses.ctypes.data)
        started = under_way = 0
        depth = min(depth, self.depth)
        ended: list[tuple[int, int]] = []
        try:
            while started < len(iocbs) or under_way or ended:
                room = min(depth - under_way, len(iocbs) - started)
                if room:
                    count, error = self._start(first + 8 * started, room, under_way)
                    started += count
                    under_way += count
                    if error is not None:
                        # the kernel took none of them, and the first is to blame
                        started += 1
                        done(started - 1, error)
                        continue
                # the queue is full again while the caller looks at what has ended
                for position, result in ended:
                    code = -result
                    done(position, result if result >= 0 else OSError(code, os.strerror(code)))
                # few wake-ups while there is more to begin, early news of the last ones
                least = depth if started < len(iocbs) else under_way
                ended = self._wait(max(1, min(under_way, least // 2))) if under_way else []
                under_way -= len(ended)
        finally:
            while under_way:
                under_way -= len(self._wait(under_way))
            del keep

    def _start(self, at: int, count: int, under_way: int) -> tuple[int, OSError | None]:
        try:
            address = ctypes.c_void_p(at)
            return _system_call(self._submit, self._context, ctypes.c_long(count), address), None
        except OSError as e:
            if e.errno in _BUSY and (under_way or e.errno == errno.EINTR):
                return 0, None
            return 0, e

    def _wait(self, least: int) -> list[tuple[int, int]]:
        events = self._events
        while True:
            try:
                count = _system_call(
                    self._getevents,
                    self._context,
                    ctypes.c_long(least),
                    ctypes.c_long(len(events)),
                    ctypes.c_void_p(events.ctypes.data),
                    None,
                )
            except OSError as e:
                if e.errno != errno.EINTR:
                    raise
                continue
            ended = events[:count]
            return list(zip(ended["data"].tolist(), ended["result"].tolist(), strict=True))


def _prepare(transfers: Sequence[Transfer]) -> tuple["np.ndarray[Any, Any]", list[Any]]:
    """The kernel's description of these transfers, and what must stay alive with it."""
    counts = np.array([len(t.buffers) for t in transfers], np.uint64)
    # keeps every buffer exported, so that its memory can't move or go
    anchors = [ctypes.c_char.from_buffer(b) for t in transfers for b in t.buffers]
    iovecs = np.empty((len(anchors), 2), np.uint64)
    iovecs[:, 0] = [ctypes.addressof(a) for a in anchors]
    iovecs[:, 1] = [b.nbytes for t in transfers for b in t.buffers]
    iocbs = np.zeros(len(transfers), _IOCB)
    iocbs["data"] = np.arange(len(transfers))
    iocbs["op"] = _PREADV
    iocbs["fd"] = [t.handle for t in transfers]
    iocbs["offset"] = [t.offset for t in transfers]
    iocbs["count"] = counts
    iocbs["iovecs"] = iovecs.ctypes.data + 16 * (np.cumsum(counts) - counts)
    return iocbs, [anchors, iovecs]


class QueuePool:
    """Queues that threads borrow; as many are made as are in use at once."""

    def __init__(self) -> None:
        self._free: list[Queue] = []
        self._lock = threading.Lock()
        self._off = False

    def read(self, transfers: Sequence[Transfer], depth: int, done: Done) -> bool:
        """`Queue.read`; False, with nothing done, where the kernel won't."""
        queue = self._take(depth)
        if queue is None:
            return False
        try:
            queue.read(transfers, depth, done)
        finally:
            with self._lock:
                self._free.append(queue)
        return True

    def _take(self, depth: int) -> Queue | None:
        with self._lock:
            if self._off:
                return None
            while self._free:
                queue = self._free.pop()
                if queue.depth >= depth:
                    return queue
        try:
            return Queue(depth)
        except AioUnavailable:
            self._off = not self._free
            return None
