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


class Belady(EvictionPolicy):
    """See the module. Rows MUST be the block numbers of `trace`, and the caller plays it through
    from the start, calling `foresee` for every request."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace, self._following = trace, next_uses(trace)
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
