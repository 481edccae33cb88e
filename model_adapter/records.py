"""Packed cache records from and to tensors: the adapter's side of `kernels` (ds41f §4)."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

import kernels

Records = npt.NDArray[np.uint8]
Kind = Literal["nvfp4", "mxfp4", "fp8"]

MAIN: Kind = "nvfp4"
INDEX: Kind = "mxfp4"
WINDOW: Kind = "fp8"

_QUANTIZE = {
    MAIN: kernels.nvfp4_quantize,
    INDEX: kernels.mxfp4_quantize,
    WINDOW: kernels.fp8_quantize,
}
_DEQUANTIZE = {
    MAIN: kernels.nvfp4_dequantize,
    INDEX: kernels.mxfp4_dequantize,
    WINDOW: kernels.fp8_dequantize,
}


def pack(kind: Kind, values: torch.Tensor) -> Records:
    """float32 or bfloat16 [..., D] on the CPU to records uint8 [..., record bytes]."""
    values = values.contiguous()
    if values.dtype == torch.bfloat16:
        return _QUANTIZE[kind](values.view(torch.int16).numpy().view(np.uint16))
    return _QUANTIZE[kind](values.numpy())


def unpack(kind: Kind, records: Records) -> torch.Tensor:
    """Records uint8 [..., record bytes] to float32 [..., D]; exact, whatever the model's dtype."""
    return torch.from_numpy(_DEQUANTIZE[kind](np.ascontiguousarray(records)))
