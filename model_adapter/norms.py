"""RMSNorm in float32 (ds41f §2 Norm)."""

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., C] of any dtype, weight float32 [C]; the result has x's dtype.

    Squares, mean, scaling and weight in float32; one rounding at the end.
    """
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1/√(mean(x²)+eps) over the last axis, float32 [..., 1]."""
    return x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()
