"""Contract of an eviction policy: the order in which one tier's rows go.

A policy knows rows by number and how they are used; it knows neither bytes nor tiers. One instance
serves one tier. All calls come from the core thread.

A chain is used from its root: whoever reads a block has read every block before it, so the caller
MUST touch a block together with its ancestors, root first, and the policy MUST treat the root as
used last of them. Then a block is never colder than its children, and the cold end is made of
leaves, which are what may leave the last tier.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt


class EvictionPolicy(ABC):
    """See the module. Rows are integers ≥ 0; memory is bounded by the highest row number."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows are in."""

    @abstractmethod
    def __contains__(self, row: object) -> bool:
        """Whether a row is in."""

    @abstractmethod
    def add(self, row: int) -> None:
        """A row entered the tier, as the most recently used. MUST NOT be in already."""

    @abstractmethod
    def touch(self, rows: Sequence[int]) -> None:
        """Rows were used together, root first. Rows that are not in are passed over."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """A row left the tier. MUST be in."""

    @abstractmethod
    def cool(self, rows: Sequence[int]) -> None:
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
