"""Belady's rule for chains: the optimum, by looking ahead. For the simulator only.

Among leaves, the one whose next request lies farthest ahead goes; what would go at once is not let
in. A block is asked for whenever one of its children is, so leaves are always among the farthest
and the rule is the optimum among all that keep prefixes whole.
"""

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.bench.trace import Trace
from kvstore.eviction import EvictionPolicy
from kvstore.eviction.base import Chain

NEVER = 1 << 62


def next_uses(trace: Trace) -> npt.NDArray[np.int64]:
    """For every access, the number of the next request that asks for the same block."""
    request = np.repeat(np.arange(trace.requests), np.diff(trace.start))
    order = np.argsort(trace.blocks, kind="stable")
    again = trace.blocks[order][1:] == trace.blocks[order][:-1]
    following = np.full(trace.accesses, NEVER, np.int64)
    following[order[:-1][again]] = request[order[1:][again]]
    return following


def guessed_uses(trace: Trace, r2: float, seed: int) -> npt.NDArray[np.int64]:
    """For every access, a guess in milliseconds of when the block is asked for next.

    What a policy could know at best that explains the share `r2` of the variance of the logarithm
    of the times between requests for a chain: one guess per request, for all of its blocks. That a
    block is never asked for again is known.
    """
    request = np.repeat(np.arange(trace.requests), np.diff(trace.start))
    following = next_uses(trace)
    again = following != NEVER
    now, then = trace.time_s[request[again]], trace.time_s[following[again]]
    gap = np.log(then - now + 0.5)
    noise = np.random.default_rng(seed).standard_normal(trace.requests)[request[again]]
    spread = np.sqrt(r2 * (1 - r2)) * gap.std()
    guess = np.exp(gap.mean() + r2 * (gap - gap.mean()) + spread * noise)
    guessed = np.full(trace.accesses, NEVER, np.int64)
    guessed[again] = (1000 * (now + guess)).astype(np.int64)
    return guessed


class Belady(EvictionPolicy):
    """See the module. Rows MUST be the block numbers of `trace`, and the caller plays it through
    from the start, calling `foresee` for every request. `following`: instead of the truth, a guess
    (`guessed_uses`)."""

    def __init__(self, trace: Trace, following: npt.NDArray[np.int64] | None = None) -> None:
        super().__init__()
        self._trace = trace
        self._following = next_uses(trace) if following is None else following
        self._next = np.full(trace.unique, NEVER, np.int64)
        self._in = np.zeros(trace.unique, bool)
        self._heap: list[tuple[int, int]] = []
        self._request = 0

    def foresee(self, chain: Chain, held: int) -> None:
        span = slice(self._trace.start[self._request], self._trace.start[self._request + 1])
        self._next[self._trace.blocks[span]] = self._following[span]
        self._request += 1

    def __len__(self) -> int:
        return int(self._in.sum())

    def __contains__(self, row: object) -> bool:
        return bool(self._in[row]) if isinstance(row, int) else False

    def _offer(self, row: int) -> None:
        # of equals the deeper one, whose number is the larger, goes first
        heapq.heappush(self._heap, (-self._next.item(row), -row))

    def add(self, row: int) -> None:
        self._in[row] = True
        self._offer(row)

    def touch(self, rows: Chain) -> None:
        if len(rows) and self._in[rows[-1]]:
            self._offer(int(rows[-1]))

    def remove(self, row: int) -> None:
        self._in[row] = False

    def reconsider(self, row: int) -> None:
        if self._in[row]:
            self._offer(row)

    def admits(self, row: int, victim: int) -> bool:
        return self._next.item(row) < self._next.item(victim)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        heap, is_in, upcoming = self._heap, self._in.item, self._next.item
        while heap:
            ahead, row = heap[0]
            if is_in(-row) and upcoming(-row) == -ahead and may_go(-row):
                return -row
            heapq.heappop(heap)
        return None

    def cool(self, rows: Chain) -> None:
        raise NotImplementedError("an optimum needs no hints")

    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        raise NotImplementedError("the optimum starts with an empty cache")

    def check_integrity(self) -> None:
        """Nothing is kept twice."""
