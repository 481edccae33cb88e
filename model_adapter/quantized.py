"""Dequantising weights (ds41f §3): e4m3 and e2m1 codes with power-of-two scales.

Every product is exact in float32; in bfloat16 too, since an e4m3 or e2m1 code has fewer
significant bits.
"""

import torch

from model_adapter.checkpoint_spec import SCALE_GROUP

FP8_DTYPE = "F8_E4M3"
SCALE_DTYPE = "F8_E8M0"
FP4_DTYPES = frozenset({"I8", "U8"})
PLAIN_DTYPES = frozenset({"BF16", "F32", "F16"})

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1_PAIRS = torch.stack(
    [
        torch.cat([_E2M1, -_E2M1]).repeat(16),
        torch.cat([_E2M1, -_E2M1]).repeat_interleave(16),
    ],
    dim=1,
)
"""Byte → its two values, low nibble (the even column) first."""


def dequantize_fp8_blocks(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """e4m3 [rows, columns] with one ue8m0 scale per 32×32 block, [⌈rows/32⌉, ⌈columns/32⌉]."""
    rows, columns = codes.shape
    factor = scale.float().repeat_interleave(SCALE_GROUP, 1)[:, :columns]
    values = codes.float()
    for first in range(0, rows, SCALE_GROUP):
        values[first : first + SCALE_GROUP] *= factor[first // SCALE_GROUP]
    return values.to(dtype)


def dequantize_fp8_rows(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """e4m3 [..., columns] with one ue8m0 scale per row and 32 columns, [..., columns/32]."""
    groups = codes.float().unflatten(-1, (-1, SCALE_GROUP))
    return (groups * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_fp4(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 packed two per byte, [rows, columns/2], with one ue8m0 scale per row and 32 columns.

    Returns [rows, columns].
    """
    values = _E2M1_PAIRS[codes.view(torch.uint8).int()].flatten(-2)
    groups = values.unflatten(-1, (-1, SCALE_GROUP)).mul_(scale.float().unsqueeze(-1))
    return groups.flatten(-2).to(dtype)
