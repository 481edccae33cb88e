"""Loads from SSD: which block is on its way, into which memory, and what becomes of it.

A block that two readers want is read once. It is read straight into a slot of the arena, or, where
nothing can leave DRAM, into a bounce buffer that the driver provides; then it stays on SSD alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.block import Tier
from kvstore.index import READY
from kvstore.migration.demotion import Demotion
from kvstore.migration.residency import Residency
from kvstore.tiers.base import Location, Slot


@dataclass(slots=True, eq=False)
class Load:
    """One frame on its way. `slot` is None where it goes into a bounce buffer."""

    row: int
    key: bytes
    namespace_id: bytes
    location: Location
    length: int
    slot: Slot | None
    readers: int = field(default=1)


class Promotion:
    """Loads under way. Rows stay pinned, and segments undeleted, until `finish`."""

    def __init__(self, residency: Residency, demotion: Demotion) -> None:
        self._residency, self._demotion = residency, demotion
        self._into_dram: dict[int, Load] = {}
        self._bounced = 0
        self._reads_by_segment: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._into_dram) + self._bounced

    def begin_check(self, row: int, namespace_id: bytes) -> Load:
        """A load past DRAM, of a row that the SSD holds, to look at its copy there."""
        r = self._residency
        r.pin([row])
        return self._load(row, namespace_id, None)

    def _load(self, row: int, namespace_id: bytes, slot: Slot | None) -> Load:
        index = self._residency.index
        location = self._residency.location_of(row)
        reads = self._reads_by_segment
        reads[location.segment] = reads.get(location.segment, 0) + 1
        load = Load(row, index.keys[row], namespace_id, location, index.stored_bytes[row], slot)
        if slot is None:
            self._bounced += 1
        else:
            self._into_dram[row] = load
        return load

    def begin(self, row: int, namespace_id: bytes) -> tuple[Load, bool]:
        """A load of a row that the SSD holds and DRAM does not, and whether it is a new one, which
        the driver has to execute; one under way gets another reader."""
        load = self._into_dram.get(row)
        if load is not None:
            load.readers += 1
            return load, False
        r = self._residency
        # pinned first, so that making room for the block does not evict it
        r.pin([row])
        slot = self._demotion.slot(r.index.stored_bytes[row])
        return self._load(row, namespace_id, slot), True

    def finish(self, load: Load, corrupt: object = None, lost: bool = False) -> bool:
        """The read is over: with right bytes, with `corrupt` ones, or `lost` to a disk error.
        Returns whether the bytes may be used. If so and they lie in `load.slot`, each of
        `load.readers` is a user of it now, whatever became of the block meanwhile."""
        r, row = self._residency, load.row
        self._end_read(load.location.segment)
        current = r.index.state[row] == READY and bool(r.index.tiers[row] & Tier.SSD)
        good = corrupt is None and not lost
        if corrupt is not None and current and r.location_of(row) == load.location:
            r.quarantine(row, Tier.SSD, corrupt)
        if load.slot is None:
            self._bounced -= 1
        else:
            del self._into_dram[row]
            self._settle_slot(load, load.slot, good, current)
        r.unpin([row])
        return good

    def _settle_slot(self, load: Load, slot: Slot, good: bool, current: bool) -> None:
        r, row = self._residency, load.row
        for _ in range(load.readers if good else 0):
            r.use(slot)
        if good and current and not r.index.tiers[row] & Tier.DRAM:
            r.enter_dram(row, slot)
            r.metrics.add("promoted_blocks")
        else:
            r.free_slot(slot)

    def arrived(self, loads: Iterable[Load]) -> None:
        """Loads that finished together: their rows are used in the order of their chains. Those
        above them were, when the reader got its lease."""
        r = self._residency
        rows = [load.row for load in loads if load.slot is not None]
        # a block may have left while its load was on the way
        there = [row for row in rows if r.index.tiers[row] & Tier.DRAM]
        r.policies.arrived(there, Tier.DRAM)

    def _end_read(self, segment: int) -> None:
        left = self._reads_by_segment[segment] - 1
        if left:
            self._reads_by_segment[segment] = left
        else:
            del self._reads_by_segment[segment]
            self._residency.changes += 1

    def reads_in(self, segment: int) -> int:
        """Loads under way from a segment; it MUST not be deleted meanwhile."""
        return self._reads_by_segment.get(segment, 0)

    def slots(self) -> list[Slot]:
        """Slots of loads under way."""
        return [load.slot for load in self._into_dram.values() if load.slot is not None]

    def check_integrity(self) -> None:
        """Raise `AssertionError` where loads and their pins disagree."""
        assert sum(self._reads_by_segment.values()) == len(self), "reads per segment are off"
        for row in self._into_dram:
            assert self._residency.index.pins[row], f"row {row} is loading and not pinned"
