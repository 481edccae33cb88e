"""A simulated CUDA device with CuPy's names: host memory, and the kernels' bodies run by the host.

Only what `kernels.gpu` uses, with CuPy's meaning as documented. Launches run at once, unless the
stream is being captured; then they run whenever the graph is launched, with the arguments and the
grid that were captured.
"""

import ctypes
import time

import numpy as np


class Pointer:
    def __init__(self, array):
        self._array = array

    @property
    def ptr(self):
        return self._array.__array_interface__["data"][0]

    def copy_from_host_async(self, address, nbytes, stream):
        assert nbytes <= self._array.nbytes
        stream.launch(lambda: ctypes.memmove(self.ptr, address, nbytes))

    def copy_from_device_async(self, source, nbytes, stream):
        self.copy_from_host_async(source.ptr, nbytes, stream)


class ndarray(np.ndarray):  # noqa: N801
    """On the simulated device 0."""

    @property
    def data(self):
        return Pointer(self)

    @property
    def device(self):
        return Device(0)


def empty(shape, dtype):
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(nbytes + 256, 0xD5, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes].view(dtype).reshape(shape).view(ndarray)


def zeros(shape, dtype):
    array = empty(shape, dtype)
    array[...] = 0
    return array


def asarray(array):
    out = empty(array.shape, array.dtype)
    out[...] = array
    return out


def asnumpy(array):
    return np.array(array.view(np.ndarray))


class Device:
    def __init__(self, number):
        self.id = number
        self.compute_capability = "90"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Graph:
    def __init__(self, operations):
        self._operations = operations

    def launch(self, stream):
        for operation in self._operations:
            stream.launch(operation)


class Stream:
    def __init__(self):
        self._captured = None

    def launch(self, operation):
        if self._captured is None:
            operation()
        else:
            self._captured.append(operation)

    def is_capturing(self):
        return self._captured is not None

    def begin_capture(self):
        self._captured = []

    def end_capture(self):
        graph, self._captured = Graph(self._captured), None
        return graph

    def synchronize(self):
        assert self._captured is None

    def __enter__(self):
        cuda.current, self._before = self, cuda.current
        return self

    def __exit__(self, *_):
        cuda.current = self._before


class ExternalStream(Stream):
    """Another library's stream; there is but one order here."""

    def __init__(self, ptr, device_id=-1):
        super().__init__()
        self.ptr, self.device_id = ptr, device_id


class Event:
    def __init__(self, disable_timing=False):
        self.at_s = None

    def record(self, stream):
        assert not stream.is_capturing()
        self.at_s = time.perf_counter()

    def synchronize(self):
        pass


class cuda:  # noqa: N801
    Device, Stream, Event = Device, Stream, Event
    ExternalStream = ExternalStream
    current = Stream()

    class runtime:  # noqa: N801
        @staticmethod
        def getDeviceCount():  # noqa: N802
            return 1

        @staticmethod
        def getDeviceProperties(device):  # noqa: N802
            assert device == 0
            return {"name": b"simulated"}

    @staticmethod
    def get_elapsed_time(before, behind):
        return 1e3 * (behind.at_s - before.at_s)

    @staticmethod
    def get_current_stream():
        return cuda.current

    @staticmethod
    def alloc_pinned_memory(nbytes):
        return memoryview(bytearray(nbytes))


class SimulatedCupy:
    """Stands for the module. `host`: the kernels' bodies (device_host.HostKernels)."""

    ndarray, cuda = ndarray, cuda
    empty, zeros = staticmethod(empty), staticmethod(zeros)
    asarray, asnumpy = staticmethod(asarray), staticmethod(asnumpy)

    def __init__(self, host):
        self._host = host
        self.launches = []

    def RawModule(self, code, options, backend):  # noqa: N802
        assert backend == "nvrtc"
        assert isinstance(options, tuple)
        assert "quantize_nvfp4_float32" in code
        return self

    def get_function(self, name):
        def function(grid, block, args, *, shared_mem=0):
            assert block == (128,)
            values = [a.data.ptr if isinstance(a, ndarray) else int(a) for a in args]
            self.launches.append((name, grid))
            cuda.current.launch(lambda: self._run(name, grid, values, shared_mem))

        return function

    def _run(self, name, grid, args, shared_mem):
        if name.startswith(("quantize", "dequantize")):
            self._host.run_convert(name, grid[0], shared_mem, args)
        elif name == "checksum":
            self._host.run_checksum(grid[0], args)
        else:
            self._host.run_move(name, grid, args)
