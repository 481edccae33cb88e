"""Top-k with a fixed order among equals: the lower number first.

Scores and numbers are packed into one int64 each, whose order is that of the scores, and among
equal scores the reverse of the numbers. No two are equal then, so that the choice does not depend
on how the candidates were split into chunks.
"""

import torch

from model_adapter.devices import CPU

_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1
NEVER = torch.iinfo(torch.int64).min
"""Sorts behind everything: what may not be chosen."""
ALWAYS = torch.iinfo(torch.int64).max
"""Sorts before every score."""


def packed(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """float32 scores [..., N] and numbers int64 [N] below 2³² to int64 [..., N].

    −∞ becomes `NEVER`.
    """
    bits = (scores + 0.0).view(torch.int32)  # −0 + 0 is +0: both zeros are equal scores
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ordered.long().bitwise_left_shift_(_LOW_BITS).bitwise_or_(_LOW_MASK - numbers)
    return keys.masked_fill_(scores == -torch.inf, NEVER)


def unpacked(keys: torch.Tensor) -> torch.Tensor:
    """The numbers behind `packed` keys, ascending along the last axis, −1 behind the last."""
    numbers = _LOW_MASK - (keys & _LOW_MASK)
    return ascending(numbers.masked_fill_(keys == NEVER, -1))


def ascending(numbers: torch.Tensor) -> torch.Tensor:
    """Sort int64 [..., k] ascending with every −1 behind the rest."""
    last = torch.iinfo(torch.int64).max
    ordered = numbers.masked_fill(numbers < 0, last).sort(dim=-1).values
    return ordered.masked_fill_(ordered == last, -1)


class RunningTopK:
    """The best k of candidates that come in chunks, per row."""

    def __init__(self, rows: int, k: int, device: torch.device = CPU) -> None:
        self._k = k
        self._best = torch.empty((rows, 0), dtype=torch.int64, device=device)

    def add(self, keys: torch.Tensor) -> None:
        """`packed` keys [rows, N]."""
        keys = torch.cat([self._best, keys], dim=1)
        if keys.shape[1] > self._k:
            keys = keys.topk(self._k, dim=1, sorted=False).values
        self._best = keys

    def numbers(self) -> torch.Tensor:
        """int64 [rows, ≤ k], ascending, −1 behind the last."""
        return unpacked(self._best)
