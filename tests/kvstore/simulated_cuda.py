# ruff: noqa: N802 (the names are those of CuPy)
"""What `kvstore.tiers.hbm.cupy_device` needs of CuPy, simulated over host memory: no GPU.

It keeps to what CuPy documents: copies are done some time after they were queued (here: when an
event behind them is asked for), `eventQuery` gives a status and raises nothing, the current device
is the thread's own, and a pointer is good on its own device only.
"""

import ctypes
import threading
from types import SimpleNamespace

NOT_READY = 600


class CUDARuntimeError(RuntimeError):
    pass


class SimulatedCuda:
    """`simulated.cupy` stands for the module. `late`: how often an event says "not yet" first.
    `status`: what a failing device answers. `refuse`: raised by the next calls that queue."""

    def __init__(self, devices=2, memory_bytes=1 << 24):
        self.devices, self.memory_bytes = devices, memory_bytes
        self.late, self.status, self.refuse = 0, 0, None
        self.registered, self.opened = {}, []
        self._allocated = {}
        self._events, self._queues = {}, {}
        self._current = threading.local()
        self.cupy = SimpleNamespace(cuda=self._cuda())

    def _cuda(self):
        outer = self

        class Device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                self.before = outer.current
                outer._current.index = self.index

            def __exit__(self, *_):
                outer._current.index = self.before

        class Stream:
            def __init__(self, non_blocking=False):
                assert non_blocking, "it would wait for the default stream"
                self.ptr = len(outer._queues) + 1
                outer._queues[self.ptr] = []

        class Event:
            def __init__(self, disable_timing=False):
                self.ptr = len(outer._events) + 1
                outer._events[self.ptr] = [outer.late, []]

            def record(self, stream):
                outer._check()
                outer._events[self.ptr][1] = outer._queues[stream.ptr]
                outer._queues[stream.ptr] = []

        return SimpleNamespace(Device=Device, Stream=Stream, Event=Event, runtime=self._runtime())

    def _runtime(self):
        names = [name for name in dir(type(self)) if name.startswith("_rt_")]
        return SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
            **{name.removeprefix("_rt_"): getattr(self, name) for name in names},
        )

    @property
    def current(self):
        return getattr(self._current, "index", 0)

    def _check(self):
        if self.refuse is not None:
            raise self.refuse

    def _own(self, pointer, size):
        """The pointer must be of the current device."""
        for start, (device, memory) in self._allocated.items():
            if start <= pointer and pointer + size <= start + len(memory):
                assert device == self.current, "another device is current"
                return
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")

    def _rt_getDeviceCount(self):
        if not self.devices:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.devices

    def _rt_getDeviceProperties(self, index):
        return {"name": b"Simulated CUDA"}

    def _rt_malloc(self, size):
        if size > self.memory_bytes:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        memory = (ctypes.c_char * size)()
        pointer = ctypes.addressof(memory)
        self._allocated[pointer] = (self.current, memory)
        return pointer

    def _rt_free(self, pointer):
        del self._allocated[pointer]

    def _rt_memcpyAsync(self, target, source, size, kind, stream):
        self._check()
        if kind != 1:
            self._own(source, size)
        if kind != 2:
            self._own(target, size)
        self._queues[stream].append((target, source, size))

    def _rt_memcpy(self, target, source, size, kind):
        ctypes.memmove(target, source, size)

    def _rt_eventQuery(self, pointer):
        if self.status:
            return self.status
        event = self._events[pointer]
        if event[0]:
            event[0] -= 1
            return NOT_READY
        for copy in event[1]:
            ctypes.memmove(*copy)
        event[1] = []
        return 0

    def _rt_hostRegister(self, pointer, size, flags):
        if pointer in self.registered:
            raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: part or all of it")
        self.registered[pointer] = (size, flags)

    def _rt_hostUnregister(self, pointer):
        del self.registered[pointer]

    def _rt_ipcGetMemHandle(self, pointer):
        return pointer.to_bytes(8, "little").ljust(64, b"\0")

    def _rt_ipcOpenMemHandle(self, handle):
        pointer = int.from_bytes(handle[:8], "little")
        if pointer not in self._allocated:
            raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer failed")
        self.opened.append(pointer)
        return pointer

    def _rt_ipcCloseMemHandle(self, pointer):
        self.opened.remove(pointer)

    def _rt_deviceGetPCIBusId(self, index):
        return f"0000:0{index}:00.0"

    def _rt_deviceGetByPCIBusId(self, bus_id):
        return int(bus_id.split(":")[1])
