"""Weights by name in the dtype that the model computes in, dequantised when first used.

What is quantised, or lies in another dtype than the model's, has to be converted; the results are
kept up to a budget of bytes, and so is, for a model on a GPU, whatever it uses, copied there. What
every token needs is kept first: the layers come round in turn, and of a ring that does not fit,
dropping the least recently used would drop each just before its use. Experts are converted by
demand and share the rest, the least recently used dropped first.
Everything else is a view into the mapped shards, whose pages the kernel may drop: it costs the
process no memory of its own. Tables with one row per token or n-gram are never converted whole:
their rows are gathered from the mapping. Conversion is the CPU's, whatever the device.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch

from model_adapter import quantized
from model_adapter.checkpoint import Checkpoint
from model_adapter.devices import CPU
from model_adapter.errors import TensorError

WEIGHT_CACHE_BYTES_MAX_DEFAULT = 4 << 30

_Key = str | tuple[str, torch.dtype]


class Weights:
    """Tensors of a `Checkpoint` on a device, with a bounded memory.

    `cached_bytes` is what the converted tensors, and a GPU's copies, hold now; it never exceeds
    `cache_bytes_max`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        cache_bytes_max: int = WEIGHT_CACHE_BYTES_MAX_DEFAULT,
        device: torch.device = CPU,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.cache_bytes_max = cache_bytes_max
        self.cached_bytes = 0
        self._views: dict[str, torch.Tensor] = {}
        self._steady: dict[_Key, tuple[torch.Tensor, ...]] = {}
        self._steady_bytes = 0
        self._by_demand: OrderedDict[_Key, tuple[torch.Tensor, ...]] = OrderedDict()

    def vector(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An unquantised tensor under its whole name, in `dtype` (default: float32)."""
        dtype = dtype or torch.float32
        view = self._view(name)
        if view.dtype == dtype and self.device == CPU:
            return view
        return self._cached((name, dtype), lambda: (view.to(dtype),))[0]

    def matrix(self, name: str) -> torch.Tensor:
        """`{name}.weight`, [out, in], dequantised with `{name}.scale` where it has one."""
        weight = f"{name}.weight"
        if f"{name}.scale" not in self.checkpoint:
            return self.vector(weight, self.dtype)
        return self._cached(weight, lambda: (self._dequantize(name),))[0]

    def stacked(self, key: str, *names: str, by_demand: bool) -> tuple[torch.Tensor, ...]:
        """Several matrices kept as one entry: all but the last stacked by rows, then the last.

        That is what an expert is: w1 and w3 see the same input, so one product serves both.
        `by_demand`: not every token needs it.
        """

        def convert() -> tuple[torch.Tensor, ...]:
            parts = [self._dequantize(name) for name in names]
            return torch.cat(parts[:-1]), parts[-1]

        return self._cached(key, convert, by_demand)

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the table `{name}.weight`: [*indices.shape, columns] in the model's dtype.

        `indices`: on the host, where the table is.
        """
        codes = self._view(f"{name}.weight")
        if f"{name}.scale" not in self.checkpoint:
            return codes[indices].to(self.dtype).to(self.device)
        scale = self._view(f"{name}.scale")
        picked = codes.view(torch.uint8)[indices].view(codes.dtype)
        picked_scale = scale.view(torch.uint8)[indices].view(scale.dtype)
        return quantized.dequantize_fp8_rows(picked, picked_scale, self.dtype).to(self.device)

    def _view(self, name: str) -> torch.Tensor:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self.checkpoint.tensor(name)
        return view

    def _dequantize(self, name: str) -> torch.Tensor:
        codes = self.checkpoint.tensor(f"{name}.weight")
        if f"{name}.scale" not in self.checkpoint:
            return codes.to(self.dtype)
        scale = self.checkpoint.tensor(f"{name}.scale")
        if codes.dtype == torch.float8_e4m3fn:
            return quantized.dequantize_fp8_blocks(codes, scale, self.dtype)
        if codes.dtype in (torch.int8, torch.uint8):
            return quantized.dequantize_fp4(codes, scale, self.dtype)
        where = self.checkpoint.where(f"{name}.weight")
        raise TensorError(
            f"{name}.weight in {where} has a scale but is {codes.dtype}; scales go with FP8 or FP4"
        )

    def _cached(
        self, key: _Key, convert: Callable[[], tuple[torch.Tensor, ...]], by_demand: bool = False
    ) -> tuple[torch.Tensor, ...]:
        if key in self._steady:
            return self._steady[key]
        if key in self._by_demand:
            self._by_demand.move_to_end(key)
            return self._by_demand[key]
        entry = tuple(tensor.to(self.device) for tensor in convert())
        size = _bytes(entry)
        if self._steady_bytes + size > self.cache_bytes_max:
            return entry
        while self.cached_bytes + size > self.cache_bytes_max:
            _, dropped = self._by_demand.popitem(last=False)
            self.cached_bytes -= _bytes(dropped)
        self.cached_bytes += size
        if by_demand:
            self._by_demand[key] = entry
        else:
            self._steady[key] = entry
            self._steady_bytes += size
        return entry


def _bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
