"""Values that lie on the midpoint between two codes, and runs that round them either way.

Two orders of summing give values that differ in their last bits. Where such a value lies on a
midpoint the records differ by a whole code, and all that follows by more than any tolerance for
arithmetic. That is rounding, and no fault, where the same run agrees once the value is rounded the
other way.
"""

from collections.abc import Sequence

import torch

from model_adapter import records

MIDPOINT_DISTANCE_MAX = 1e-5
"""How far a value may lie from where its rounding turns: of its own size, and between two runs of
the largest value beside it."""


def part_at_a_midpoint(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Whether the window codes of two runs differ, first at values on a midpoint.

    `mine`, `theirs`: the window values of both before rounding, [..., head_dim] each, in the order
    of their making; within one of them no value depends on another.
    """
    for a, b in zip(mine, theirs, strict=True):
        codes = [_rounded(v) for v in (a, b)]
        apart = codes[0] != codes[1]
        if apart.any():
            # a sum's last bits are those of its largest terms, however small it is itself
            scale = a.float().abs().amax(-1, keepdim=True).expand_as(a)[apart]
            midpoint = ((codes[0] + codes[1]) / 2)[apart]
            distance = (a.float()[apart] - midpoint).abs()
            return bool((distance <= MIDPOINT_DISTANCE_MAX * scale).all())
    return False


def on_midpoints(values: torch.Tensor) -> list[int]:
    """Flat positions of the values [..., head_dim] whose code turns within the distance."""
    down, up = (_rounded(values * (1 + s * MIDPOINT_DISTANCE_MAX)) for s in (-1, 1))
    return [int(i) for i in (down != up).flatten().nonzero()]


def turn_(values: torch.Tensor, positions: Sequence[int]) -> None:
    """Move values on midpoints, in place, to the side on which they are rounded the other way."""
    flat = values.view(-1)
    before = _rounded(values).view(-1)
    for at in positions:
        kept = flat[at].clone()
        for side in (-1, 1):
            flat[at] = kept * (1 + side * MIDPOINT_DISTANCE_MAX)
            if _rounded(values).view(-1)[at] != before[at]:
                break


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return records.unpack(records.WINDOW, records.pack(records.WINDOW, values))
