"""Room in the arena: the policy's victims leave DRAM until a slot of the size asked for is free."""

from kvstore.migration.lifetime import Lifetime
from kvstore.migration.residency import Residency
from kvstore.tiers.base import Slot


class Demotion:
    """Hands out slots of the arena, demoting for them where it must."""

    def __init__(self, residency: Residency, lifetime: Lifetime) -> None:
        self._residency, self._lifetime = residency, lifetime
        self._futile_since = -1

    def slot(self, frame_bytes: int) -> Slot | None:
        """A slot, or None where nothing more can leave DRAM now."""
        r = self._residency
        slot = r.dram.alloc(frame_bytes)
        while slot is None:
            # the search is not repeated for every block of a batch that finds DRAM full
            if r.changes == self._futile_since or frame_bytes > r.dram.budget_bytes:
                return None
            row = r.dram_policy.victim(r.may_leave_dram)
            if row is None:
                self._futile_since = r.changes
                return None
            r.demote(row)
            slot = r.dram.alloc(frame_bytes)
        return slot

    def row_room(self, rows_max: int, wall_s: float) -> bool:
        """Whether the index may grow by a row; cold blocks leave the store for it."""
        r = self._residency
        while len(r.index) >= rows_max:
            if r.ssd is not None:
                if not self._lifetime.evict_one(wall_s):
                    return False
                continue
            victims = (policy.victim(r.may_leave_store) for policy in (r.dram_policy, r.hbm_policy))
            row = next((victim for victim in victims if victim is not None), None)
            if row is None:
                return False
            r.drop(row)
            r.metrics.add("evicted_dram_blocks")
        return True
