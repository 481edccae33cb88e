"""The blocks that a request may add, and what `Gittins` knows of them from before.

What is learnt is counted whether or not a block is in: its last use, class and pace are remembered
by name, in `Remembered`. New blocks of a request fall into pieces that have the same past, and so
the same worth.
"""

import math
from array import array
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import Rows, Surroundings
from kvstore.eviction.block_classes import OUTLOOKS, class_of, grew, moved, unheard_of
from kvstore.eviction.remembered import UNKNOWN, Record, Remembered
from kvstore.eviction.reuse_times import ReuseTimes
from kvstore.eviction.runs import RowArray, row_array

SAME_REQUEST_S: Final = 1e-3
_SHARED_FACTOR: Final = 0.5
_USES_MAX: Final = 8


class Piece(NamedTuple):
    """New blocks of a request, up to the `end`-th, that have the same past."""

    end: int
    kind: int
    uses: int


class Arrivals:
    """See the module. Of the request that was foreseen last: `rows` that may be added, in `pieces`;
    `gap_s` since its chain was used before and the `pace` of its session, NaN where unknown;
    whether it `grew`, by more than a block that nobody knew.

    Memory: 8 bytes per row, and what `Remembered` takes."""

    def __init__(self, surroundings: Surroundings, times: ReuseTimes) -> None:
        self._surroundings, self._times = surroundings, times
        self._gone = Remembered(surroundings.capacity_rows())
        self._names = np.zeros(0, np.uint64)
        self._left, self._left_as = array("i"), array("q")
        self.rows = row_array(())
        self.pieces: list[Piece] = []
        self.gap_s = self.pace = math.nan
        self.grew = False
        self._came_s = 0.0

    def reserve(self, more: int) -> None:
        """So many more row numbers are in use now."""
        self._names = np.concatenate((self._names, np.zeros(more, np.uint64)))

    def name(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Ask for the names of rows, and keep them for when they leave."""
        names = self._names[rows] = self._surroundings.identity(rows)
        return names

    # requests

    def expect(self, new: Rows, above: Record | None, goes_on: bool, brought: int) -> None:
        """A request may add the rows `new`, behind one of which `above` is known; `goes_on`: it is
        one that was foreseen before and `brought` so many already that nobody knew."""
        self._came_s = self._surroundings.now_s()
        self.gap_s = self.pace = math.nan
        self.rows, self.pieces, self.grew = row_array(new), [], False
        if not self.rows:
            return
        self._flush()
        gone, names = self._gone, self.name(new)
        cells = gone.cells(names)
        numbers = gone.recall(cells, names)
        cuts = ((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()
        starts, ends = [0, *cuts], [*cuts, len(new)]
        pasts = [
            None if number == UNKNOWN else gone.record(number)
            for number in map(numbers.item, starts)
        ]
        self.gap_s, self.pace = self._pace(pasts, above, goes_on)
        self.grew = grew(brought + int(np.count_nonzero(numbers == UNKNOWN)))
        for start, end, past in zip(starts, ends, pasts, strict=True):
            self._expect_piece(end, end - start, past)
        gone.remember(cells, names, self._notes())

    def forget_path(self) -> None:
        """What is used next belongs to no request that was foreseen."""
        self.gap_s = self.pace = math.nan
        self.grew = False

    def _pace(
        self, pasts: list[Record | None], above: Record | None, goes_on: bool
    ) -> tuple[float, float]:
        """Seconds since the deepest known block of a chain was used, and its session's pace."""
        deepest = next((past for past in reversed(pasts) if past is not None), None)
        if deepest is not None:
            gap = self._came_s - deepest.seen_s
            return gap, moved(deepest.pace, gap)
        if above is None:
            return math.nan, math.nan
        gap = self._came_s - above.seen_s
        if (goes_on or gap < SAME_REQUEST_S) and not math.isnan(above.pace):
            return math.exp(above.pace), above.pace
        if goes_on:
            return math.nan, math.nan
        return gap, moved(above.pace, gap)

    def _expect_piece(self, end: int, rows: int, past: Record | None) -> None:
        """New blocks up to the `end`-th have this past."""
        if past is None:
            uses, kind = 1, class_of(1, self.pace, shared=False, new=True, grew=self.grew)
            self._times.started(kind, rows)
        else:
            kind, uses = self.used(past, rows, self._came_s, self.gap_s, self.pace)
        if self.pieces and self.pieces[-1][1:] == (kind, uses):
            self.pieces.pop()
        self.pieces.append(Piece(end, kind, uses))

    def _notes(self) -> Rows | int:
        """Per new block, or for all, the number of a record of what is known of it now."""
        notes = [self._gone.note(self.record(piece)) for piece in self.pieces]
        if len(notes) == 1:
            return notes[0]
        return np.repeat(notes, np.diff([piece.end for piece in self.pieces], prepend=0))

    def record(self, piece: Piece) -> Record:
        """What is known of a piece's blocks now that they are asked for."""
        return Record(self._came_s, self._came_s, piece.kind, self.pace, piece.uses)

    def piece_at(self, at: int) -> Piece:
        """The piece of the `at`-th row."""
        return next(piece for piece in self.pieces if at < piece.end)

    def used(
        self, past: Record, rows: int, now: float, gap_s: float, pace: float
    ) -> tuple[int, int]:
        """So many blocks with this past are used again, by a session of this `pace` that came back
        after `gap_s`; their class now, and how often they were used."""
        times, age = self._times, now - past.seen_s
        times.returned(past.kind, now - past.since_s, rows)
        # what was said when an answer ended is a class of its own beside the one that counts from
        # the request
        said = past.kind % OUTLOOKS - past.kind % 2
        if said:
            times.returned(past.kind - said, age, rows)
        uses = min(past.uses + 1, _USES_MAX)
        shared = age < _SHARED_FACTOR * gap_s
        if shared:
            pace = math.log(max(age, 0.0) + 0.5)
        kind = class_of(uses, pace, shared=shared, new=False, grew=self.grew)
        times.started(kind, rows)
        return kind, uses

    # single rows

    def meet(self, row: int) -> Record:
        """What is known of a row that nobody foresaw just now."""
        self._flush()
        names = self.name(np.array([row], np.int64))
        number = self._gone.recall(self._gone.cells(names), names).item()
        if number == UNKNOWN:
            now, kind = self._surroundings.now_s(), unheard_of(new=True)
            return Record(now, now, kind, math.nan, 1)
        return self._gone.record(number)

    def left(self, rows: RowArray, past: Record) -> None:
        """Rows that this is known of are no longer in."""
        self._left.extend(rows)
        self._left_as.extend([self._gone.note(past)] * len(rows))

    def _flush(self) -> None:
        if self._left:
            names = self._names.take(np.frombuffer(self._left, np.int32))
            numbers = np.frombuffer(self._left_as, np.int64)
            self._gone.remember(self._gone.cells(names), names, numbers)
            self._left, self._left_as = array("i"), array("q")
