"""LRU over rows by time stamps.

A touch writes one number per row, in NumPy, so that using a chain of 4,096 blocks costs
microseconds and not 4,096 moves in a linked list. The cold end is found when it is needed: the
coldest few thousand rows are taken out of the stamps at once and handed out one by one; a row whose
stamp changed since is skipped. The order is that of a list all the same, because what is touched or
added later is warmer than everything taken out before.
"""

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import ALONE, Chain, EvictionPolicy, Surroundings

_BATCH_ROWS = 4096
_FIRST_STAMP = 1 << 62


class LRU(EvictionPolicy):
    """Least recently used first. 8 bytes per row."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        super().__init__(surroundings)
        self._stamps = np.zeros(0, np.int64)
        self._now = self._coldest = _FIRST_STAMP
        self._cold: list[tuple[int, int]] = []
        self._horizon = 0
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and row < len(self._stamps) and bool(self._stamps[row])

    def add(self, row: int) -> None:
        assert row not in self, f"row {row} was added twice"
        if row >= len(self._stamps):
            more = max(row + 1 - len(self._stamps), 1024, len(self._stamps) // 8)
            self._stamps = np.concatenate((self._stamps, np.zeros(more, np.int64)))
        self._now += 1
        self._stamps[row] = self._now
        self._rows += 1

    def touch(self, rows: Chain) -> None:
        present = self._present(rows)
        n = len(present)
        self._stamps[present] = np.arange(self._now + n, self._now, -1)
        self._now += n

    def remove(self, row: int) -> None:
        assert row in self, f"row {row} was removed twice"
        self._stamps[row] = 0
        self._rows -= 1

    def cool(self, rows: Chain) -> None:
        present = self._present(rows)
        self._coldest -= len(present)
        stamps = np.arange(self._coldest, self._coldest + len(present))
        self._stamps[present] = stamps
        for entry in zip(stamps.tolist(), present.tolist(), strict=True):
            heapq.heappush(self._cold, entry)

    def reconsider(self, row: int) -> None:
        # a row warmer than all that was taken out will be found in its turn
        if row in self and self._stamps[row] <= self._horizon:
            heapq.heappush(self._cold, (int(self._stamps[row]), row))

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        row = self._next(may_go)
        batch = _BATCH_ROWS
        while row is None and self._rows:
            whole = batch >= self._rows
            self._take_coldest(batch)
            row = self._next(may_go)
            if whole:
                break
            batch *= 4
        return row

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        assert not self._rows, "loading needs an empty policy"
        n = len(coldest_first)
        self._stamps = np.zeros(int(coldest_first.max(initial=-1)) + 1, np.int64)
        self._stamps[coldest_first] = np.arange(self._now + 1, self._now + 1 + n)
        self._now += n
        self._rows = n

    def check_integrity(self) -> None:
        stamps = self._stamps[self._stamps != 0]
        assert len(stamps) == self._rows, "rows are miscounted"
        assert len(np.unique(stamps)) == len(stamps), "two rows share a stamp"
        assert not len(stamps) or int(stamps.max()) <= self._now, "a stamp lies ahead"

    def _present(self, rows: Chain) -> npt.NDArray[np.int64]:
        asked = np.asarray(rows, np.int64)
        asked = asked[asked < len(self._stamps)]
        present: npt.NDArray[np.int64] = asked[self._stamps[asked] != 0]
        return present

    def _next(self, may_go: Callable[[int], bool]) -> int | None:
        cold, stamps = self._cold, self._stamps
        while cold:
            stamp, row = cold[0]
            if stamps[row] == stamp and may_go(row):
                return row
            heapq.heappop(cold)
        return None

    def _take_coldest(self, batch: int) -> None:
        rows = np.flatnonzero(self._stamps)
        stamps = self._stamps[rows]
        if batch < len(rows):
            coldest = np.argpartition(stamps, batch)[:batch]
            rows, stamps = rows[coldest], stamps[coldest]
        order = np.argsort(stamps)
        self._cold = list(zip(stamps[order].tolist(), rows[order].tolist(), strict=True))
        self._horizon = self._cold[-1][0]
