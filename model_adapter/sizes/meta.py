"""A checkpoint without bytes: every tensor of a config on torch's meta device.

Names, shapes on disk and dtypes are those of the real one, so that whatever looks only at these
takes it for real: the checkpoint's check, the model's construction, the size of the whole.
"""

from collections.abc import Iterator

import torch

from model_adapter.checkpoint import Checkpoint
from model_adapter.checkpoint_spec import Encoding, TensorSpec, tensor_specs
from model_adapter.config import ModelConfig

_DTYPES = {
    Encoding.BF16: (torch.bfloat16, "BF16"),
    Encoding.FP32: (torch.float32, "F32"),
    Encoding.FP8_BLOCK: (torch.float8_e4m3fn, "F8_E4M3"),
    Encoding.FP8_ROW: (torch.float8_e4m3fn, "F8_E4M3"),
    Encoding.FP4_ROW: (torch.int8, "I8"),
}
_SCALE_DTYPE = (torch.float8_e8m0fnu, "F8_E8M0")

_Form = tuple[tuple[int, ...], torch.dtype, str]


class MetaCheckpoint(Checkpoint):
    """The checkpoint that `config` describes, of any size, in no memory. Reading a value fails."""

    def __init__(self, config: ModelConfig) -> None:
        self._forms = {
            name: form for spec in tensor_specs(config.raw) for name, form in _disk_forms(spec)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._forms

    def names(self) -> list[str]:
        """Names of all tensors, scales included."""
        return list(self._forms)

    def where(self, name: str) -> str:
        """A tensor lies nowhere."""
        return "the meta device"

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the meta device with the shape and dtype it has on disk."""
        shape, dtype, _ = self._forms[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape on disk and safetensors dtype name."""
        shape, _, dtype = self._forms[name]
        return shape, dtype


def _disk_forms(spec: TensorSpec) -> Iterator[tuple[str, _Form]]:
    yield spec.name, (spec.code_shape, *_DTYPES[spec.encoding])
    if spec.scale_shape is not None:
        yield spec.scale_name, (spec.scale_shape, *_SCALE_DTYPE)
