"""A simulated device: host memory that obeys a device's rules. Nothing here is a GPU.

Its pool is a memfd, which stands for a CUDA IPC handle: another process really maps it. Copies are
queued and done later, by a thread per stream or, `stepped`, only when `step` says so or an event
is waited for. Bytes are read and written when a copy is *done*, not when it is queued, so that a
slot given away too early shows as wrong bytes.

Faults: `before(op, length)` is called before each copy is queued (`queue`) and before it is done
(`in`, `out`, `within`), and may raise `DeviceError`, change memory or take its time; between `hold`
and `release` nothing is done at all, as on a device that hangs.
"""

import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvstore.tiers.hbm.device import (
    SIMULATED,
    DeviceError,
    PoolHandle,
    memory_name,
    open_memory,
)

Before = Callable[[str, int], None]
_THREAD_IDLE_S = 0.2


def no_fault(op: str, length: int) -> None:
    """The default of `SimulatedDevice.before`: all goes well."""


class SimulatedEvent:
    """See `Event`."""

    def __init__(self, stream: "SimulatedStream") -> None:
        self._stream, self._done = stream, threading.Event()
        self.error: DeviceError | None = None

    def settle(self, error: DeviceError | None) -> None:
        """Everything before it is done, or has failed."""
        self.error = error
        self._done.set()

    def done(self) -> bool:
        if not self._done.is_set():
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait(self, timeout_s: float) -> bool:
        if self._stream.device.stepped:
            while not self._done.is_set() and self._stream.step():
                pass
        else:
            self._done.wait(timeout_s)
        return self.done()


class SimulatedStream:
    """See `Stream`. In threaded operation a thread serves it while there is something to do."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self.device = device
        self._queue: deque[Callable[[], None] | SimulatedEvent] = deque()
        self._lock = threading.Condition()
        self._error: DeviceError | None = None
        self._thread: threading.Thread | None = None

    def copy_in(self, offset: int, source: memoryview) -> None:
        self.device.before("queue", len(source))
        target = self.device.memory[offset : offset + len(source)]
        self._put(lambda: self._copy("in", target, source))

    def copy_out(self, into: memoryview, offset: int) -> None:
        self.device.before("queue", len(into))
        source = self.device.memory[offset : offset + len(into)]
        self._put(lambda: self._copy("out", into, source))

    def copy_within(self, to: int, offset: int, length: int) -> None:
        self.device.before("queue", length)
        memory = self.device.memory
        target, source = memory[to : to + length], memory[offset : offset + length]
        self._put(lambda: self._copy("within", target, source))

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self._put(event)
        return event

    def _copy(self, op: str, target: memoryview, source: memoryview) -> None:
        self.device.before(op, len(source))
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def _put(self, work: Callable[[], None] | SimulatedEvent) -> None:
        with self._lock:
            self._queue.append(work)
            if self.device.stepped:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="kvstore-simulated-device", daemon=True
                )
                self._thread.start()
            self._lock.notify()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._queue and not self._lock.wait(_THREAD_IDLE_S):
                    self._thread = None
                    return
            if not self.step():
                self.device.released.wait(_THREAD_IDLE_S)

    def step(self) -> bool:
        """Do the next thing in the queue; whether there was one."""
        if not self.device.released.is_set() or not self._queue:
            return False
        work = self._queue.popleft()
        if isinstance(work, SimulatedEvent):
            error, self._error = self._error, None
            work.settle(error)
            return True
        try:
            work()
        except DeviceError as e:
            self._error = e
        return True


class SimulatedDevice:
    """See the module and `Device`. `memory`: the pool, to look at and to damage."""

    kind = SIMULATED

    def __init__(self, index: int = 0, *, stepped: bool = False) -> None:
        self.index, self.stepped = index, stepped
        self.before: Before = no_fault
        self.released = threading.Event()
        self.released.set()
        self.memory = memoryview(b"")
        self._fd = -1
        self._streams: list[SimulatedStream] = []

    @property
    def name(self) -> str:
        return f"simulated device {self.index} (host memory, no GPU)"

    def hold(self) -> None:
        """Hang: nothing that is queued gets done until `release`."""
        self.released.clear()

    def release(self) -> None:
        """Undo `hold`."""
        self.released.set()

    def step(self) -> bool:
        """Do one thing of the first stream that has any; whether there was one."""
        return any(stream.step() for stream in self._streams)

    def allocate(self, size_bytes: int) -> None:
        if self._fd >= 0:
            raise DeviceError(f"{self.name}: the pool was allocated already")
        name = f"kvstore-hbm-simulated-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            self.memory = memoryview(mmap.mmap(fd, size_bytes))
        except (OSError, ValueError) as e:
            os.close(fd)
            raise DeviceError(f"{self.name}: {size_bytes} B can't be had: {e}") from e
        self._fd = fd

    def register(self, host: memoryview) -> None:
        """Nothing to do: this memory is as near as that."""

    def stream(self) -> SimulatedStream:
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    def export(self) -> PoolHandle:
        if self._fd < 0:
            raise DeviceError(f"{self.name}: there is no pool to export")
        return PoolHandle(self.kind, self.index, len(self.memory), memory_name(self._fd))

    def pool(self) -> "SimulatedPool":
        return SimulatedPool(self.export())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.memory = memoryview(b"")


class SimulatedPool:
    """A simulated device's pool, mapped read-only. See `OpenedPool`."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        try:
            fd = open_memory(handle.handle)
        except (OSError, ValueError) as e:
            raise DeviceError(f"the simulated device's memory can't be opened: {e}") from e
        try:
            if os.fstat(fd).st_size < handle.size_bytes:
                raise DeviceError(f"the simulated device has not {handle.size_bytes} B")
            self._map = mmap.mmap(fd, handle.size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def array(self, offset: int, length: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        if offset < 0 or offset + length > len(self._bytes):
            raise DeviceError(f"{length} B from {offset} on leave the pool")
        return self._bytes[offset : offset + length]

    def copy_out(self, into: memoryview, offset: int) -> None:
        np.copyto(np.frombuffer(into, np.uint8), self.array(offset, len(into)))

    def close(self) -> None:
        self._bytes = np.zeros(0, np.uint8)
        with suppress(BufferError):  # an array of it is still held; it goes with that
            self._map.close()
