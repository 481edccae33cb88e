"""Rotary position embedding on the last channels of a vector, adjacent pairs (ds41f §1 rope).

Angles are float32 products of position and frequency, as in the released code: at a million
positions a finer product would turn the vectors of a cache that another engine wrote.
"""

import math

import torch

from model_adapter.config import RopeSpec


def frequencies(spec: RopeSpec, rope_dim: int) -> torch.Tensor:
    """Radians per position, float32 [rope_dim/2]; with YaRN where `spec.factor` is not 1.

    YaRN divides the slow frequencies by the factor and blends linearly between the dimensions
    that turn `beta_fast` and `beta_slow` times over the original length. It changes frequencies
    only; attention is not rescaled.
    """
    plain = spec.theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if spec.factor == 1.0:
        return plain
    low = max(math.floor(_dimension_of(spec.beta_fast, spec, rope_dim)), 0)
    high = min(math.ceil(_dimension_of(spec.beta_slow, spec, rope_dim)), rope_dim - 1)
    # Equal ends would divide by zero; a thousandth makes a step of the ramp.
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _dimension_of(turns: float, spec: RopeSpec, rope_dim: int) -> float:
    """The (fractional) pair whose frequency turns `turns` times over the original length."""
    ratio = spec.original_positions / (turns * 2 * math.pi)
    return rope_dim * math.log(ratio) / (2 * math.log(spec.theta))


def rotations(positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Unit complex numbers [*positions.shape, rope_dim/2], complex64, for `rotate_`."""
    angles = positions.to(torch.float32).unsqueeze(-1) * freqs
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2·rotation.shape[-1] channels of x in place, in float32; returns x.

    x: [..., C] contiguous; rotation broadcasts against [..., pairs]. Pass its conjugate to rotate
    back.
    """
    part = x[..., x.shape[-1] - 2 * rotation.shape[-1] :]
    wide = part.float()
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(rotation)
    if wide is not part:
        part.copy_(wide)
    return x
