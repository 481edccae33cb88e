"""ARC (Megiddo and Modha, FAST 2003): recency and frequency share the room as the misses teach.

`t1` holds rows used once, `t2` rows used again, both in LRU order; `b1` and `b2` remember the names
of blocks that left them. A block that comes back from `b1` says that `t1` was too small, one from
`b2` that `t2` was; the target size of `t1` follows.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.eviction.base import ALONE, Rows, Surroundings
from kvstore.eviction.queues import Names, Queue, QueuePolicy


class Arc(QueuePolicy):
    """See the module. Remembers at most as many gone blocks as there is room for rows."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        super().__init__(surroundings)
        self._t1, self._t2 = Queue(), Queue()
        self._b1: Names = OrderedDict()
        self._b2: Names = OrderedDict()
        self._t1_target = 0.0

    def _enter(self, row: int) -> None:
        b1, b2 = self._b1, self._b2
        name = self._name(row) if b1 or b2 else -1
        if name in b1:
            step = max(1.0, len(b2) / len(b1))
            self._t1_target = min(float(self._capacity), self._t1_target + step)
            del b1[name]
            self._t2.append(row)
        elif name in b2:
            step = max(1.0, len(b1) / len(b2))
            self._t1_target = max(0.0, self._t1_target - step)
            del b2[name]
            self._t2.append(row)
        else:
            self._t1.append(row)

    def _hit(self, rows: Rows) -> None:
        t1, t2 = self._t1, self._t2
        for row in rows.tolist():
            # most are here, and a long chain has hundreds
            if row in t2.rows:
                t2.rows.move_to_end(row)
            elif row in t2:
                t2.renew(row)
            else:
                t1.remove(row)
                t2.append(row)

    def _leave(self, row: int, name: int | None) -> None:
        if row in self._t1:
            self._t1.remove(row)
            ghosts, other = self._b1, len(self._t1)
        else:
            self._t2.remove(row)
            ghosts, other = self._b2, 0
        if name is None:
            return
        ghosts[name] = None
        room = self._capacity
        while len(self._b1) > max(0, room - other) and self._b1:
            self._b1.popitem(last=False)
        while len(self._b1) + len(self._b2) > room and self._b2:
            self._b2.popitem(last=False)

    def _propose(self, may_go: Callable[[int], bool]) -> int | None:
        t1_first = len(self._t1) > self._t1_target or not self._t2
        one, other = (self._t1, self._t2) if t1_first else (self._t2, self._t1)
        row = one.first(may_go)
        return other.first(may_go) if row is None else row

    def _queues(self) -> Sequence[Queue]:
        return self._t1, self._t2
