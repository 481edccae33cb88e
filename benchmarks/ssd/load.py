"""One size of object, how it is asked for, and what came of a round."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore import DS41F_LAYOUT
from kvstore.tiers.frame import frame_bytes

BLOCK = DS41F_LAYOUT.section_bytes
SHAPES: dict[str, tuple[int, ...]] = {
    "section 8,704": (8_704,),
    "section 17,408": (17_408,),
    "section 36,864": (36_864,),
    "section 73,728": (73_728,),
    "block 227,840": tuple(BLOCK),
}
BATCH = 64
"""Objects of one durable batch, and of a prefix that is read in one piece."""


@dataclass(frozen=True, slots=True)
class Load:
    """`objects`: how many lie on the disk. `calls`: per client and round. `depth`: reads under way
    per client."""

    sections: tuple[int, ...]
    objects: int
    calls: int
    clients: int
    depth: int

    @property
    def payload(self) -> int:
        """Useful bytes of an object."""
        return sum(self.sections)

    @property
    def stored(self) -> int:
        """Bytes of its frame."""
        return frame_bytes(self.sections).total


@dataclass(slots=True)
class Figures:
    """What one contestant did: GB/s of payload per round, latencies in µs of single requests (where
    it tells: p99 per round)."""

    gb_s: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)

    def add(self, gb_s: float, p99_us: float | None = None) -> None:
        """One round's."""
        self.gb_s.append(gb_s)
        if p99_us is not None:
            self.p99_us.append(p99_us)

    def as_json(self) -> dict[str, Any]:
        """Medians, and the rounds."""
        out: dict[str, Any] = {"gb_s": statistics.median(self.gb_s), "rounds_gb_s": self.gb_s}
        if self.p99_us:
            out["p99_us"] = statistics.median(self.p99_us)
        return out


def percentile_99(values: Sequence[float]) -> float:
    """The value that one in a hundred is above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def median_ratio(ours: Sequence[float], limit: Sequence[float]) -> float:
    """The median of the rounds' ratios: neighbours in time are compared."""
    return statistics.median(a / b for a, b in zip(ours, limit, strict=True))
