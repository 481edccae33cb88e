"""What `Gittins` knows of blocks, in columns; also of blocks that have gone, within bounds."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_REMEMBERED: Final = 8
_CELLS_MIN: Final = 1 << 16
_CELLS_MAX: Final = 1 << 23
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Traits:
    """Columns: `seen_s` last use (float64 seconds), `kind` class number (int64), `pace` moving mean
    of log seconds between the session's requests (float64, NaN where unknown), `uses` (uint8)."""

    seen_s: npt.NDArray[np.float64]
    kind: npt.NDArray[np.int64]
    pace: npt.NDArray[np.float64]
    uses: npt.NDArray[np.uint8]

    @staticmethod
    def empty(n: int) -> "Traits":
        """`n` blocks of which nothing is known."""
        return Traits(np.zeros(n), np.zeros(n, np.int64), np.full(n, np.nan), np.zeros(n, np.uint8))

    def get(self, at: npt.NDArray[Any]) -> "Traits":
        """Copies of some."""
        return Traits(self.seen_s[at], self.kind[at], self.pace[at], self.uses[at])

    def put(self, at: npt.NDArray[Any], values: "Traits") -> None:
        """Overwrite some."""
        self.seen_s[at], self.kind[at] = values.seen_s, values.kind
        self.pace[at], self.uses[at] = values.pace, values.uses

    def grown(self, more: int) -> "Traits":
        """With `more` unknown blocks at the end."""
        rest = Traits.empty(more)
        return Traits(
            np.concatenate((self.seen_s, rest.seen_s)),
            np.concatenate((self.kind, rest.kind)),
            np.concatenate((self.pace, rest.pace)),
            np.concatenate((self.uses, rest.uses)),
        )


class Remembered:
    """A table by name, one block per cell; a later block of the same cell takes it over.

    Sized once, for `_REMEMBERED` times `capacity` blocks within fixed bounds; 33 bytes a cell.
    """

    def __init__(self, capacity: int) -> None:
        cells = min(max(_REMEMBERED * capacity, _CELLS_MIN), _CELLS_MAX)
        bits = (cells - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        self._names = np.zeros(1 << bits, np.uint64)
        self._taken = np.zeros(1 << bits, dtype=bool)
        self._traits = Traits.empty(1 << bits)

    def _cells(self, names: Names) -> Names:
        cells: Names = (names * _MIX) >> self._shift
        return cells

    def remember(self, names: Names, traits: Traits) -> None:
        """Note what is known now."""
        cells = self._cells(names)
        self._names[cells] = names
        self._taken[cells] = True
        self._traits.put(cells, traits)

    def recall(self, names: Names) -> tuple[Traits, npt.NDArray[np.bool_]]:
        """What was noted last, and for which of the names it is."""
        cells = self._cells(names)
        return self._traits.get(cells), self._taken[cells] & (self._names[cells] == names)
