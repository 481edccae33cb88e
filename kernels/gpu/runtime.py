"""CuPy, when it is first needed, and the compiled kernels of each device."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

from kernels.gpu.plan import THREADS
from kernels.gpu.source import OPTIONS, device_source

COMPUTE_CAPABILITY_MIN: Final = 80
"""Ampere; the kernels are compiled and checked from there on."""


class GpuUnavailableError(RuntimeError):
    """This process can't use a CUDA device; the message says what is missing."""


@cache
def cupy() -> Any:
    """The CuPy module, with at least one device behind it. `GpuUnavailableError` otherwise."""
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        raise GpuUnavailableError(
            f"CuPy can't be imported ({error}); install ds41-kvstore[cuda13] or [cuda12], as the "
            "driver has it"
        ) from error
    try:
        devices = module.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise GpuUnavailableError(f"CUDA does not answer: {error}") from error
    if devices == 0:
        raise GpuUnavailableError("CUDA sees no device; look at CUDA_VISIBLE_DEVICES")
    return module


def check() -> None:
    """Whether kernels can run here; `GpuUnavailableError` says why not."""
    cupy()


def available() -> bool:
    """Whether kernels can run here."""
    with suppress(GpuUnavailableError):
        check()
        return True
    return False


@cache
def _module(device: int) -> Any:
    cp = cupy()
    capability = int(cp.cuda.Device(device).compute_capability)
    if capability < COMPUTE_CAPABILITY_MIN:
        raise GpuUnavailableError(
            f"device {device} has compute capability {capability / 10}; the kernels need "
            f"{COMPUTE_CAPABILITY_MIN / 10} or more"
        )
    with cp.cuda.Device(device):
        return cp.RawModule(code=device_source(), options=OPTIONS, backend="nvrtc")


@cache
def _function(device: int, name: str) -> Any:
    module = _module(device)
    with cupy().cuda.Device(device):
        return module.get_function(name)


def warm_up(names: Sequence[str], device: int = 0) -> None:
    """Compile and load kernels, which a launch that is being captured must not have to do.

    `names`: as in ``kernels/csrc/device_kernels.h``. Takes seconds the first time on a machine.
    """
    for name in names:
        _function(device, name)


def launch(
    device: int, name: str, grid: tuple[int, ...], args: tuple[Any, ...], shared_bytes: int = 0
) -> None:
    """Queue a kernel on the current stream of the device. Nothing is allocated or waited for."""
    function = _function(device, name)
    with cupy().cuda.Device(device):
        function(grid, (THREADS,), args, shared_mem=shared_bytes)


@contextmanager
def on_stream(device: int, stream: int) -> Iterator[None]:
    """`launch` queues on another library's stream of that device inside. `stream`: its address, 0
    for CUDA's default stream (``torch.cuda.current_stream().cuda_stream``)."""
    cp = cupy()
    with cp.cuda.Device(device), cp.cuda.ExternalStream(stream, device):
        yield


def current_stream(device: int) -> Any:
    """The stream that `launch` would use."""
    cp = cupy()
    with cp.cuda.Device(device):
        return cp.cuda.get_current_stream()
