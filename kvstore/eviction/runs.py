"""Runs: pieces of chains whose rows came and were used together, so that one entry serves them all.

A run is split where a chain parts from it and joined with the run before it where both turn out the
same, so the work per request depends on how often its chain changed its history and hardly on how
long it is. Rows of a run leave from its tail.
"""

from array import array
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import Chain
from kvstore.eviction.remembered import Record

NONE: Final = -1
RowArray: TypeAlias = "array[int]"
"""Of type code "i", as rows are everywhere here: 4 bytes each, and compared without unpacking."""
_RUNS_MIN: Final = 256
_ROWS_MIN: Final = 1024
_NO_ROWS: Final = array("i")
_COLUMNS: Final = {
    "seen_s": ("d", np.float64),
    "since_s": ("d", np.float64),
    "kind": ("i", np.int32),
    "pace": ("d", np.float64),
    "uses": ("B", np.uint8),
    "depth": ("i", np.int32),
    "stamp": ("q", np.int64),
    "after": ("i", np.int32),
    "above": ("q", np.int64),
    "new": ("B", np.uint8),
    "offered": ("B", np.uint8),
}


def row_array(rows: Chain) -> RowArray:
    """Rows of any kind as the arrays that runs are made of."""
    if isinstance(rows, np.ndarray):
        return array("i", rows.astype(np.int32).tobytes())
    return array("i", rows)


class Runs:
    """Columns by run number: `rows` root first; `seen_s`, `since_s`, `kind`, `pace`, `uses` as in
    `Record`; `depth` of the first row; `stamp`, larger for what was used later, 0 where there is no
    such run; `after` the run that a chain last went on to, or NONE; `above` the row before the
    first, or NONE; `new` until the first touch; `offered` while the heap holds it.

    `run_of`: per row, the run that it is in, or NONE. Memory: 250 bytes per run and 9 per row.
    """

    def __init__(self) -> None:
        self.rows: list[RowArray] = []
        self.seen_s, self.since_s, self.pace = array("d"), array("d"), array("d")
        self.kind, self.depth, self.after = array("i"), array("i"), array("i")
        self.stamp, self.above = array("q"), array("q")
        self.uses, self.new, self.offered = array("B"), array("B"), array("B")
        self.run_of = array("i")
        self._free: list[int] = []
        self._last_stamp = 0

    def reserve_rows(self, rows: int) -> int:
        """Make row numbers below `rows` known; how many more are known now."""
        more = rows - len(self.run_of)
        if more <= 0:
            return 0
        more = max(more, _ROWS_MIN, len(self.run_of) // 8)
        # frombytes would refuse while a view is held
        self.run_of = self.run_of + array("i", np.full(more, NONE, np.int32).tobytes())
        return more

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column as an array, of the runs that there are now."""
        return np.frombuffer(getattr(self, name), _COLUMNS[name][1])

    def next_stamp(self) -> int:
        """A stamp larger than all before."""
        self._last_stamp += 1
        return self._last_stamp

    def make(self, rows: RowArray, past: Record) -> int:
        """A new run of rows that are in none."""
        if not self._free:
            self._grow()
        run = self._free.pop()
        self.rows[run] = rows
        self.seen_s[run], self.since_s[run], self.kind[run] = past[:3]
        self.pace[run], self.uses[run] = past[3:]
        self.depth[run], self.after[run], self.above[run] = 0, NONE, NONE
        self.new[run], self.offered[run] = 1, 0
        self.stamp[run] = self.next_stamp()
        self._place(rows, run)
        return run

    def load(self, rows: npt.NDArray[np.int32], piece_rows: int, past: Record) -> None:
        """Fill empty books with pieces of one chain, root first, that have settled; the root is
        the warmest."""
        starts = range(0, len(rows), piece_rows)
        n = len(starts)
        self._grow(n)
        self._free = self._free[: len(self.rows) - n]
        self.rows[:n] = [array("i", rows[start : start + piece_rows].tobytes()) for start in starts]
        np.frombuffer(self.run_of, np.int32)[rows] = np.arange(len(rows)) // piece_rows
        for name, value in past._asdict().items():
            self.column(name)[:n] = value
        self.column("after")[:n] = self.column("above")[:n] = NONE
        self.column("depth")[:n] = starts
        self.column("stamp")[:n] = np.arange(n, 0, -1)
        self._last_stamp = n

    def record(self, run: int) -> Record:
        """What is known of a run's rows."""
        return Record(
            self.seen_s[run], self.since_s[run], self.kind[run], self.pace[run], self.uses[run]
        )

    def drop(self, run: int) -> int:
        """Forget a run that has no rows; the run that it was the continuation of, or NONE."""
        self.stamp[run] = self.offered[run] = 0
        self._free.append(run)
        above = self.above[run]
        parent = self.run_of[above] if above >= 0 else NONE
        if parent < 0 or self.after[parent] != run:
            return NONE
        self.after[parent] = NONE
        return parent

    def split(self, run: int, at: int) -> int:
        """Rows before `at` become a run of their own, whose number is returned; the tail keeps its
        number, and with it its place in the heap."""
        rows = self.rows[run]
        top = self.make(rows[:at], self.record(run))
        del rows[:at]
        self.depth[top], self.above[top], self.after[top] = self.depth[run], self.above[run], run
        self.new[top] = self.new[run]
        self.depth[run] += at
        if self.above[top] >= 0:
            parent = self.run_of[self.above[top]]
            if parent >= 0 and self.after[parent] == run:
                self.after[parent] = top
        self.above[run] = self.rows[top][-1]
        return top

    def follow(self, run: int, tail: int) -> None:
        """A chain goes on from `run` to `tail`, which a start may have put behind another run."""
        above = self.above[tail]
        before = self.run_of[above] if above >= 0 else NONE
        if before >= 0 and self.after[before] == tail:
            self.after[before] = NONE
        self.after[run], self.above[tail] = tail, self.rows[run][-1]

    def join(self, run: int, tail: int) -> None:
        """Append the rows of `tail` to `run`, which it follows; `tail` is no more."""
        self._place(self.rows[tail], run)
        self.rows[run] += self.rows[tail]
        self.rows[tail] = _NO_ROWS
        self.after[run] = self.after[tail]
        self.stamp[tail] = self.offered[tail] = 0
        self._free.append(tail)

    def ending_at(self, row: int) -> int:
        """The run whose last row this is, split off for it where needed."""
        run = self.run_of[row]
        rows = self.rows[run]
        return run if rows[-1] == row else self.split(run, rows.index(row) + 1)

    def path(self, chain: Chain) -> list[int]:
        """The runs that hold exactly those of these rows that are in, in this order; splits those
        that hold others as well."""
        rows = row_array(chain)
        at, path, known = 0, [], len(self.run_of)
        while at < len(rows):
            run = self.run_of[rows[at]] if rows[at] < known else NONE
            if run < 0:
                at += 1
                continue
            mine = self.rows[run]
            if mine[0] != rows[at]:
                self.split(run, mine.index(rows[at]))
            n = len(mine)
            asked = rows[at : at + n]
            if asked != mine:
                n = next(i for i, row in enumerate(mine) if i == len(asked) or asked[i] != row)
                run = self.split(run, n)
            path.append(run)
            at += n
        return path

    def check_integrity(self) -> None:
        """Raise `AssertionError` where rows and runs disagree."""
        live = [run for run in range(len(self.rows)) if self.stamp[run]]
        placed = {row: run for run in live for row in self.rows[run]}
        known = {row: run for row, run in enumerate(self.run_of) if run >= 0}
        assert placed == known, "rows and runs disagree"
        assert sum(len(self.rows[run]) for run in live) == len(placed), "a row is in two runs"
        assert all(self.rows[run] for run in live), "a run has no rows"
        assert sorted([*live, *self._free]) == list(range(len(self.rows))), "a number was lost"
        assert len({self.stamp[run] for run in live}) == len(live), "two runs share a stamp"
        for run in live:
            after = self.after[run]
            assert after < 0 or (self.stamp[after] and self.above[after] == self.rows[run][-1]), (
                "a chain goes on with a run that does not follow it"
            )

    def _place(self, rows: RowArray, run: int) -> None:
        if len(rows) < 8:
            for row in rows:
                self.run_of[row] = run
        else:
            np.frombuffer(self.run_of, np.int32)[rows] = run

    def _grow(self, more_min: int = _RUNS_MIN) -> None:
        have = len(self.rows)
        more = max(more_min, have // 2)
        self.rows += [_NO_ROWS] * more
        for name, (code, kind) in _COLUMNS.items():
            setattr(self, name, getattr(self, name) + array(code, np.zeros(more, kind).tobytes()))
        self._free = list(range(have + more - 1, have - 1, -1))
