"""Replaying a trace against policies alone: no bytes, any capacity.

The rules are the store's. A prefix is a hit up to the first block that is missing; the request then
adds the blocks that missed, root first, each taking the place of a victim that the policy names;
only leaves may go, and not the blocks of the request itself. What the policy does not admit, or
what finds no room, stays out with everything below it.

With a DRAM capacity beside the store's own, DRAM is a cache of the store's blocks under the same
rules: what a request finds in the store or adds to it is promoted, and what leaves the store leaves
DRAM.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.bench.trace import Trace
from kvstore.eviction import EvictionPolicy, Outlook, Surroundings

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
    """One capacity under one policy. Block numbers are rows."""

    def __init__(self, trace: Trace, make: PolicyMaker, capacity: int, now: list[float]) -> None:
        self.capacity = capacity
        self.policy = make(Surroundings(now_s=lambda: now[0], capacity_rows=lambda: capacity))
        self._in = bytearray(trace.unique)
        self._is_in = np.frombuffer(self._in, np.uint8)
        self._children = array("i", bytes(4 * trace.unique))
        self._child_counts = np.frombuffer(self._children, np.int32)
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
        children, parents, went = self._children, self._parent, 0
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
        added = self._add(rows, held, gone) if held < len(rows) else 0
        policy.touch(rows[: held + added])
        return added

    def _add(self, rows: Counts, held: int, gone: Callable[[int], None] | None) -> int:
        children, is_in, new = self._children, self._in, rows[held:]
        last = int(rows[held - 1]) if held else -1
        before = self.used

        def may_go(row: int) -> bool:
            return not children[row] and row != last and bool(is_in[row])

        def leave(going: Sequence[int]) -> int:
            went = self._take_out(going, last)
            if gone:
                for row in going[:went]:
                    gone(row)
            return went

        added = self.policy.exchange(new, self.capacity - before, may_go, leave)
        self.evicted += before - self.used
        self.refused += len(new) - added
        self.used += added
        self._is_in[new[:added]] = 1
        # a first block has no parent
        self._child_counts[self._parents[new[not held : added]]] += 1
        return added


def simulate(
    trace: Trace,
    make: PolicyMaker,
    capacity: int,
    name: str = "",
    dram_capacity: int = 0,
    hints: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Replay:
    """Play a trace through one policy.

    `make`: gives an empty policy; called once per tier. `capacity`, `dram_capacity`: blocks.
    `hints`: tell the policy at the end of every answer what the client knew then (`Outlook`).
    """
    now = [0.0]
    store = _Cache(trace, make, capacity, now)
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
    chain = trace.chain(request).astype(np.int64)
    outlook = Outlook(int(trace.outlook[request]))
    store.policy.answered(chain, outlook)
    if dram:
        dram.policy.answered(chain, outlook)
