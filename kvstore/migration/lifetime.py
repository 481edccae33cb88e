"""The guaranteed lifetime of what the SSD took: the policy chooses among blocks that had theirs.

While the budget is full of younger ones nothing leaves for new blocks; those are refused by the
SSD, counted, and stay in DRAM as long as it has room for them (`Residency.refuse_dirty`). What a
caller asks to evict goes at any age.
"""

import numpy as np

from kvstore.block import Tier
from kvstore.migration.residency import Residency


class Lifetime:
    """Evicts from SSD for room. `lifetime_min_s`: 0 guarantees nothing.

    `evicted_age_s_min`: the age of the youngest block that went, None before the first.
    """

    def __init__(self, residency: Residency, lifetime_min_s: float) -> None:
        self._residency, self._min_s = residency, lifetime_min_s
        self._old_left = 0
        self.evicted_age_s_min: float | None = None

    def evict_one(self, wall_s: float) -> bool:
        """The policy's next victim among leaves that are old enough at `wall_s` leaves the store;
        False where there is none."""
        row = self.victim(wall_s)
        if row is not None:
            self.evict(row, wall_s)
        return row is not None

    def evict(self, row: int, wall_s: float) -> None:
        """What `victim` gave leaves the store."""
        r = self._residency
        self._old_left = max(0, self._old_left - 1)
        age_s = max(0.0, wall_s - r.index.created_wall_s[row])
        youngest_s = self.evicted_age_s_min
        self.evicted_age_s_min = age_s if youngest_s is None else min(age_s, youngest_s)
        r.drop(row)
        r.metrics.add("evicted_ssd_blocks")

    def victim(self, wall_s: float) -> int | None:
        """The policy's next victim among leaves that are old enough, or None; it stays."""
        r = self._residency
        if not self._min_s:
            return r.ssd_policy.victim(r.may_leave_store)
        # counted over the whole index first: a policy refused by a million young blocks is slow
        if self._old_left <= 0:
            self._old_left, _ = self._leaves(wall_s)
        if not self._old_left:
            return None
        created, born_by = r.index.created_wall_s, wall_s - self._min_s
        row = r.ssd_policy.victim(lambda row: created[row] <= born_by and r.may_leave_store(row))
        if row is None:
            self._old_left = 0
        return row

    def refuses(self, wall_s: float) -> bool:
        """Whether there are blocks on SSD that nothing but their age keeps."""
        return self._min_s > 0 and self._leaves(wall_s)[1] > 0

    def old(self, wall_s: float) -> bool:
        """Whether a block on SSD may leave for room: old enough, a leaf, and held by nobody."""
        return self._leaves(wall_s)[0] > 0

    def _leaves(self, wall_s: float) -> tuple[int, int]:
        """Leaves on SSD that nobody holds: how many are old enough to go, how many are not."""
        index = self._residency.index
        free = (index.view("tiers") & Tier.SSD != 0) & (index.view("pins") == 0)
        free &= index.view("children") == 0
        born = index.view("created_wall_s")[free]
        old = int(np.count_nonzero(born <= wall_s - self._min_s))
        return old, len(born) - old
