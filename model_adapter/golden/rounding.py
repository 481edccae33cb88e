"""Whether two runs of one computation part by a rounding that turned, or by a fault.

Two orders of summing give values that differ in their last bits. Where such a value lies on the
midpoint between two codes the records differ by a whole code, and all that follows by more than any
tolerance for arithmetic. Then the earliest codes that differ must come from values on a midpoint.
"""

from collections.abc import Sequence

import torch

from model_adapter import records

MIDPOINT_DISTANCE_MAX = 1e-5
"""How far, of its own size, a value may lie from where its rounding turns."""


def part_at_a_midpoint(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Whether the window codes of two runs differ, first at values on a midpoint.

    `mine`, `theirs`: the window values of both before rounding, [..., head_dim] each, in the order
    of their making; within one of them no value depends on another.
    """
    for a, b in zip(mine, theirs, strict=True):
        codes = [records.unpack(records.WINDOW, records.pack(records.WINDOW, v)) for v in (a, b)]
        apart = codes[0] != codes[1]
        if apart.any():
            midpoint = ((codes[0] + codes[1]) / 2)[apart]
            distance = (a.float()[apart] - midpoint).abs()
            return bool((distance <= MIDPOINT_DISTANCE_MAX * midpoint.abs()).all())
    return False
