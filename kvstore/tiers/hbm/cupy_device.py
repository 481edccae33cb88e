"""CUDA devices through CuPy. The only module of the service that imports it, when first needed.

Each device's pool is one `cudaMalloc`, so that its IPC handle is of the whole. Streams do not
synchronise with the default stream. Every call makes its device the thread's current one first:
CUDA keeps that per thread.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvstore.tiers.hbm.device import CUDA, Device, DeviceError, NoDevice, PoolHandle

_POLL_S_MIN, _POLL_S_MAX = 20e-6, 1e-3
_ERROR_NOT_READY = 600
_IPC_HANDLE_BYTES = 64
_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices, not for the current one alone."""
_ALREADY_REGISTERED = "cudaErrorHostMemoryAlreadyRegistered"


def _cupy() -> Any:
    """CuPy. Raises `NoDevice` where it is not installed, or its libraries do not load."""
    try:
        import cupy
    except ImportError as e:
        raise NoDevice(f"CuPy can't be imported ({e}); install the extra cuda12 or cuda13") from e
    return cupy


def find_devices(indices: Sequence[int]) -> list[Device]:
    """Devices by index. Raises `NoDevice` where CuPy, the driver or one of them is missing."""
    cupy = _cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        raise NoDevice(f"there is no CUDA device here ({e})") from e
    missing = [i for i in indices if i >= count]
    if missing:
        raise NoDevice(f"there are {count} CUDA devices here, and no device {missing[0]}")
    return [CupyDevice(cupy, i) for i in indices]


def _address(buffer: memoryview) -> int:
    """Where a buffer lies; also of one that can't be written."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class CupyEvent:
    """See `Event`."""

    def __init__(self, device: "CupyDevice", stream: Any) -> None:
        self._device = device
        with device.current():
            self._event = device.cupy.cuda.Event(disable_timing=True)
            self._event.record(stream)

    def done(self) -> bool:
        with self._device.current():
            # CuPy gives the status back as it is: an error is not raised, and is not "not yet"
            status = int(self._device.cupy.cuda.runtime.eventQuery(self._event.ptr))
        if status not in (0, _ERROR_NOT_READY):
            raise DeviceError(f"{self._device.name}: copies failed with CUDA error {status}")
        return status == 0

    def wait(self, timeout_s: float) -> bool:
        ends_s = time.monotonic() + timeout_s
        pause_s = _POLL_S_MIN
        while not self.done():
            if time.monotonic() >= ends_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
        return True


class CupyStream:
    """See `Stream`."""

    def __init__(self, device: "CupyDevice") -> None:
        self._device = device
        with device.current():
            self._stream = device.cupy.cuda.Stream(non_blocking=True)

    def copy_in(self, offset: int, source: memoryview) -> None:
        kind = self._device.cupy.cuda.runtime.memcpyHostToDevice
        self._copy(self._device.address(offset, len(source)), _address(source), len(source), kind)

    def copy_out(self, into: memoryview, offset: int) -> None:
        kind = self._device.cupy.cuda.runtime.memcpyDeviceToHost
        self._copy(_address(into), self._device.address(offset, len(into)), len(into), kind)

    def copy_within(self, to: int, offset: int, length: int) -> None:
        kind = self._device.cupy.cuda.runtime.memcpyDeviceToDevice
        address = self._device.address
        self._copy(address(to, length), address(offset, length), length, kind)

    def _copy(self, target: int, source: int, length: int, kind: int) -> None:
        with self._device.current():
            self._device.cupy.cuda.runtime.memcpyAsync(
                target, source, length, kind, self._stream.ptr
            )

    def record(self) -> CupyEvent:
        return CupyEvent(self._device, self._stream)


class _Current:
    """Makes a device the thread's current one; CUDA's errors leave as `DeviceError`."""

    def __init__(self, device: "CupyDevice") -> None:
        self._device = device
        self._context = device.cupy.cuda.Device(device.index)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        if isinstance(error, self._device.errors):
            raise DeviceError(f"{self._device.name}: {error}") from error


class CupyDevice:
    """See the module and `Device`."""

    kind = CUDA

    def __init__(self, cupy: Any, index: int) -> None:
        self.cupy, self.index = cupy, index
        runtime = cupy.cuda.runtime
        self.errors = (runtime.CUDARuntimeError, MemoryError)
        name = runtime.getDeviceProperties(index)["name"]
        card = name.decode() if isinstance(name, bytes) else str(name)
        self.name = f"{card} (CUDA device {index})"
        self._pool = self._size = 0
        self._exported = False
        self._registered: list[int] = []

    def current(self) -> _Current:
        """For `with`: the device is the thread's current one."""
        return _Current(self)

    def address(self, offset: int, length: int) -> int:
        """Of a range of the pool. Raises `DeviceError` where it leaves it."""
        if offset < 0 or offset + length > self._size:
            raise DeviceError(f"{self.name}: {length} B from {offset} on leave the pool")
        return self._pool + offset

    def allocate(self, size_bytes: int) -> None:
        if self._pool:
            raise DeviceError(f"{self.name}: the pool was allocated already")
        with self.current():
            self._pool = self.cupy.cuda.runtime.malloc(size_bytes)
        self._size = size_bytes

    def register(self, host: memoryview) -> None:
        address = _address(host)
        try:
            with self.current():
                self.cupy.cuda.runtime.hostRegister(address, len(host), _REGISTER_PORTABLE)
        except DeviceError as e:
            if _ALREADY_REGISTERED in str(e):
                return  # by another device: once is for all
            raise
        self._registered.append(address)

    def stream(self) -> CupyStream:
        return CupyStream(self)

    def export(self) -> PoolHandle:
        runtime = self.cupy.cuda.runtime
        with self.current():
            handle = runtime.ipcGetMemHandle(self._pool)
            # indices differ between processes (CUDA_VISIBLE_DEVICES), bus ids do not
            self._exported = True
            bus_id = str(runtime.deviceGetPCIBusId(self.index))
        return PoolHandle(self.kind, self.index, self._size, bytes(handle) + bus_id.encode())

    def pool(self) -> "CupyPool":
        # a handle of CUDA's can't be opened by the process that made it
        handle = PoolHandle(self.kind, self.index, self._size, b"")
        return CupyPool(self.cupy, handle, self.index, self._pool)

    def close(self) -> None:
        runtime = self.cupy.cuda.runtime
        with self.current():
            for address in self._registered:
                runtime.hostUnregister(address)
            self._registered.clear()
            # what other processes may have open is not to be freed under them (CUDA leaves
            # undefined what happens then); it goes with this process
            if self._pool and not self._exported:
                runtime.free(self._pool)
            self._pool = self._size = 0


class CupyPool:
    """A pool at an address of this process, on CUDA device `device`. See `OpenedPool`."""

    def __init__(self, cupy: Any, handle: PoolHandle, device: int, address: int) -> None:
        self.handle = handle
        self._cupy = cupy
        self._device = device
        self._address = address
        self._errors = cupy.cuda.runtime.CUDARuntimeError

    def array(self, offset: int, length: int) -> Any:
        if offset < 0 or offset + length > self.handle.size_bytes:
            raise DeviceError(f"{length} B from {offset} on leave the pool")
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(
            self._address + offset, length, owner=self, device_id=self._device
        )
        with cuda.Device(self._device):
            return self._cupy.ndarray((length,), self._cupy.uint8, cuda.MemoryPointer(memory, 0))

    def copy_out(self, into: memoryview, offset: int) -> None:
        if offset < 0 or offset + len(into) > self.handle.size_bytes:
            raise DeviceError(f"{len(into)} B from {offset} on leave the pool")
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._device):
                runtime.memcpy(
                    _address(into), self._address + offset, len(into), runtime.memcpyDeviceToHost
                )
        except self._errors as e:
            raise DeviceError(f"CUDA device {self._device}: {e}") from e

    def close(self) -> None:
        """Nothing to let go of: the memory is its device's."""


class IpcPool(CupyPool):
    """Another process's pool, opened by its CUDA IPC handle. Raises `DeviceError`."""

    def __init__(self, handle: PoolHandle) -> None:
        cupy = _cupy()
        runtime = cupy.cuda.runtime
        ipc, bus_id = handle.handle[:_IPC_HANDLE_BYTES], handle.handle[_IPC_HANDLE_BYTES:]
        try:
            device = int(runtime.deviceGetByPCIBusId(bus_id.decode()))
            with cupy.cuda.Device(device):
                address = int(runtime.ipcOpenMemHandle(ipc))
        except Exception as e:
            raise DeviceError(f"the pool of CUDA device {bus_id!r} can't be opened: {e}") from e
        super().__init__(cupy, handle, device, address)

    def close(self) -> None:
        with suppress(self._errors), self._cupy.cuda.Device(self._device):
            self._cupy.cuda.runtime.ipcCloseMemHandle(self._address)
