"""What `Gittins` remembers of blocks that are not in, by name and within bounds.

Blocks that were used together share one record. A table of cells leads from a block's name to its
record; a later block of the same cell takes it over, and records are overwritten in the order in
which they were made. Sized once, for `_REMEMBERED` times `capacity` blocks within fixed bounds; at
most 45 bytes a cell.
"""

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

_REMEMBERED: Final = 8
_CELLS_MIN: Final = 1 << 16
_CELLS_MAX: Final = 1 << 23
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

_RECORD: Final = struct.Struct("<ddidB")

UNKNOWN: Final = 0

Names = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.int64]
Records = npt.NDArray[np.int64]


class Record(NamedTuple):
    """`seen_s` last use, `since_s` when the present wait began, which is then or the end of the
    answer, `kind` class number, `pace` moving mean of log seconds between the
    session's requests (NaN where unknown), `uses` at most 255."""

    seen_s: float
    since_s: float
    kind: int
    pace: float
    uses: int


class Remembered:
    """See the module. The system gives memory for what was written only."""

    def __init__(self, capacity: int) -> None:
        cells = min(max(_REMEMBERED * capacity, _CELLS_MIN), _CELLS_MAX)
        bits = (cells - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        self._names = np.zeros(1 << bits, np.uint64)
        self._number_of = np.zeros(1 << bits, np.int64)
        self._records = 1 << bits
        self._packed = np.zeros(self._records * _RECORD.size, np.uint8).data
        self._made = UNKNOWN + 1

    def note(self, record: Record) -> int:
        """A new record; its number."""
        number = self._made
        at = number & (self._records - 1)
        _RECORD.pack_into(self._packed, at * _RECORD.size, *record)
        self._made += 1
        return number

    def record(self, number: int) -> Record:
        """What a number that `recall` just gave stands for."""
        at = number & (self._records - 1)
        return Record(*_RECORD.unpack_from(self._packed, at * _RECORD.size))

    def cells(self, names: Names) -> Cells:
        """Where `remember` and `recall` look for these names."""
        return ((names * _MIX) >> self._shift).view(np.int64)

    def remember(self, cells: Cells, names: Names, numbers: Any) -> None:
        """Lead from names to records: one number each, or one for all."""
        self._names[cells] = names
        self._number_of[cells] = numbers

    def recall(self, cells: Cells, names: Names) -> Records:
        """The number of each name's record, `UNKNOWN` where there is none any more."""
        numbers: Records = self._number_of.take(cells)
        numbers[self._names.take(cells) != names] = UNKNOWN
        if self._made > self._records:
            numbers[numbers < self._made - self._records] = UNKNOWN
        return numbers
