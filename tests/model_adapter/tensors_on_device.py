"""A simulated CUDA device for torch: host memory that only operations on that device may touch.

`simulate` gives a process a device `cuda:0`. Its tensors hold real values, so that whatever runs on
it can be compared bit for bit with the CPU. An operation that mixes them with the host's tensors
fails as it would on a GPU. What the host makes or touches is noted together with the module of
`model_adapter` that did it. The record kernels run as the device's own bodies, on the simulated
CuPy of the kernels' tests.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

import device_host
import simulated_cupy

from kernels.gpu import runtime
from kernels.gpu.source import device_source

CUDA = torch.device("cuda", 0)
_TYPES = {torch.float32: "<f4", torch.uint16: "<u2", torch.uint8: "|u1"}
_CROSSINGS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

_EAGER = {torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device. To torch's own code it is one of the meta device, which
    needs no driver."""

    @staticmethod
    def __new__(cls, data):
        # a view of a tensor that was made outside of inference mode has to be like that tensor
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, data.shape, strides=data.stride(), dtype=data.dtype, device="meta"
            )

    def __init__(self, data):
        self.on_host = data

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def data_ptr(self):
        return self.on_host.data_ptr()

    @property
    def __cuda_array_interface__(self):
        return {"typestr": _TYPES[self.dtype], "array": self.on_host}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: the device is simulated no more")


def _is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Functions(TorchFunctionMode):
    """What torch does not dispatch without a driver: making tensors on the device."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        args = list(args)
        kwargs.pop("pin_memory", None)  # needs a driver
        if func is torch.Tensor.to:
            if len(args) > 1 and isinstance(args[1], DeviceTensor):
                kwargs |= {"device": CUDA, "dtype": args.pop(1).dtype}
            elif len(args) > 1 and isinstance(args[1], (str, torch.device)):
                kwargs["device"] = args.pop(1)
        if not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        if func is torch.Tensor.to and isinstance(args[0], DeviceTensor):
            del kwargs["device"]
            return func(*args, **kwargs) if args[1:] or kwargs else args[0]
        kwargs["device"] = "cpu"
        with self._cuda.not_noted(crossing=func is torch.Tensor.to):
            made = func(*args, **kwargs)
        if func is torch.Tensor.to and made is args[0]:
            made = made.clone()
        return DeviceTensor(made)


class SimulatedCuda(TorchDispatchMode):
    """Runs every operation where its tensors are. `on_host`: operations on the host's tensors, by
    the module that made them; `crossings`: copies from the host to the device or back; `largest`:
    bytes of the largest tensor that each made on the device."""

    def __init__(self):
        super().__init__()
        self.on_host: Counter[str] = Counter()
        self.crossings: Counter[str] = Counter()
        self.largest: dict[str, int] = {}
        self._quiet = False

    def enter(self, stack):
        """Let this thread, too, run on the device until `stack` is closed."""
        other = SimulatedCuda()
        other.on_host, other.crossings, other.largest = self.on_host, self.crossings, self.largest
        stack.enter_context(_Functions(other))
        stack.enter_context(other)

    @contextmanager
    def not_noted(self, crossing):
        if crossing:
            self.crossings[_module()] += 1
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _note_size(self, out, here):
        held = {t.on_host.untyped_storage().data_ptr() for t in here}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in held:
                self.largest[_module()] = max(self.largest.get(_module(), 0), t.nbytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [t for t in tensors if isinstance(t, DeviceTensor)]
        if not here:
            if not self._quiet:
                self.on_host[_module()] += 1
            return func(*args, **kwargs)
        mixed = [t for t in tensors if not isinstance(t, DeviceTensor) and t.ndim]
        if mixed and func not in _CROSSINGS:
            raise RuntimeError(f"{func}: a tensor {tuple(mixed[0].shape)} is on cpu, not on cuda:0")
        leaves = "device" in kwargs and kwargs["device"] == torch.device("cpu")
        if mixed or leaves:
            self.crossings[_module()] += 1
        if "device" in kwargs:
            kwargs["device"] = None
        # torch resolves a lazy conjugate above the level of this mode
        func = _EAGER.get(func, func)
        mine = {id(t.on_host): t for t in here}
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        self._note_size(out, here)
        if leaves:
            return out.clone()
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], DeviceTensor):
            return args[0]
        return tree_map(lambda t: mine[id(t)] if id(t) in mine else _on_device(t), out)


def _inner(value):
    return value.on_host if isinstance(value, DeviceTensor) else value


def _on_device(value):
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


def _module() -> str:
    """The innermost module of the adapter on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("model_adapter."):
            return name.removeprefix("model_adapter.")
        frame = frame.f_back
    return "outside"


class _Cupy(simulated_cupy.SimulatedCupy):
    """Takes the simulated device's tensors without a copy."""

    def __init__(self, kernels, cuda):
        super().__init__(kernels)
        self._cuda = cuda

    def asarray(self, array):
        if not isinstance(array, DeviceTensor):
            return simulated_cupy.asarray(array)
        with self._cuda.not_noted(crossing=False):
            return array.__cuda_array_interface__["array"].numpy().view(simulated_cupy.ndarray)


@contextmanager
def _on_stream(cuda):
    """Work of another thread: torch's modes are each thread's own."""
    with ExitStack() as stack:
        cuda.enter(stack)
        yield


def host_kernels(config):
    """The kernels' bodies, built for the host once per checkout; skips where there is no g++."""
    if not device_host.has_compiler():
        pytest.skip("needs g++ to run the device kernels' bodies on the host")
    return device_host.build(config.cache.mkdir("device-kernels"))


@contextmanager
def simulate(kernels):
    """A device `cuda:0`, inside; gives the `SimulatedCuda`. `kernels`: those of `host_kernels`."""
    cuda = SimulatedCuda()
    cupy = _Cupy(kernels, cuda)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda _: None)
    caches = (runtime._module, runtime._function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "cupy", lambda: cupy)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "Stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "stream", lambda _: _on_stream(cuda))
        for cached in caches:
            cached.cache_clear()
        assert device_source()
        try:
            with ExitStack() as stack:
                stack.enter_context(_Functions(cuda))
                yield stack.enter_context(cuda)
        finally:
            for cached in caches:
                cached.cache_clear()
