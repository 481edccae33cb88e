"""Gittins: a block is worth the rate at which holding it is expected to pay (our default).

A block in the cache occupies room until it is used again or given up; a use saves recomputing it.
So what counts is the chance of a use × the cost of recomputing ÷ (bytes × the time until then), for
the best time to give up: the Gittins index (`reuse_times`). Blocks are of one size here, and DS4.1F
computes a token of a deep block nearly as fast as of a shallow one (its attention is sparse), so
the cost grows by `cost_growth_per_block` only. What chains and sessions add to that:

* A block's class is how often it was used (1, 2, 3–4, more), the pace of its session (a moving mean
  of the logarithm of the times between requests for the deepest block known of the request's
  chain), whether the block itself is used much more often than that (a shared prompt), whether the
  last request brought more than one block that nobody knew (one more question about a text, or a
  text), whether the block is new, and what the client said when the last answer ended (`Outlook`).
  New blocks have the pace of the chain that they continue; a first request that nothing is known
  about is worth what such requests turned out to be.
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
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook
from kvstore.eviction.arrivals import SAME_REQUEST_S, Arrivals, Piece
from kvstore.eviction.base import ALONE, Chain, EvictionPolicy, Rows, Surroundings
from kvstore.eviction.block_classes import (
    OUTLOOKS,
    groups,
    is_new,
    moved,
    told_growth,
    unheard_of,
)
from kvstore.eviction.ends import Ends
from kvstore.eviction.remembered import Record
from kvstore.eviction.reuse_times import ReuseTimes
from kvstore.eviction.runs import NONE, RowArray, Runs, row_array

_LOADED_ROWS: Final = 512


class Gittins(EvictionPolicy):
    """See the module."""

    def __init__(
        self, surroundings: Surroundings = ALONE, cost_growth_per_block: float = 0.0
    ) -> None:
        super().__init__(surroundings)
        self._growth = cost_growth_per_block
        self._times = ReuseTimes(groups())
        self._arrivals = Arrivals(surroundings, self._times)
        self._runs = Runs()
        self._ends = Ends(self._runs, self._times, cost_growth_per_block)
        self._rows = 0
        self._cooled: dict[int, None] = {}
        # of the request that was foreseen last: whether its use is still to come, and how many rows
        # it has added one by one
        self._foreseen, self._entered = False, 0

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
        new, runs, above, path = rows[held:], self._runs, NONE, list[int]()
        self._entered = 0
        if len(new):
            self._reserve(max(new.tolist()) + 1)
            path = runs.path(rows[:held]) if goes_on else []
            last = int(rows[held - 1]) if held else NONE
            above = runs.ending_at(last) if last in self else NONE
        known = runs.record(above) if above >= 0 else None
        self._arrivals.expect(new, known, goes_on, self._brought(path))
        self._tell_growth(path, self._arrivals.grew)
        if above >= 0:
            self._leave_branch(above)

    def _brought(self, path: list[int]) -> int:
        """Rows at the end of a chain that no request has used yet: its last one brought them."""
        runs = self._runs
        new = takewhile(lambda run: is_new(runs.kind[run]), reversed(path))
        return sum(len(runs.rows[run]) for run in new)

    def _tell_growth(self, path: list[int], grew: bool) -> None:
        runs = self._runs
        for run in path:
            before, kind = runs.kind[run], told_growth(runs.kind[run], grew)
            if kind == before:
                continue
            said = kind % OUTLOOKS - kind % 2
            if said:
                # such blocks wait in two classes (`Arrivals.used`)
                self._times.changed(before - said, kind - said, len(runs.rows[run]))
            self._reclass(run, kind)

    def _request(self, rows: int) -> None:
        self._times.request(rows)
        # what was refused counts too: the rows that are in grow older by it
        self._ends.asked_since += rows

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
                    runs.follow(above, run)
                    runs.join(above, run)
                    continue
                runs.follow(above, run)
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
            and runs.seen_s[other] - runs.seen_s[one] < SAME_REQUEST_S
        )

    def _use(self, used: list[int]) -> None:
        now, runs, arrivals = self.surroundings.now_s(), self._runs, self._arrivals
        if not self._foreseen:
            arrivals.forget_path()
            self._request(sum(len(runs.rows[run]) for run in used))
        gap, pace = arrivals.gap_s, arrivals.pace
        if math.isnan(gap):
            gap = now - runs.seen_s[used[-1]]
            pace = moved(runs.pace[used[-1]], gap)
        for run in used:
            kind, uses = arrivals.used(runs.record(run), len(runs.rows[run]), now, gap, pace)
            runs.seen_s[run] = runs.since_s[run] = now
            runs.kind[run], runs.pace[run], runs.uses[run] = kind, pace, uses

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
        rows = self._arrivals.rows
        if self._entered or len(new) != len(rows) or new[0] != rows[0]:
            return super().exchange(new, free, may_go, leave)
        start = 0
        for piece in self._arrivals.pieces:
            if start + free < piece.end:
                free += self._make_way(piece, piece.end - start - free, may_go, leave)
            end = min(piece.end, start + free)
            self._enter(rows[start:end], piece)
            free -= end - start
            if end < piece.end:
                return end
            start = end
        return start

    def _enter(self, rows: RowArray, piece: Piece) -> None:
        if rows:
            self._runs.make(rows, self._arrivals.record(piece))
            self._rows += len(rows)

    def _make_way(
        self,
        piece: Piece,
        rows: int,
        may_go: Callable[[int], bool],
        leave: Callable[[Sequence[int]], int],
    ) -> int:
        """Let up to so many rows go that are worth less than those of `piece`; how many went."""
        promise, left = self._promise(piece), rows
        while left:
            went = self._let_cheapest_go(promise, left, may_go, leave)
            if not went:
                break
            left -= went
        return rows - left

    def _let_cheapest_go(
        self,
        promise: float,
        rows: int,
        may_go: Callable[[int], bool],
        leave: Callable[[Sequence[int]], int],
    ) -> int:
        """Let up to so many rows of one run go, if worth less than `promise`; how many went."""
        if self._cooled:
            row = self.victim(may_go)
            if row is None or not (row in self._cooled or promise > self._ends.cheapest[0]):
                return 0
            leave((row,))
            self.remove(row)
            return 1
        run = self._cheapest(may_go)
        if run < 0 or promise <= self._ends.cheapest[0]:
            return 0
        mine, run_of = self._runs.rows[run], self._runs.run_of
        going = mine[: -rows - 1 : -1]
        del going[leave(going) :]
        del mine[len(mine) - len(going) :]
        for row in going:
            run_of[row] = NONE
        self._let_go(run, going)
        return len(going)

    def _promise(self, piece: Piece) -> float:
        """The worth of a new block once it is in."""
        return self._times.worth(piece.kind, 0.0) * (1 + self._growth * piece.end)

    def _let_go(self, run: int, rows: RowArray) -> None:
        """Rows that were the tail of a run have left it."""
        runs = self._runs
        self._arrivals.left(rows, runs.record(run))
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
        if not self._is_next(row):
            self._skip_those_in()
        if self._is_next(row):
            self._add_next(row)
            return
        self._reserve(row + 1)
        past = self._arrivals.meet(row)
        self._offer(self._runs.make(row_array((row,)), past))
        self._rows += 1

    def _is_next(self, row: int) -> bool:
        """Whether this is the row that the foreseen request adds next."""
        at, rows = self._entered, self._arrivals.rows
        return at < len(rows) and rows[at] == row

    def _skip_those_in(self) -> None:
        """Foreseen rows that came out of turn."""
        rows = self._arrivals.rows
        while self._entered < len(rows) and rows[self._entered] in self:
            self._entered += 1

    def _add_next(self, row: int) -> None:
        runs, arrivals, at = self._runs, self._arrivals, self._entered
        piece = arrivals.piece_at(at)
        run, last = NONE, arrivals.rows[at - 1]
        if at and arrivals.piece_at(at - 1) is piece:
            run = runs.run_of[last]
        if run >= 0 and runs.new[run] and runs.rows[run][-1] == last:
            runs.rows[run].append(row)
            runs.run_of[row] = run
            self._rows += 1
        else:
            self._enter(row_array((row,)), piece)
        self._entered += 1

    def remove(self, row: int) -> None:
        assert row in self, f"row {row} was removed twice"
        self._cooled.pop(row, None)
        run = self._runs.ending_at(row)
        self._runs.rows[run].pop()
        self._runs.run_of[row] = NONE
        self._let_go(run, row_array((row,)))

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
        if self._is_next(row):
            piece = self._arrivals.piece_at(self._entered)
        else:
            self._reserve(row + 1)
            past = self._arrivals.meet(row)
            piece = Piece(1, past.kind, past.uses)
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
        if not cooled:
            return self._ends.next(self._rows, now, may_go)
        return self._ends.next(self._rows, now, lambda row: row not in cooled and may_go(row))

    # the rest of the contract

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        assert not self._rows, "loading needs an empty policy"
        self._reserve(int(coldest_first.max(initial=-1)) + 1)
        self._arrivals.name(coldest_first)
        now, kind = self.surroundings.now_s(), unheard_of(new=False)
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
            self._arrivals.reserve(more)
