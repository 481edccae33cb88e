"""SIEVE (Zhang et al., NSDI 2024): one queue, one bit per row, one hand.

A use sets the row's bit. The hand walks from the oldest row to the newest and round again, clears
the bits it meets and stops at the first row without one. Rows are never moved.
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.eviction.base import ALONE, Rows, Surroundings
from kvstore.eviction.queues import Queue, QueuePolicy

_NONE = -1


class Sieve(QueuePolicy):
    """See the module. 17 bytes per row beside the set of rows: two links and the bit."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        super().__init__(surroundings)
        self._older, self._newer = array("q"), array("q")
        self._used = array("B")
        self._oldest = self._newest = self._hand = _NONE
        self._linked = 0
        self._again: dict[int, None] = {}

    def _enter(self, row: int) -> None:
        more = row + 1 - len(self._used)
        if more > 0:
            more = max(more, 1024, len(self._used) // 8)
            self._older.frombytes(bytes(8 * more))
            self._newer.frombytes(bytes(8 * more))
            self._used = self._used + array("B", bytes(more))
        self._used[row] = 0
        self._older[row], self._newer[row] = self._newest, _NONE
        if self._newest != _NONE:
            self._newer[self._newest] = row
        else:
            self._oldest = row
        self._newest = row
        self._linked += 1

    def _hit(self, rows: Rows) -> None:
        np.frombuffer(self._used, np.uint8)[rows] = 1

    def _leave(self, row: int, name: int | None) -> None:
        older, newer = self._older[row], self._newer[row]
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._newest = older
        if self._hand == row:
            self._hand = newer
        self._again.pop(row, None)
        self._linked -= 1

    def reconsider(self, row: int) -> None:
        if row in self and row not in self._cooled and row not in self._fresh:
            self._again[row] = None

    def _propose(self, may_go: Callable[[int], bool]) -> int | None:
        if not self._linked:
            return None
        hand, used = self._hand, self._used
        # the hand has passed these, or is about to reach them anyway
        for row in list(self._again):
            if not used[row] and may_go(row):
                return row
            del self._again[row]
        # one round clears the bits, the second finds every row that may go
        for _ in range(2 * self._linked + 1):
            if hand == _NONE:
                hand = self._oldest
            if used[hand]:
                used[hand] = 0
            elif may_go(hand):
                self._hand = hand
                return hand
            hand = self._newer[hand]
        return None

    def _queues(self) -> Sequence[Queue]:
        return ()

    def check_integrity(self) -> None:
        placed = len(self) - len(self._fresh) - len(self._cooled)
        assert placed == self._linked, "rows are miscounted"
