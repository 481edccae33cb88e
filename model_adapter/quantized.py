"""Dequantising weights (ds41f §3): e4m3 and e2m1 codes with power-of-two scales.

Every product is exact in float32; in bfloat16 too, since an e4m3 or e2m1 code has fewer
significant bits. A row's codes with the row's scales behind them are a cache record (ds41f §4), so
that the record codecs do the work, some rows at a time: what is held besides the result is small.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

import kernels
from model_adapter.checkpoint_spec import SCALE_GROUP

FP8_DTYPE = "F8_E4M3"
SCALE_DTYPE = "F8_E8M0"
FP4_DTYPES = frozenset({"I8", "U8"})
PLAIN_DTYPES = frozenset({"BF16", "F32", "F16"})

RECORD_BYTES_MAX = 1 << 20
"""Bounds the records assembled at once."""

_Bytes = npt.NDArray[np.uint8]


def dequantize_fp8_blocks(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """e4m3 [rows, columns] with one ue8m0 scale per 32×32 block, [⌈rows/32⌉, ⌈columns/32⌉].

    `dtype` here and below: float32 or bfloat16.
    """
    rows, columns = codes.shape
    per_row = np.repeat(_bytes(scale), SCALE_GROUP, axis=0)[:rows]
    packed = _bytes(codes)
    if columns % SCALE_GROUP:
        packed = np.pad(packed, ((0, 0), (0, -columns % SCALE_GROUP)))
    return _decoded(kernels.fp8_dequantize, packed, per_row, dtype)[:, :columns].contiguous()


def dequantize_fp8_rows(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """e4m3 [..., columns] with one ue8m0 scale per row and 32 columns, [..., columns/32]."""
    values = _decoded(
        kernels.fp8_dequantize, _bytes(codes.flatten(0, -2)), _bytes(scale.flatten(0, -2)), dtype
    )
    return values.view(codes.shape)


def dequantize_fp4(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 packed two per byte, [rows, columns/2], with one ue8m0 scale per row and 32 columns.

    Returns [rows, columns].
    """
    return _decoded(kernels.mxfp4_dequantize, _bytes(codes), _bytes(scale), dtype)


def _bytes(tensor: torch.Tensor) -> _Bytes:
    return tensor.view(torch.uint8).numpy()


def _decoded(
    decode: Callable[..., object], codes: _Bytes, scales: _Bytes, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of codes and of scales, both [rows, …], through a record codec."""
    rows, groups = scales.shape
    values = torch.empty((rows, groups * SCALE_GROUP), dtype=dtype)
    name, out = "float32", values
    if dtype == torch.bfloat16:
        name, out = "bfloat16", values.view(torch.uint16)
    target = out.numpy()
    step = max(1, RECORD_BYTES_MAX // (codes.shape[1] + groups))
    for at in range(0, rows, step):
        part = slice(at, at + step)
        decode(np.concatenate([codes[part], scales[part]], axis=1), name, out=target[part])
    return values
