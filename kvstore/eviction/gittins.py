"""Gittins: a block is worth the rate at which holding it is expected to pay (our default).

A block in the cache occupies room until it is used again or given up; a use saves recomputing it.
So what counts is the chance of a use × the cost of recomputing ÷ (bytes × the time until then), for
the best time to give up: the Gittins index (`reuse_times`). Blocks are of one size here, and DS4.1F
computes a token of a deep block nearly as fast as of a shallow one (its attention is sparse), so
the cost grows by `cost_growth_per_block` only. What chains and sessions add to that:

* A block's class is how often it was used (1, 2, 3–4, more), the pace of its session (a moving mean
  of the logarithm of the times between requests for the deepest block known of the request's
  chain), whether the block itself is used much more often than that (a shared prompt), whether it
  is new, and what the client said when the last answer ended (`Outlook`). New blocks have the pace
  of the chain that they continue: the tail of a brisk session is worth more than that of a slow
  one, and a first request that nothing is known about is worth what such requests turned out to be.
* Think times: the index first rises with age where a session's next request is due and falls once
  it is overdue, which no order by recency can do. Where sessions together need more than the room,
  those whose next request is soonest stay whole, instead of each losing its blocks shortly
  before it needs them.
* Branches left behind: where a chain that most requests for a block took goes on another way (the
  reasoning of an earlier turn was dropped, a history was summarised), the old branch is a class of
  its own and soon found to be dead.
* Admission: a chain whose blocks are worth less than everything that would have to go for them is
  not let in (`admits`). One-off prompts can't flush the cache.
* Leaf first: within a chain the deeper block goes first at equal worth.

What is learnt is counted whether or not a block is in: its last use, class and pace are remembered
by name for `_REMEMBERED` times as many blocks as there is room for, in a table where a later block
overwrites an earlier one of the same cell. Only what has happened is used, never what will.

Cost: a touch or a look into the table is a few vector operations per chain. Worth changes with age,
so the rows at the ends of chains are valued anew whenever an eighth as many rows as are in were
asked for; the row before an end is offered when the end goes. That is a constant per access.
Memory: 90 bytes per row and 34 per remembered block.
"""

import heapq
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import ALONE, Chain, EvictionPolicy, Outlook, Rows, Surroundings
from kvstore.eviction.remembered import Remembered, Traits
from kvstore.eviction.reuse_times import ReuseTimes

_PACES: Final = 14
_PACE_GAIN: Final = 0.6
_SHARED_FACTOR: Final = 0.5
_SAME_REQUEST_S: Final = 1e-3
_REVALUE_SHARE: Final = 8
_ROWS_MIN: Final = 1024

Floats = npt.NDArray[np.float64]


def _classes() -> npt.NDArray[np.int64]:
    """The group of every class: the same with the pace in steps of 8 instead of 2."""
    rest, low = np.divmod(np.arange(4 * 2 * 2 * _PACES * len(Outlook) * 2), len(Outlook) * 2)
    rest, pace = np.divmod(rest, _PACES)
    coarse = np.where(pace == 0, 0, np.maximum(pace - 2, 1) // 3 + 1)
    groups: npt.NDArray[np.int64] = (rest * (_PACES // 3 + 2) + coarse) * len(Outlook) * 2 + low
    return groups


def _class_of(
    uses: npt.NDArray[np.uint8], shared: Any, new: Any, pace: Any
) -> npt.NDArray[np.int64]:
    """Class numbers of blocks whose branch is not left and whose outlook is unknown."""
    used = np.searchsorted([1, 2, 4], uses)
    with np.errstate(invalid="ignore"):
        step = np.clip(np.floor(pace / math.log(2)) + 2, 1, _PACES - 1)
    step = np.where(np.isnan(pace), 0, step).astype(np.int64)
    kind = (used * 2 + shared) * 2 + new
    classes: npt.NDArray[np.int64] = (kind * _PACES + step) * (len(Outlook) * 2)
    return classes


class Gittins(EvictionPolicy):
    """See the module."""

    def __init__(
        self, surroundings: Surroundings = ALONE, cost_growth_per_block: float = 0.0
    ) -> None:
        super().__init__(surroundings)
        self._growth = cost_growth_per_block
        self._times = ReuseTimes(_classes())
        self._gone = Remembered(surroundings.capacity_rows())
        self._stamps = np.zeros(0, np.int64)
        self._traits = Traits.empty(0)
        self._names = np.zeros(0, np.uint64)
        self._depth = np.zeros(0, np.int32)
        self._after = np.zeros(0, np.int64)
        self._before = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)
        self._new = np.zeros(0, dtype=bool)
        self._dense = np.zeros(0, np.int64)
        self._rows = 0
        self._stamp = 1
        self._left_since: list[int] = []
        self._cooled: dict[int, None] = {}
        self._heap: list[tuple[float, int, int, int]] = []
        self._asked_since = 0
        self._path_gap = self._path_pace = math.nan
        self._foreseen = False
        self._offered = -1
        self._promise = np.zeros(0)

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and row < len(self._stamps) and bool(self._stamps.item(row))

    # requests

    def foresee(self, chain: Chain, held: int) -> None:
        rows = np.asarray(chain, np.int64)
        self._request(len(rows))
        self._foreseen = True
        self._expect(rows, held)

    def continued(self, chain: Chain, held: int) -> None:
        self._expect(np.asarray(chain, np.int64), held, goes_on=True)

    def _expect(self, rows: Rows, held: int, goes_on: bool = False) -> None:
        self._reserve(rows)
        self._flush()
        now = self.surroundings.now_s()
        new = rows[held:]
        if not len(new):
            self._path_gap = self._path_pace = math.nan
            return
        names = self.surroundings.identity(new)
        traits, known = self._gone.recall(names)
        age = now - traits.seen_s
        self._times.returned(traits.kind[known], age[known])
        gap, self._path_pace = self._pace(rows, held, now, traits, known, goes_on)
        self._path_gap = gap
        uses = np.where(known, np.minimum(traits.uses, 254) + 1, 1).astype(np.uint8)
        shared = known & (age < _SHARED_FACTOR * gap)
        pace = np.where(shared, np.log(np.maximum(age, 0) + 0.5), self._path_pace)
        traits = Traits(
            seen_s=np.full(len(new), now),
            kind=_class_of(uses, shared, ~known, pace),
            pace=np.full(len(new), self._path_pace),
            uses=uses,
        )
        self._times.started(traits.kind)
        self._gone.remember(names, traits)
        self._traits.put(new, traits)
        self._names[new] = names
        self._depth[new] = np.arange(held, len(rows))
        self._new[new] = True
        self._promise[new] = self._worth(new)
        if held:
            self._leave_branch(int(rows[held - 1]), int(new[0]))

    def _request(self, rows: int) -> None:
        self._times.request(rows)
        # what was refused counts too: the rows that are in grow older by it
        self._asked_since += rows

    def _pace(
        self,
        rows: Rows,
        held: int,
        now: float,
        gone: Traits,
        known: npt.NDArray[np.bool_],
        goes_on: bool,
    ) -> tuple[float, float]:
        """Seconds since the deepest known block of a chain was used, and its session's pace."""
        if known.any():
            at = int(np.flatnonzero(known)[-1])
            gap, pace = now - gone.seen_s.item(at), gone.pace.item(at)
        elif held:
            last = int(rows[held - 1])
            gap, pace = now - self._traits.seen_s.item(last), self._traits.pace.item(last)
            if (goes_on or gap < _SAME_REQUEST_S) and not math.isnan(pace):
                return math.exp(pace), pace
            if goes_on:
                return math.nan, math.nan
        else:
            return math.nan, math.nan
        return gap, _moved(pace, gap)

    def touch(self, rows: Chain) -> None:
        asked = np.asarray(rows, np.int64)
        asked = asked[asked < len(self._stamps)]
        present = asked[self._stamps[asked] != 0]
        if not len(present):
            return
        used = present[~self._new[present]]
        if len(used):
            self._use(used)
        self._foreseen = False
        self._settle(present)

    def arrived(self, chain: Chain) -> None:
        asked = np.asarray(chain, np.int64)
        asked = asked[asked < len(self._stamps)]
        present = asked[self._stamps[asked] != 0]
        if len(present):
            self._settle(present)

    def _settle(self, present: Rows) -> None:
        """Rows of one chain stand in its order now, and are the warmest."""
        self._new[present] = False
        for row in present.tolist() if self._cooled else ():
            self._cooled.pop(row, None)
        n = len(present)
        self._stamps[present] = np.arange(self._stamp + n, self._stamp, -1)
        self._stamp += n
        self._after[present[:-1]] = present[1:]
        self._before[present[1:]] = present[:-1]
        self._depth[present] = np.arange(n)
        self._offer(int(present[-1]))

    def _use(self, rows: Rows) -> None:
        now = self.surroundings.now_s()
        if not self._foreseen:
            self._path_gap = self._path_pace = math.nan
            self._request(len(rows))
        old = self._traits.get(rows)
        age = now - old.seen_s
        self._times.returned(old.kind, age)
        gap, pace = self._path_gap, self._path_pace
        if math.isnan(gap):
            gap = age.item(-1)
            pace = _moved(old.pace.item(-1), gap)
        shared = age < _SHARED_FACTOR * gap
        uses = np.minimum(old.uses, 254) + np.uint8(1)
        paces = np.where(shared, np.log(np.maximum(age, 0) + 0.5), pace)
        kind = _class_of(uses, shared, False, paces)
        self._times.started(kind)
        self._traits.put(
            rows, Traits(np.full(len(rows), now), kind, np.full(len(rows), pace), uses)
        )

    def _leave_branch(self, last: int, goes_to: int) -> None:
        """The chain went from `last` to elsewhere than most requests for it did."""
        row, uses = int(self._after[last]), self._traits.uses
        if row < 0 or row == goes_to or uses[row] < 2 or 2 * int(uses[row]) <= int(uses[last]):
            return
        left = []
        while row >= 0 and self._stamps[row] and not self._traits.kind[row] & 1:
            left.append(row)
            row = int(self._after[row])
        if left:
            self._reclass(np.array(left, np.int64), self._traits.kind[left] | 1)
            self._offer(left[-1])

    def _reclass(self, rows: Rows, kind: npt.NDArray[np.int64]) -> None:
        self._times.changed(self._traits.kind[rows], kind)
        self._traits.kind[rows] = kind

    def answered(self, chain: Chain, outlook: Outlook) -> None:
        super().answered(chain, outlook)
        rows = np.asarray(chain, np.int64)
        rows = rows[rows < len(self._stamps)]
        rows = rows[self._stamps[rows] != 0]
        kind = self._traits.kind[rows]
        left = kind & 1
        self._reclass(rows, kind - kind % (2 * len(Outlook)) + 2 * int(outlook) + left)
        if len(rows):
            self._offer(int(rows[-1]))

    # rows

    def add(self, row: int) -> None:
        foreseen = row < len(self._new) and self._new.item(row)
        if not foreseen:
            self._meet(row)
        assert not self._stamps.item(row), f"row {row} was added twice"
        self._stamp += 1
        self._stamps[row] = self._stamp
        if self._rows == len(self._dense):
            more = max(_ROWS_MIN, self._rows // 2)
            self._dense = np.concatenate((self._dense, np.zeros(more, np.int64)))
        self._dense[self._rows] = row
        self._place[row] = self._rows
        self._rows += 1
        if not foreseen:
            self._offer(row)

    def _meet(self, row: int) -> None:
        """A row that nobody foresaw."""
        rows = np.array([row], np.int64)
        self._reserve(rows)
        self._flush()
        kind = _class_of(np.ones(1, np.uint8), False, True, np.full(1, math.nan))
        now = np.full(1, self.surroundings.now_s())
        self._traits.put(rows, Traits(now, kind, np.full(1, math.nan), np.ones(1, np.uint8)))
        self._names[rows] = self.surroundings.identity(rows)
        self._depth[row] = 0
        self._new[row] = True

    def remove(self, row: int) -> None:
        assert row in self, f"row {row} was removed twice"
        self._stamps[row] = 0
        self._new[row] = False
        self._after[row] = -1
        if self._cooled:
            self._cooled.pop(row, None)
        before = self._before.item(row)
        self._before[row] = -1
        if before >= 0 and self._stamps.item(before) and self._after.item(before) == row:
            self._offer(before)
            self._offered = before
        self._rows -= 1
        last = self._dense.item(self._rows)
        at = self._place.item(row)
        self._dense[at] = last
        self._place[last] = at
        self._left_since.append(row)

    def _flush(self) -> None:
        if self._left_since:
            rows = np.array(self._left_since, np.int64)
            self._gone.remember(self._names[rows], self._traits.get(rows))
            self._left_since.clear()

    def cool(self, rows: Chain) -> None:
        for row in np.asarray(rows, np.int64).tolist():
            if row in self and row not in self._cooled:
                self._cooled[row] = None

    # victims

    def _worth(self, rows: Rows) -> Floats:
        age = self.surroundings.now_s() - self._traits.seen_s[rows]
        worth = self._times.worth(self._traits.kind[rows], age)
        weighted: Floats = worth * (1 + self._growth * self._depth[rows])
        return weighted

    def _offer(self, row: int) -> None:
        traits = self._traits
        age = self.surroundings.now_s() - traits.seen_s.item(row)
        worth = self._times.worth_of(traits.kind.item(row), age)
        worth *= 1 + self._growth * self._depth.item(row)
        heapq.heappush(self._heap, (worth, -self._depth.item(row), self._stamps.item(row), row))

    def admits(self, row: int, victim: int) -> bool:
        if victim in self._cooled:
            return True
        worth, _, _, cheapest = self._heap[0]
        assert cheapest == victim, "admission was asked about another row than the victim"
        return bool(self._promise.item(row) > worth)

    def reconsider(self, row: int) -> None:
        if row != self._offered and row in self and row not in self._cooled:
            self._offer(row)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        for row in self._cooled:
            if may_go(row):
                return row
        found = None
        if self._asked_since * _REVALUE_SHARE < self._rows:
            found = self._next(may_go)
        if found is None and self._rows:
            rows = self._dense[: self._rows]
            after = self._after[rows]
            self._value(rows[(after < 0) | (self._stamps[after] == 0)])
            found = self._next(may_go)
            if found is None:
                self._value(rows)
                found = self._next(may_go)
        return found

    def _next(self, may_go: Callable[[int], bool]) -> int | None:
        heap, stamp_of, cooled = self._heap, self._stamps.item, self._cooled
        while heap:
            _, _, stamp, row = heap[0]
            if stamp_of(row) == stamp and row not in cooled and may_go(row):
                return row
            heapq.heappop(heap)
            self._offered = -1
        return None

    def _value(self, rows: Rows) -> None:
        self._asked_since = 0
        worth = self._worth(rows)
        shallow = -self._depth[rows]
        order = np.lexsort((shallow, worth))
        columns = (worth, shallow, self._stamps[rows], rows)
        self._heap = list(zip(*(column[order].tolist() for column in columns), strict=True))

    # the rest of the contract

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        assert not self._rows, "loading needs an empty policy"
        for row in coldest_first.tolist():
            self.add(row)
        self.touch(coldest_first[::-1])

    def check_integrity(self) -> None:
        rows = np.flatnonzero(self._stamps)
        assert len(rows) == self._rows, "rows are miscounted"
        assert np.array_equal(np.sort(self._dense[: self._rows]), rows), "rows are misplaced"
        assert len(np.unique(self._stamps[rows])) == len(rows), "two rows share a stamp"
        assert all(row in self for row in self._cooled), "a row that left is cool"

    def _reserve(self, rows: Rows) -> None:
        more = int(rows.max(initial=-1)) + 1 - len(self._stamps)
        if more <= 0:
            return
        more = max(more, _ROWS_MIN, len(self._stamps) // 8)
        self._traits = self._traits.grown(more)
        for name, fill in (
            ("_stamps", 0),
            ("_names", 0),
            ("_depth", 0),
            ("_after", -1),
            ("_before", -1),
            ("_place", 0),
            ("_new", False),
            ("_promise", 0),
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.full(more, fill, column.dtype))))


def _moved(pace: float, gap_s: float) -> float:
    """The moving mean of log(seconds + 0.5) after one more gap."""
    now = math.log(max(gap_s, 0.0) + 0.5)
    return now if math.isnan(pace) else pace + _PACE_GAIN * (now - pace)
