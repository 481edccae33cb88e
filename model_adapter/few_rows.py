"""Passes over few positions, in which no position's result depends on the others.

Decoding alone, in a batch, or over drafted tokens that are verified together must leave the same
bytes behind. Two things in torch's CPU kernels make a row's bits depend on the rows beside it: a
matrix product sums in an order that its whole shape decides, and an elementwise function computes
what is left over behind the last full SIMD vector by another formula. In a pass of at most
`FEW_ROWS_MAX` rows such steps therefore take one row at a time, which is the very call that a lone
row makes. For so few rows that costs no more than one product over all of them; every other step
runs over all rows at once.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

FEW_ROWS_MAX = 8


def by_row(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`f(*tensors)`, row by row where there are few rows.

    `f` maps tensors with T rows each to one with T rows, every row for itself. Rows are handed out
    as copies: a kernel may sum in another order at another alignment.
    """
    if not 1 < len(tensors[0]) <= FEW_ROWS_MAX:
        return f(*tensors)
    rows = zip(*(t.split(1) for t in tensors), strict=True)
    return torch.cat([f(*(part.clone() for part in row)) for row in rows])


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] times weight [out, in]ᵀ: [T, out]."""
    return by_row(lambda row: functional.linear(row, weight), x)


def queries_per_step(count: int, most: int) -> int:
    """How many of `count` queries to take at once, where more than few may take up to `most`."""
    return 1 if count <= FEW_ROWS_MAX else most
