"""What the classic policies share: queues of rows in insertion-ordered dictionaries.

The published algorithms know independent objects. Two additions make them fit chains and the
contract, the same for all: rows enter their queue with their first touch, deepest first, so that of
blocks that came together the leaf goes first; and a row that was refused when its turn came is
parked, so that it is not met again and again, and keeps its turn once it is reconsidered. Memory:
about 110 bytes per row, plus what the algorithm remembers of rows that have gone.
"""

from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import ALONE, Chain, EvictionPolicy, Rows, Surroundings

_OUT: Final = 0
_FRESH: Final = 1
_PLACED: Final = 2
_COOL: Final = 3
_ROWS_MIN: Final = 1024

Names = OrderedDict[int, None]
"""Rows, or names of blocks, in an order."""


class Queue:
    """Rows from the oldest to the newest; parked rows count, and are skipped."""

    def __init__(self) -> None:
        self.rows: Names = OrderedDict()
        self._parked: Names = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows) + len(self._parked)

    def __contains__(self, row: int) -> bool:
        return row in self.rows or row in self._parked

    def append(self, row: int) -> None:
        """As the newest."""
        self.rows[row] = None

    def remove(self, row: int) -> None:
        """Wherever it is."""
        if row in self.rows:
            del self.rows[row]
        else:
            del self._parked[row]

    def renew(self, row: int) -> None:
        """Make a row that is in the newest."""
        if row in self.rows:
            self.rows.move_to_end(row)
        else:
            del self._parked[row]
            self.rows[row] = None

    def pop_oldest(self) -> int:
        """Take the oldest out."""
        return (self.rows or self._parked).popitem(last=False)[0]

    def park(self, row: int) -> None:
        """Its turn came and it was refused."""
        del self.rows[row]
        self._parked[row] = None

    def unpark(self, row: int) -> None:
        """Give a parked row its turn back; others are passed over."""
        if row in self._parked:
            del self._parked[row]
            self.rows[row] = None
            self.rows.move_to_end(row, last=False)

    def first(self, may_go: Callable[[int], bool]) -> int | None:
        """The oldest row that may go; those before it are parked."""
        refused, found = [], None
        for row in self.rows:
            if may_go(row):
                found = row
                break
            refused.append(row)
        for row in refused:
            self.park(row)
        return self.first_parked(may_go) if found is None else found

    def first_parked(self, may_go: Callable[[int], bool]) -> int | None:
        """The first of the parked rows that may go after all."""
        return next((row for row in self._parked if may_go(row)), None)


class QueuePolicy(EvictionPolicy):
    """A subclass places rows (`_enter`), moves them when used (`_hit`), lets them go (`_leave`)
    and proposes victims (`_propose`)."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        super().__init__(surroundings)
        self._state = array("B")
        self._names = array("Q")
        self._rows = 0
        self._fresh: Names = OrderedDict()
        self._cooled: Names = OrderedDict()
        self._most = 0

    # what an algorithm is

    @abstractmethod
    def _enter(self, row: int) -> None:
        """Place a row that is new."""

    @abstractmethod
    def _hit(self, rows: Rows) -> None:
        """Placed rows were used; leaf first, so that the root is used last."""

    @abstractmethod
    def _leave(self, row: int, name: int | None) -> None:
        """Take a placed row out; `name` is the block's identity, None where it is useless."""

    @abstractmethod
    def _propose(self, may_go: Callable[[int], bool]) -> int | None:
        """The next victim among the placed rows that `may_go` accepts."""

    @abstractmethod
    def _queues(self) -> Sequence[Queue]:
        """Where placed rows are."""

    # what they share

    @property
    def _capacity(self) -> int:
        return self.surroundings.capacity_rows() or self._most

    def _name(self, row: int) -> int:
        """The identity of a placed row's block."""
        return self._names[row]

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, row: object) -> bool:
        state = self._state
        return isinstance(row, int) and 0 <= row < len(state) and state[row] != _OUT

    def add(self, row: int) -> None:
        assert row not in self, f"row {row} was added twice"
        if row >= len(self._state):
            more = max(row + 1 - len(self._state), _ROWS_MIN, len(self._state) // 8)
            self._state = self._state + array("B", bytes(more))
            self._names = self._names + array("Q", bytes(8 * more))
        self._state[row] = _FRESH
        self._rows += 1
        self._fresh[row] = None
        self._most = max(self._most, self._rows)

    def touch(self, rows: Chain) -> None:
        leaf_first = np.asarray(rows, np.int64)[::-1]
        states = np.frombuffer(self._state, np.uint8)
        leaf_first = leaf_first[leaf_first < len(states)]
        if self._cooled:
            for row in leaf_first[states[leaf_first] == _COOL].tolist():
                del self._cooled[row]
                self._state[row] = _PLACED
                self._enter(row)
        state = states[leaf_first]
        placed = leaf_first[state == _PLACED]
        if len(placed):
            self._hit(placed)
        fresh = leaf_first[state == _FRESH]
        if len(fresh):
            np.frombuffer(self._names, np.uint64)[fresh] = self.surroundings.identity(fresh)
        for row in fresh.tolist():
            del self._fresh[row]
            self._state[row] = _PLACED
            self._enter(row)

    def arrived(self, chain: Chain) -> None:
        rows = np.asarray(chain, np.int64).tolist()
        self.touch([row for row in rows if row in self._fresh])

    def remove(self, row: int) -> None:
        assert row in self, f"row {row} was removed twice"
        state, self._state[row] = self._state[row], _OUT
        self._rows -= 1
        if state == _FRESH:
            del self._fresh[row]
        elif state == _COOL:
            del self._cooled[row]
        else:
            self._leave(row, self._name(row))

    def cool(self, rows: Chain) -> None:
        for row in np.asarray(rows, np.int64).tolist():
            if row not in self or self._state[row] == _COOL:
                continue
            if self._state[row] == _FRESH:
                del self._fresh[row]
            else:
                self._leave(row, None)
            self._state[row] = _COOL
            self._cooled[row] = None

    def reconsider(self, row: int) -> None:
        for queue in self._queues():
            queue.unpark(row)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        for row in self._cooled:
            if may_go(row):
                return row
        row_or_none = self._propose(may_go)
        if row_or_none is None and self._fresh:
            row_or_none = next((row for row in reversed(self._fresh) if may_go(row)), None)
        return row_or_none

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        assert not self._rows, "loading needs an empty policy"
        for row in coldest_first.tolist():
            self.add(row)
        self.touch(coldest_first[::-1])

    def check_integrity(self) -> None:
        placed = self._rows - len(self._fresh) - len(self._cooled)
        assert placed == sum(map(len, self._queues())), "rows are miscounted"
