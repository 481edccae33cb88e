"""One comparison and its outcome."""

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch


class Part(Enum):
    """How the tensor was computed: by the whole network, or by one block fed from the vectors."""

    END_TO_END = "end to end"
    BLOCKS = "block by block"


class Status(Enum):
    """OK and FAIL: against the tolerance. INFO: compared, but no tolerance holds for it."""

    OK = "ok"
    FAIL = "FAIL"
    INFO = "info"
    NOT_COVERED = "not covered"


@dataclass(frozen=True, slots=True)
class Result:
    """`error`: ‖a−b‖/‖b‖, or the share of unequal elements for integers (`measure` says which).

    `tolerance` None: nothing is promised. `error` None: not covered. `spread`: how far the model's
    own results lie apart, in the same measure, when it sums in another order; where it was asked.
    `turned`: values on a rounding midpoint that were rounded the other way for this error.
    """

    part: Part
    key: str
    measure: str
    error: float | None
    tolerance: float | None
    spread: float | None = None
    turned: int = 0

    @property
    def status(self) -> Status:
        """What the numbers mean."""
        if self.error is None:
            return Status.NOT_COVERED
        if self.tolerance is None:
            return Status.INFO
        # A NaN is within no tolerance.
        return Status.OK if self.error <= self.tolerance else Status.FAIL

    def as_json(self) -> dict[str, Any]:
        """A row of `--json`."""
        return asdict(self) | {"part": self.part.value, "status": self.status.value}


def relative(
    part: Part, key: str, mine: torch.Tensor, theirs: torch.Tensor, tolerance: float | None
) -> Result:
    """Relative error of two float tensors; a shape that differs is an infinite error."""
    return Result(part, key, "relative error", _relative(mine, theirs), tolerance)


def equal(
    part: Part, key: str, mine: torch.Tensor, theirs: torch.Tensor, tolerance: float | None
) -> Result:
    """Share of unequal elements of two integer tensors."""
    share = 1.0
    mine = mine.cpu()
    if mine.shape == theirs.shape:
        share = float((mine.long() != theirs.long()).double().mean())
    return Result(part, key, "share unequal", share, tolerance)


def not_covered(key: str) -> Result:
    """A key that nothing here computes."""
    return Result(Part.END_TO_END, key, "", None, None)


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    a, b = mine.cpu().double(), theirs.cpu().double()
    scale = float(b.norm())
    difference = float((a - b).norm())
    return difference / scale if scale else difference
