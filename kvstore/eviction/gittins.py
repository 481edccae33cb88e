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
  of the chain that they continue; a first request that nothing is known about is worth what such
  requests turned out to be.
* Think times: the index rises with age where a session's next request is due and falls once it is
  overdue, which no order by recency can do. Where sessions together need more than the room, those
  whose next request is soonest stay whole, instead of each losing its blocks shortly before it
  needs them. Where the end of an answer is told, the wait is timed from it.
* Branches left behind: where a chain that most requests for a block took goes on another way (the
  reasoning of an earlier turn was dropped, a history was summarised), the old branch is a class of
  its own and soon found to be dead.
* Admission: a chain whose blocks are worth less than everything that would have to go for them is
  not let in (`admits`). One-off prompts can't flush the cache.
* Leaf first: within a chain the deeper block goes first at equal worth.

What is learnt is counted whether or not a block is in: its last use, class and pace are remembered
by name for `_REMEMBERED` times as many blocks as there is room for, in a table where a later block
overwrites an earlier one of the same cell. Only what has happened is used, never what will.

Cost: blocks that came and were used together are one run (`runs`) with one set of books, so a
request costs a few steps per run and only the table of names is touched per block. Worth changes
with age, so all ends of chains are valued anew now and then (`ends`): a constant per access.
Memory: 17 bytes per row, 250 per run and 45 per remembered block.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook
from kvstore.eviction.base import ALONE, Chain, EvictionPolicy, Rows, Surroundings
from kvstore.eviction.block_classes import OUTLOOKS, class_of, groups, moved
from kvstore.eviction.ends import Ends
from kvstore.eviction.remembered import UNKNOWN, Record, Remembered
from kvstore.eviction.reuse_times import ReuseTimes
from kvstore.eviction.runs import NONE, RowArray, Runs, row_array

_LOADED_ROWS: Final = 64
_SHARED_FACTOR: Final = 0.5
_SAME_REQUEST_S: Final = 1e-3
_USES_MAX: Final = 8


class _Piece(NamedTuple):
    """New blocks of a request, up to the `end`-th, that have the same past."""

    end: int
    kind: int
    uses: int


class Gittins(EvictionPolicy):
    """See the module."""

    def __init__(
        self, surroundings: Surroundings = ALONE, cost_growth_per_block: float = 0.0
    ) -> None:
        super().__init__(surroundings)
        self._growth = cost_growth_per_block
        self._times = ReuseTimes(groups())
        self._gone = Remembered(surroundings.capacity_rows())
        self._runs = Runs()
        self._ends = Ends(self._runs, self._times, cost_growth_per_block)
        self._names = np.zeros(0, np.uint64)
        self._rows = 0
        self._left, self._left_as = array("i"), array("q")
        self._cooled: dict[int, None] = {}
        # the request that was foreseen last
        self._foreseen = False
        self._new = row_array(())
        self._pieces: list[_Piece] = []
        self._entered = self._piece = 0
        self._came_s = 0.0
        self._path_gap = self._path_pace = math.nan

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, row: object) -> bool:
        run_of = self._runs.run_of
        return isinstance(row, int) and 0 <= row < len(run_of) and run_of[row] >= 0

    # requests

    def foresee(self, chain: Chain, held: int) -> None:
        rows = np.asarray(chain, np.int64)
        self._request(len(rows))
        self._foreseen = True
        self._expect(rows, held)

    def continued(self, chain: Chain, held: int) -> None:
        self._expect(np.asarray(chain, np.int64), held, goes_on=True)

    def _expect(self, rows: Rows, held: int, goes_on: bool = False) -> None:
        self._came_s = now = self.surroundings.now_s()
        self._path_gap = self._path_pace = math.nan
        new = rows[held:]
        self._new, self._pieces = row_array(new), []
        self._entered = self._piece = 0
        if not len(new):
            return
        self._reserve(max(self._new) + 1)
        self._flush()
        last = int(rows[held - 1]) if held else NONE
        above = self._runs.ending_at(last) if last in self else NONE
        names = self.surroundings.identity(new)
        numbers = self._gone.recall(names)
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(new)]
        pasts = [
            None if number == UNKNOWN else self._gone.record(number)
            for number in numbers[starts].tolist()
        ]
        self._path_gap, self._path_pace = self._pace(pasts, above, now, goes_on)
        for start, end, past in zip(starts, ends, pasts, strict=True):
            self._expect_piece(end, end - start, past)
        self._gone.remember(names, self._notes())
        self._names[new] = names
        if above >= 0:
            self._leave_branch(above)

    def _request(self, rows: int) -> None:
        self._times.request(rows)
        # what was refused counts too: the rows that are in grow older by it
        self._ends.asked_since += rows

    def _pace(
        self, pasts: list[Record | None], above: int, now: float, goes_on: bool
    ) -> tuple[float, float]:
        """Seconds since the deepest known block of a chain was used, and its session's pace."""
        deepest = next((past for past in reversed(pasts) if past is not None), None)
        if deepest is not None:
            gap, pace = now - deepest.seen_s, deepest.pace
        elif above >= 0:
            gap, pace = now - self._runs.seen_s[above], self._runs.pace[above]
            if (goes_on or gap < _SAME_REQUEST_S) and not math.isnan(pace):
                return math.exp(pace), pace
            if goes_on:
                return math.nan, math.nan
        else:
            return math.nan, math.nan
        return gap, moved(pace, gap)

    def _expect_piece(self, end: int, rows: int, past: Record | None) -> None:
        """New blocks up to the `end`-th have this past."""
        if past is None:
            uses, kind = 1, class_of(1, False, True, self._path_pace)
        else:
            age = self._came_s - past.seen_s
            self._came_back(past, rows)
            uses = min(past.uses + 1, _USES_MAX)
            kind = self._used_as(uses, age, self._path_gap, self._path_pace)
        self._times.started(kind, rows)
        if self._pieces and self._pieces[-1][1:] == (kind, uses):
            self._pieces.pop()
        self._pieces.append(_Piece(end, kind, uses))

    def _arriving(self, kind: int, uses: int) -> Record:
        return Record(self._came_s, self._came_s, kind, self._path_pace, uses)

    def _came_back(self, past: Record, rows: int) -> None:
        """So many blocks are used again; what was said when an answer ended is a class of its own
        beside the one that counts from the request."""
        now = self.surroundings.now_s()
        self._times.returned(past.kind, now - past.since_s, rows)
        said = past.kind % OUTLOOKS - past.kind % 2
        if said:
            self._times.returned(past.kind - said, now - past.seen_s, rows)

    def _used_as(self, uses: int, age: float, gap: float, pace: float) -> int:
        """The class of blocks that are used now, after `age` seconds, by a session that came back
        after `gap`."""
        shared = age < _SHARED_FACTOR * gap
        return class_of(uses, shared, False, math.log(max(age, 0.0) + 0.5) if shared else pace)

    def _notes(self) -> Rows:
        """Per new block, the number of a record of what is known of it now."""
        notes = array("q")
        for end, kind, uses in self._pieces:
            number = self._gone.note(self._arriving(kind, uses))
            notes.extend([number] * (end - len(notes)))
        return np.frombuffer(notes, np.int64)

    def touch(self, rows: Chain) -> None:
        runs = self._runs
        path = runs.path(rows)
        if not path:
            return
        used = [run for run in path if not runs.new[run]]
        if used:
            self._use(used)
        self._foreseen = False
        self._settle(path)

    def arrived(self, chain: Chain) -> None:
        path = self._runs.path(chain)
        if path:
            self._settle(path)

    def _settle(self, path: list[int]) -> None:
        """Runs of one chain stand in its order now, and are the warmest."""
        if self._cooled:
            for run in path:
                for row in self._runs.rows[run]:
                    self._cooled.pop(row, None)
        self._offer(self._link(path))

    def _link(self, path: list[int]) -> int:
        """Order runs that were used as one chain, root last; the number of the deepest."""
        runs, depth, above = self._runs, 0, NONE
        for run in path:
            runs.new[run], runs.depth[run] = 0, depth
            depth += len(runs.rows[run])
            if above >= 0:
                if runs.after[above] in (NONE, run) and self._alike(above, run):
                    runs.join(above, run)
                    continue
                runs.after[above], runs.above[run] = run, runs.rows[above][-1]
            above = run
        for run in reversed(path):
            if runs.stamp[run]:
                runs.stamp[run], runs.offered[run] = runs.next_stamp(), 0
        return above

    def _alike(self, one: int, other: int) -> bool:
        runs = self._runs
        return (
            runs.kind[one] == runs.kind[other]
            and runs.uses[one] == runs.uses[other]
            and runs.seen_s[other] - runs.seen_s[one] < _SAME_REQUEST_S
        )

    def _use(self, used: list[int]) -> None:
        now, runs, times = self.surroundings.now_s(), self._runs, self._times
        if not self._foreseen:
            self._path_gap = self._path_pace = math.nan
            self._request(sum(len(runs.rows[run]) for run in used))
        gap, pace = self._path_gap, self._path_pace
        if math.isnan(gap):
            gap = now - runs.seen_s[used[-1]]
            pace = moved(runs.pace[used[-1]], gap)
        for run in used:
            n, age = len(runs.rows[run]), now - runs.seen_s[run]
            self._came_back(runs.record(run), n)
            uses = min(runs.uses[run] + 1, _USES_MAX)
            kind = self._used_as(uses, age, gap, pace)
            times.started(kind, n)
            runs.seen_s[run] = runs.since_s[run] = now
            runs.kind[run] = kind
            runs.pace[run], runs.uses[run] = pace, uses

    def _leave_branch(self, last: int) -> None:
        """A chain goes on from `last` to elsewhere than most requests for it did."""
        runs, run = self._runs, self._runs.after[last]
        if run < 0 or runs.uses[run] < 2 or 2 * runs.uses[run] <= runs.uses[last]:
            return
        end = NONE
        while run >= 0 and not runs.kind[run] & 1:
            self._reclass(run, runs.kind[run] | 1)
            end, run = run, runs.after[run]
        if end >= 0:
            self._offer(end)

    def _reclass(self, run: int, kind: int) -> None:
        self._times.changed(self._runs.kind[run], kind, len(self._runs.rows[run]))
        self._runs.kind[run] = kind

    def answered(self, chain: Chain, outlook: Outlook) -> None:
        runs = self._runs
        path = runs.path(chain)
        now = self.surroundings.now_s()
        for run in path:
            kind = runs.kind[run]
            before, left = kind % OUTLOOKS, kind % 2
            told = kind - before + 2 * int(outlook) + left
            if before > 1:
                self._reclass(run, told)
            elif outlook:
                self._times.started(told, len(runs.rows[run]))
                runs.kind[run] = told
            runs.since_s[run] = now
        if path:
            self._offer(path[-1])

    # rows

    def exchange(
        self,
        new: Rows,
        free: int,
        may_go: Callable[[int], bool],
        leave: Callable[[Sequence[int]], int],
    ) -> int:
        if self._entered or len(new) != len(self._new) or new[0] != self._new[0]:
            return super().exchange(new, free, may_go, leave)
        start = 0
        for piece in self._pieces:
            while start + free < piece.end:
                went = self._make_way(piece, piece.end - start - free, may_go, leave)
                if not went:
                    break
                free += went
            end = min(piece.end, start + free)
            self._enter(self._new[start:end], piece)
            free -= end - start
            if end < piece.end:
                return end
            start = end
        return start

    def _enter(self, rows: RowArray, piece: _Piece) -> None:
        if rows:
            self._runs.make(rows, self._arriving(piece.kind, piece.uses))
            self._rows += len(rows)

    def _make_way(
        self,
        piece: _Piece,
        rows: int,
        may_go: Callable[[int], bool],
        leave: Callable[[Sequence[int]], int],
    ) -> int:
        """Let up to so many rows go that are worth less than those of `piece`; how many went."""
        if self._cooled:
            row = self.victim(may_go)
            if row is None or not (
                row in self._cooled or self._promise(piece) > self._ends.cheapest[0]
            ):
                return 0
            leave((row,))
            self.remove(row)
            return 1
        run = self._cheapest(may_go)
        if run < 0 or self._promise(piece) <= self._ends.cheapest[0]:
            return 0
        mine, run_of = self._runs.rows[run], self._runs.run_of
        going = mine[: -rows - 1 : -1]
        del going[leave(going) :]
        del mine[len(mine) - len(going) :]
        for row in going:
            run_of[row] = NONE
        self._let_go(run, going)
        return len(going)

    def _promise(self, piece: _Piece) -> float:
        """The worth of a new block once it is in."""
        return self._times.worth(piece.kind, 0.0) * (1 + self._growth * piece.end)

    def _let_go(self, run: int, rows: RowArray) -> None:
        """Rows that were the tail of a run have left it."""
        runs = self._runs
        number = self._gone.note(runs.record(run))
        self._left.extend(rows)
        self._left_as.extend([number] * len(rows))
        self._rows -= len(rows)
        if runs.rows[run]:
            # a tier may lose a row before those that follow it
            runs.after[run] = NONE
            if not runs.offered[run]:
                self._offer(run)
            return
        before = runs.drop(run)
        if before >= 0:
            self._offer(before)

    def add(self, row: int) -> None:
        assert row not in self, f"row {row} was added twice"
        at, new = self._entered, self._new
        if at < len(new) and new[at] != row:
            # some have come out of turn
            while at < len(new) and new[at] in self:
                at += 1
            self._entered = at
        if at < len(new) and new[at] == row:
            self._add_foreseen(row, at)
            return
        past = self._meet(row)
        self._offer(self._runs.make(row_array((row,)), past))
        self._rows += 1

    def _add_foreseen(self, row: int, at: int) -> None:
        runs, first = self._runs, not at
        while self._pieces[self._piece].end <= at:
            self._piece += 1
            first = True
        run = NONE if first else runs.run_of[self._new[at - 1]]
        if run >= 0 and runs.new[run] and runs.rows[run][-1] == self._new[at - 1]:
            runs.rows[run].append(row)
            runs.run_of[row] = run
            self._rows += 1
        else:
            self._enter(row_array((row,)), self._pieces[self._piece])
        self._entered += 1

    def _meet(self, row: int) -> Record:
        """What is known of a row that nobody foresaw just now."""
        rows = np.array([row], np.int64)
        self._reserve(row + 1)
        self._flush()
        names = self.surroundings.identity(rows)
        self._names[rows] = names
        number = int(self._gone.recall(names)[0])
        if number == UNKNOWN:
            now, kind = self.surroundings.now_s(), class_of(1, False, True, math.nan)
            return Record(now, now, kind, math.nan, 1)
        return self._gone.record(number)

    def remove(self, row: int) -> None:
        assert row in self, f"row {row} was removed twice"
        self._cooled.pop(row, None)
        run = self._runs.ending_at(row)
        self._runs.rows[run].pop()
        self._runs.run_of[row] = NONE
        self._let_go(run, row_array((row,)))

    def _flush(self) -> None:
        if self._left:
            rows = np.frombuffer(self._left, np.int32)
            self._gone.remember(self._names[rows], np.frombuffer(self._left_as, np.int64))
            self._left, self._left_as = array("i"), array("q")

    def cool(self, rows: Chain) -> None:
        for row in np.asarray(rows, np.int64).tolist():
            if row in self and row not in self._cooled:
                self._cooled[row] = None

    # victims

    def _offer(self, run: int) -> None:
        self._ends.offer(run, self.surroundings.now_s())

    def admits(self, row: int, victim: int) -> bool:
        if victim in self._cooled:
            return True
        worth, run = self._ends.cheapest
        assert self._runs.rows[run][-1] == victim, (
            "admission was asked about another row than the victim"
        )
        at = self._entered
        if at < len(self._new) and self._new[at] == row:
            piece = next(piece for piece in self._pieces if at < piece.end)
        else:
            past = self._meet(row)
            piece = _Piece(1, past.kind, past.uses)
        return self._promise(piece) > worth

    def reconsider(self, row: int) -> None:
        if row in self and row not in self._cooled:
            run = self._runs.run_of[row]
            if not self._runs.offered[run] and self._runs.rows[run][-1] == row:
                self._offer(run)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        for row in self._cooled:
            if may_go(row):
                return row
        run = self._cheapest(may_go)
        return self._runs.rows[run][-1] if run >= 0 else None

    def _cheapest(self, may_go: Callable[[int], bool]) -> int:
        """The run whose last row is to go next, or NONE."""
        if not self._rows:
            return NONE
        now, cooled = self.surroundings.now_s(), self._cooled

        def goes(row: int) -> bool:
            return row not in cooled and may_go(row)

        return self._ends.next(self._rows, now, goes)

    # the rest of the contract

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        assert not self._rows, "loading needs an empty policy"
        self._reserve(int(coldest_first.max(initial=-1)) + 1)
        self._names[coldest_first] = self.surroundings.identity(coldest_first)
        now, kind = self.surroundings.now_s(), class_of(1, False, False, math.nan)
        past = Record(now, now, kind, math.nan, 1)
        # pieces of the order as runs; the coldest is the deepest, as if all were one chain
        self._runs.load(coldest_first[::-1].astype(np.int32), _LOADED_ROWS, past)
        self._rows = len(coldest_first)

    def check_integrity(self) -> None:
        self._runs.check_integrity()
        rows = sum(1 for run in self._runs.run_of if run >= 0)
        assert rows == self._rows, "rows are miscounted"
        assert all(row in self for row in self._cooled), "a row that left is cool"

    def _reserve(self, rows: int) -> None:
        more = self._runs.reserve_rows(rows)
        if more:
            self._names = np.concatenate((self._names, np.zeros(more, np.uint64)))
