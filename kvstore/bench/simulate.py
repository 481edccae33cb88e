"""Replaying a trace against policies alone: no bytes, any capacity.

The rules are the store's. A prefix is a hit up to the first block that is missing; the request then
adds the blocks that missed, root first, each taking the place of a victim that the policy names;
only leaves may go, and not the blocks of the request itself. What the policy does not admit, or
what finds no room, stays out with everything below it.

With a DRAM capacity beside the store's own, DRAM is a cache of the store's blocks under the same
rules: what a request finds in the store or adds to it is promoted, and what leaves the store leaves
DRAM.

As published, a request is one step: its blocks take their place in the policy's order once all are
in. Through a log they come as they are written: what the request found is used first, then blocks
are added as far as there is room and take their place; without room the policy is asked about the
next block alone, and so many victims go at once as fill a segment's dead part (`log_step`).
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.bench.trace import Trace
from kvstore.eviction import EvictionPolicy, Outlook, Surroundings, own_end

Counts = npt.NDArray[np.int64]
PolicyMaker = Callable[[Surroundings], EvictionPolicy]
_PROGRESS_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay counted. Per request: `hit_dram` and `hit_store` blocks (the second: found in
    the store but not in DRAM; all hits where no DRAM was simulated); the rest are misses."""

    trace: Trace
    policy: str
    capacity: int
    dram_capacity: int
    hit_dram: Counts
    hit_store: Counts
    added: int
    evicted: int
    refused: int
    promoted: int

    @property
    def hit_rate(self) -> float:
        """Hits of all block accesses, which is the token hit rate of whole blocks."""
        hits = int(self.hit_dram.sum()) + int(self.hit_store.sum())
        return hits / self.trace.accesses if self.trace.accesses else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Requests that found at least one block."""
        asked = np.diff(self.trace.start) > 0
        return float(((self.hit_dram + self.hit_store)[asked] > 0).mean()) if asked.any() else 0.0


class _Cache:
    """One capacity under one policy. Block numbers are rows. `log_step`: see `simulate`."""

    def __init__(
        self, trace: Trace, make: PolicyMaker, capacity: int, now: list[float], log_step: int = 0
    ) -> None:
        self.capacity, self._step = capacity, log_step
        self.policy = make(Surroundings(now_s=lambda: now[0], capacity_rows=lambda: capacity))
        self._in = bytearray(trace.unique)
        self._is_in = np.frombuffer(self._in, np.uint8)
        self.children = array("i", bytes(4 * trace.unique))
        self._child_counts = np.frombuffer(self.children, np.int32)
        self._parent = array("i", trace.parent.tobytes())
        self._parents = np.frombuffer(self._parent, np.int32)
        self.used = self.evicted = self.refused = 0

    def held(self, chain: npt.NDArray[np.int32]) -> int:
        """Length of the prefix that is in."""
        there = self._is_in[chain]
        return len(chain) if there.all() else int(there.argmin())

    def drop(self, row: int) -> None:
        """Out, if in; nothing in may hang below it."""
        if self._in[row]:
            self.policy.remove(row)
            self._take_out((row,), -1)

    def _take_out(self, rows: Sequence[int], keep: int) -> int:
        """Rows leave in their order, up to the first that has children or is `keep`."""
        children, parents, went = self.children, self._parent, 0
        parent = -1
        for row in rows:
            if children[row] or row == keep:
                break
            went += 1
            self._in[row] = 0
            parent = parents[row]
            if parent >= 0:
                children[parent] -= 1
        self.used -= went
        if parent >= 0 and not children[parent]:
            self.policy.reconsider(parent)
        return went

    def use(
        self,
        chain: npt.NDArray[np.int32],
        held: int,
        gone: Callable[[int], None] | None = None,
    ) -> int:
        """A request for `chain`, of which `held` blocks are in: adds what it can and returns how
        many that were. `gone` hears of each block that had to go."""
        policy = self.policy
        rows = chain.astype(np.int64)
        policy.foresee(rows, held)
        if self._step:
            policy.touch(rows[:held])
            return self._append(rows, held, gone)
        added = self._add(rows, held, gone) if held < len(rows) else 0
        policy.touch(rows[: held + added])
        return added

    def _add(self, rows: Counts, held: int, gone: Callable[[int], None] | None) -> int:
        new, before = rows[held:], self.used
        last = int(rows[held - 1]) if held else -1

        def leave(going: Sequence[int]) -> int:
            went = self._take_out(going, last)
            if gone:
                for row in going[:went]:
                    gone(row)
            return went

        added = self.policy.exchange(new, self.capacity - before, self._may_go(last), leave)
        self.evicted += before - self.used
        self.refused += len(new) - added
        self._enter(rows, held, held + added)
        return added

    def _append(self, rows: Counts, held: int, gone: Callable[[int], None] | None) -> int:
        at = held
        while at < len(rows):
            room = self.capacity - self.used or self._make_room(rows, at, gone)
            if not room:
                break
            end = min(len(rows), at + room)
            for row in rows[at:end].tolist():
                self.policy.add(row)
            self._enter(rows, at, end)
            self.policy.arrived(rows[:end])
            at = end
        self.refused += len(rows) - at
        return at - held

    def _make_room(self, rows: Counts, at: int, gone: Callable[[int], None] | None) -> int:
        """Places for `rows[at:]`, given up by victims; 0 where the first is worth less."""
        last, went = int(rows[at - 1]) if at else -1, 0
        may_go = self._may_go(last)
        victim = self.policy.victim(may_go)
        if victim is None or not self.policy.admits(int(rows[at]), victim):
            return 0
        while victim is not None and went < self._step:
            self.policy.remove(victim)
            self._take_out((victim,), last)
            if gone:
                gone(victim)
            went += 1
            victim = self.policy.victim(may_go)
        self.evicted += went
        return went

    def _may_go(self, last: int) -> Callable[[int], bool]:
        """Leaves that are in, but not the `last` block of the request that is."""
        children, is_in = self.children, self._in
        return lambda row: not children[row] and row != last and bool(is_in[row])

    def _enter(self, rows: Counts, start: int, end: int) -> None:
        new = rows[start:end]
        self.used += len(new)
        self._is_in[new] = 1
        # a first block has no parent
        self._child_counts[self._parents[new[not start :]]] += 1


def simulate(
    trace: Trace,
    make: PolicyMaker,
    capacity: int,
    name: str = "",
    dram_capacity: int = 0,
    hints: bool = False,
    log_step: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Replay:
    """Play a trace through one policy.

    `make`: gives an empty policy; called once per tier. `capacity`, `dram_capacity`: blocks.
    `hints`: tell the policy at the end of every answer what the client knew then (`Outlook`).
    `log_step`: the store is a log that gains so many places at a time; 0: it is not.
    """
    now = [0.0]
    store = _Cache(trace, make, capacity, now, log_step)
    dram = _Cache(trace, make, dram_capacity, now) if dram_capacity else None
    hit_dram = np.zeros(trace.requests, np.int64)
    hit_store = np.zeros(trace.requests, np.int64)
    answers: list[tuple[float, int]] = []
    added = promoted = 0
    gone = dram.drop if dram else None
    times, answer_s, outlook = trace.time_s, trace.answer_s, trace.outlook
    for r in range(trace.requests):
        arrives = times.item(r)
        while answers and answers[0][0] <= arrives:
            now[0], earlier = heapq.heappop(answers)
            _tell(store, dram, trace, earlier)
        now[0] = arrives
        chain = trace.chain(r)
        held = store.held(chain)
        fast = dram.held(chain[:held]) if dram else 0
        hit_dram[r], hit_store[r] = fast, held - fast
        new = store.use(chain, held, gone)
        added += new
        if dram:
            promoted += dram.use(chain[: held + new], fast)
        if hints and outlook[r]:
            heapq.heappush(answers, (arrives + answer_s.item(r), r))
        if not r % _PROGRESS_REQUESTS:
            progress(r / trace.requests)
    progress(1.0)
    return Replay(
        trace=trace,
        policy=name,
        capacity=capacity,
        dram_capacity=dram_capacity,
        hit_dram=hit_dram,
        hit_store=hit_store,
        added=added,
        evicted=store.evicted,
        refused=store.refused,
        promoted=promoted,
    )


def _tell(store: _Cache, dram: _Cache | None, trace: Trace, request: int) -> None:
    chain = trace.chain(request)
    outlook = Outlook(int(trace.outlook[request]))
    there = chain[: store.held(chain)].astype(np.int64)
    useless = own_end(there, store.children) if outlook is Outlook.END_OF_SESSION else ()
    for cache in (store, dram):
        if cache is None:
            continue
        if outlook is not Outlook.END_OF_SESSION:
            cache.policy.answered(there, outlook)
        cache.policy.cool(useless)
