"""The ends of chains in the order of what they are worth.

A heap, in which entries of runs that changed since are passed over. Worth changes with age, so all
ends are valued anew whenever an eighth as many rows as are in were asked for.
"""

import heapq
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.eviction.reuse_times import ReuseTimes
from kvstore.eviction.runs import NONE, Runs

_REVALUE_SHARE: Final = 8


class Ends:
    """See the module. `asked_since`: rows asked for since all ends were valued; the owner counts.
    `cost_growth_per_block`: by how much a row is worth more per row before it."""

    def __init__(self, runs: Runs, times: ReuseTimes, cost_growth_per_block: float) -> None:
        self._runs, self._times, self._growth = runs, times, cost_growth_per_block
        self._heap: list[tuple[float, int, int, int]] = []
        self.asked_since = 0

    @property
    def cheapest(self) -> tuple[float, int]:
        """Worth and number of the run that `next` gave last."""
        worth, _, _, run = self._heap[0]
        return worth, run

    def offer(self, run: int, now_s: float) -> None:
        """The last row of a run may be one to go."""
        runs = self._runs
        depth = runs.depth[run] + len(runs.rows[run])
        worth = self._times.worth(runs.kind[run], now_s - runs.since_s[run])
        worth *= 1 + self._growth * depth
        runs.offered[run] = 1
        heapq.heappush(self._heap, (worth, -depth, runs.stamp[run], run))

    def next(self, rows: int, now_s: float, may_go: Callable[[int], bool]) -> int:
        """The run whose last row is to go next, of `rows` that are in; NONE where none may."""
        found = NONE
        if self.asked_since * _REVALUE_SHARE < rows:
            found = self._first(may_go)
        if found < 0:
            self._value(now_s)
            found = self._first(may_go)
        return self._search(now_s, may_go) if found < 0 else found

    def _first(self, may_go: Callable[[int], bool]) -> int:
        heap, runs = self._heap, self._runs
        while heap:
            _, _, stamp, run = heap[0]
            if runs.stamp[run] == stamp:
                if may_go(runs.rows[run][-1]):
                    return run
                runs.offered[run] = 0
            heapq.heappop(heap)
        return NONE

    def _value(self, now_s: float) -> None:
        self.asked_since = 0
        stamp, after, new = (self._runs.column(name) for name in ("stamp", "after", "new"))
        self._fill(np.flatnonzero((stamp != 0) & (after < 0) & (new == 0)), now_s)

    def _fill(self, chosen: npt.NDArray[np.int64], now_s: float) -> None:
        runs = self._runs
        depth = runs.column("depth")[chosen] + [len(runs.rows[run]) for run in chosen.tolist()]
        ages = now_s - runs.column("since_s")[chosen]
        worth = self._times.worths(runs.column("kind")[chosen], ages)
        worth *= 1 + self._growth * depth
        order = np.lexsort((-depth, worth))
        offered = runs.column("offered")
        offered[:] = 0
        offered[chosen] = 1
        columns = (worth, -depth, runs.column("stamp")[chosen], chosen)
        self._heap = list(zip(*(column[order].tolist() for column in columns), strict=True))

    def _search(self, now_s: float, may_go: Callable[[int], bool]) -> int:
        """Ask about every row: where no end may go, some row inside may."""
        runs, found = self._runs, NONE
        self._fill(np.flatnonzero(runs.column("stamp")), now_s)
        for _, _, _, run in self._heap:
            row = next((row for row in reversed(runs.rows[run]) if may_go(row)), None)
            if row is not None:
                found = runs.ending_at(row)
                break
        self._heap = []
        runs.column("offered")[:] = 0
        if found >= 0:
            self.offer(found, now_s)
        return found
