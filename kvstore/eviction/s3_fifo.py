"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue, and a ghost queue.

New rows enter the small queue, a tenth of the room. Used more than once there, they move on to the
main queue, otherwise they go and the ghost queue remembers their names; a block that comes back
while it is remembered enters the main queue at once. The main queue gives used rows another round.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.eviction.base import ALONE, Rows, Surroundings
from kvstore.eviction.queues import Names, Queue, QueuePolicy

_SMALL_SHARE = 0.1
_USES_MAX = 3
_USES_TO_STAY = 2


class S3Fifo(QueuePolicy):
    """See the module. Remembers as many gone blocks as the main queue has room for."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        super().__init__(surroundings)
        self._small, self._main = Queue(), Queue()
        self._ghosts: Names = OrderedDict()
        self._uses = array("B")

    def _enter(self, row: int) -> None:
        if row >= len(self._uses):
            more = max(row + 1 - len(self._uses), 1024, len(self._uses) // 8)
            self._uses = self._uses + array("B", bytes(more))
        self._uses[row] = 0
        known = self._ghosts and self._ghosts.pop(self._name(row), self) is None
        (self._main if known else self._small).append(row)

    def _hit(self, rows: Rows) -> None:
        uses = np.frombuffer(self._uses, np.uint8)
        uses[rows] = np.minimum(uses[rows] + 1, _USES_MAX)

    def _leave(self, row: int, name: int | None) -> None:
        if row in self._main:
            self._main.remove(row)
            return
        self._small.remove(row)
        if name is not None:
            self._ghosts[name] = None
            while len(self._ghosts) > max(1, int(self._capacity * (1 - _SMALL_SHARE))):
                self._ghosts.popitem(last=False)

    def _propose(self, may_go: Callable[[int], bool]) -> int | None:
        first = self._from_small if self._small_is_full() else self._from_main
        second = self._from_main if first == self._from_small else self._from_small
        row = first(may_go)
        return second(may_go) if row is None else row

    def _small_is_full(self) -> bool:
        return len(self._small) >= max(1, int(self._capacity * _SMALL_SHARE)) or not self._main

    def _from_small(self, may_go: Callable[[int], bool]) -> int | None:
        promoted, refused, found = [], [], None
        for row in self._small.rows:
            if self._uses[row] >= _USES_TO_STAY:
                promoted.append(row)
            elif may_go(row):
                found = row
                break
            else:
                refused.append(row)
        for row in promoted:
            self._small.remove(row)
            self._uses[row] = 0
            self._main.append(row)
        for row in refused:
            self._small.park(row)
        return self._small.first_parked(may_go) if found is None else found

    def _from_main(self, may_go: Callable[[int], bool]) -> int | None:
        # a row gets as many more rounds as it has uses, so this ends
        for _ in range(_USES_MAX + 1):
            again, refused, found = [], [], None
            for row in self._main.rows:
                if self._uses[row]:
                    self._uses[row] -= 1
                    again.append(row)
                elif may_go(row):
                    found = row
                    break
                else:
                    refused.append(row)
            for row in again:
                self._main.renew(row)
            for row in refused:
                self._main.park(row)
            if found is not None:
                return found
            if not again:
                break
        return self._main.first_parked(may_go)

    def _queues(self) -> Sequence[Queue]:
        return self._small, self._main
