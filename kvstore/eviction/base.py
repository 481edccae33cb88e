"""Contract of an eviction policy: the order in which one tier's rows go.

A policy knows rows by number and how they are used; it knows neither bytes nor tiers. One instance
serves one tier. All calls come from the core thread.

A chain is used from its root: whoever reads a block has read every block before it, so the caller
MUST touch a block together with its ancestors, root first, and the policy MUST treat the root as
used last of them. Then a block is never colder than its children, and the cold end is made of
leaves, which are what may leave the last tier.

The first touch after an `add` belongs to the row's arrival and is no use of it. Some hooks carry
what a few policies can use and the others ignore: `foresee`, `admits`, `answered`, and the
`Surroundings` that name blocks for good (a row number is used again), tell the time and the room.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook

Rows = npt.NDArray[np.int64]
Chain = Sequence[int] | Rows
"""Rows of one chain, in order."""


def _rows_as_names(rows: Rows) -> npt.NDArray[np.uint64]:
    return rows.astype(np.uint64)


def _no_time() -> float:
    return 0.0


def _no_room_known() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a policy may ask about the tier that it serves.

    `identity`: 64-bit names of the blocks that hold the given rows, the same for a block whenever
    it is in and in whatever row. `now_s`: monotonic seconds. `capacity_rows`: how many rows fit;
    0 where that is not known, and a policy then goes by the most rows it has seen.
    """

    identity: Callable[[Rows], npt.NDArray[np.uint64]] = _rows_as_names
    now_s: Callable[[], float] = _no_time
    capacity_rows: Callable[[], int] = _no_room_known


ALONE = Surroundings()


def own_end(chain: Chain, children: Sequence[int]) -> list[int]:
    """The end of a chain (root first) that no other chain goes through, deepest first: what the end
    of its session makes useless. `children`: per row, how many others follow it."""
    end = list[int]()
    for row in reversed(np.asarray(chain, np.int64).tolist()):
        if children[row] > bool(end):
            break
        end.append(row)
    return end


class EvictionPolicy(ABC):
    """See the module. Rows are integers ≥ 0; memory is bounded by the highest row number."""

    def __init__(self, surroundings: Surroundings = ALONE) -> None:
        self.surroundings = surroundings

    def foresee(self, chain: Chain, held: int) -> None:
        """A request came: the first `held` rows of `chain` (root first) are in, the others may be
        added now. Called once per request, before its adds and its touch, also where nothing
        misses. Policies that learn from what comes back after it had gone listen here."""
        return

    def continued(self, chain: Chain, held: int) -> None:
        """The last request for the first `held` rows of `chain`, which were used by it, goes on
        with the others, which may be added now: `foresee` for a request that brings its blocks in
        pieces. What lies before may be in in part only, and is then left out."""
        self.foresee(chain, held)

    def arrived(self, chain: Chain) -> None:
        """Some of `chain` (root first) were added: the touch of their arrival, for rows that came
        later than the request that asked for them. No other row is used by it; a policy of recency
        may take it for a use, so that none is colder than its children."""
        self.touch(chain)

    def admits(self, row: int, victim: int) -> bool:
        """Whether `row`, foreseen and not in, deserves `victim`'s place. A refusal is a choice of
        the policy, not an error; the caller MUST NOT add the row or anything below it then."""
        return True

    def exchange(
        self,
        new: Rows,
        free: int,
        may_go: Callable[[int], bool],
        leave: Callable[[Sequence[int]], int],
    ) -> int:
        """Add as many of the foreseen rows `new` (root first, none of them in) as the policy
        admits, into `free` places and those of victims; how many were added. The same as asking
        `victim` and `admits`, then calling `remove` and `add`, row by row, and for some policies
        faster.

        `leave`: takes rows out, in their order, up to the first that may not go once those before
        it have left, and says how many that were; at least 1, as the first may. `may_go` MUST
        refuse the rows of `new`."""
        for i, row in enumerate(new.tolist()):
            if free:
                free -= 1
            else:
                victim = self.victim(may_go)
                if victim is None or not self.admits(row, victim):
                    return i
                self.remove(victim)
                leave((victim,))
            self.add(row)
        return len(new)

    def answered(self, chain: Chain, outlook: Outlook) -> None:
        """The answer to the last request for `chain` (root first) ended. Rows that are not in are
        passed over. At the end of a session the caller cools what it made useless (`own_end`)
        instead."""
        return

    @abstractmethod
    def __len__(self) -> int:
        """How many rows are in."""

    @abstractmethod
    def __contains__(self, row: object) -> bool:
        """Whether a row is in."""

    @abstractmethod
    def add(self, row: int) -> None:
        """A row entered the tier, as the most recently used. MUST NOT be in already."""

    def add_all(self, rows: Chain) -> None:
        """`add` for rows in the order in which they were foreseen; for some policies faster."""
        new = np.asarray(rows, np.int64)
        self.exchange(new, len(new), lambda row: False, len)

    @abstractmethod
    def touch(self, rows: Chain) -> None:
        """Rows were used together, root first. Rows that are not in are passed over."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """A row left the tier. MUST be in."""

    @abstractmethod
    def cool(self, rows: Chain) -> None:
        """Rows became useless: they go before all others, the first given first. Rows that are not
        in are passed over."""

    @abstractmethod
    def reconsider(self, row: int) -> None:
        """A row that `may_go` refused may go now. Passed over if not in."""

    @abstractmethod
    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """The row to go next among those that `may_go` accepts, or None. It stays in until
        `remove`; asked again, the answer is the same.

        A refused row may be passed over until it is touched or reconsidered, but not for ever: None
        is the answer only after every row was refused.
        """

    @abstractmethod
    def load(self, coldest_first: npt.NDArray[np.int64]) -> None:
        """Fill an empty policy with rows in a known order."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` where the policy's own books disagree."""
