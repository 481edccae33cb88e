"""Loads into DRAM: which block is on its way, from where, to where, and what becomes of it.

A block that two readers want is read once, from HBM if that has it, else from SSD. It is read
straight into a slot of the arena, or, where nothing can leave DRAM, into a bounce buffer that the
driver provides; then it stays where it was alone.

While a load is on its way its block may be lost and put again, with other bytes perhaps. So a load
counts for the place that it reads: a reader who comes later joins it only if the block still lies
there, and only then does what it brought enter DRAM.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.block import Tier
from kvstore.index import READY
from kvstore.migration.demotion import Demotion
from kvstore.migration.residency import Residency
from kvstore.tiers.base import Location, Slot

# a plain number: the masks of an IntFlag cost microseconds, and each block meets some of them
_HBM, _DRAM, _SSD = int(Tier.HBM), int(Tier.DRAM), int(Tier.SSD)
_Place = tuple[int, Location | Slot | None]
"""A row, and the copy of it that is read."""


@dataclass(slots=True, eq=False)
class Load:
    """One frame on its way. It comes from `location` on SSD, or from `source` in HBM; the other is
    None. `slot` is None where it goes into a bounce buffer."""

    row: int
    key: bytes
    namespace_id: bytes
    location: Location | None
    source: Slot | None
    length: int
    slot: Slot | None
    readers: int = field(default=1)

    @property
    def place(self) -> _Place:
        """What is read."""
        return self.row, self.source if self.location is None else self.location


class Promotion:
    """Loads under way. Rows stay pinned, and segments undeleted, until `finish`. `nominate`, where
    there is HBM, is told of rows that DRAM has now."""

    def __init__(self, residency: Residency, demotion: Demotion) -> None:
        self._residency, self._demotion = residency, demotion
        self._into_dram: dict[_Place, Load] = {}
        self._bounced = 0
        self._reads_by_segment: dict[int, int] = {}
        self.nominate: Callable[[Sequence[int]], None] | None = None

    def __len__(self) -> int:
        return len(self._into_dram) + self._bounced

    def begin_check(self, row: int, namespace_id: bytes) -> Load:
        """A load past DRAM, of a row that the SSD holds, to look at its copy there."""
        self._residency.pin([row])
        return self._load(row, namespace_id, None, self._residency.location_of(row), None)

    def begin_hbm_check(self, row: int, namespace_id: bytes) -> Load:
        """The same, of a row that HBM holds."""
        source = self._hold_hbm(row)
        return self._load(row, namespace_id, None, None, source)

    def _hold_hbm(self, row: int) -> Slot:
        r = self._residency
        source = r.hbm_slot_of(row)
        r.hbm_users.use(source)
        r.pin([row])
        return source

    def _load(
        self,
        row: int,
        namespace_id: bytes,
        slot: Slot | None,
        location: Location | None,
        source: Slot | None,
    ) -> Load:
        index = self._residency.index
        if location is not None:
            reads = self._reads_by_segment
            reads[location.segment] = reads.get(location.segment, 0) + 1
        length = index.stored_bytes[row] if source is None else source.length
        load = Load(row, index.keys[row], namespace_id, location, source, length, slot)
        if slot is None:
            self._bounced += 1
        else:
            self._into_dram[load.place] = load
        return load

    def begin(self, row: int, namespace_id: bytes) -> tuple[Load, bool]:
        """A load of a row that HBM or the SSD holds and DRAM does not, and whether it is a new one,
        which the driver has to execute; one under way gets another reader."""
        r = self._residency
        in_hbm = r.index.tiers[row] & _HBM
        place = r.hbm_slot_of(row) if in_hbm else r.location_of(row)
        load = self._into_dram.get((row, place))
        if load is not None:
            load.readers += 1
            return load, False
        # held first, so that making room for the block does not evict it
        if in_hbm:
            source = self._hold_hbm(row)
            slot = self._demotion.slot(source.length)
            return self._load(row, namespace_id, slot, None, source), True
        r.pin([row])
        slot = self._demotion.slot(r.index.stored_bytes[row])
        return self._load(row, namespace_id, slot, r.location_of(row), None), True

    def begin_ahead(self, row: int, namespace_id: bytes) -> Load | None:
        """A load of a row that the SSD alone holds, for no reader yet; None where one is under way
        already, or DRAM has no room."""
        r = self._residency
        location = r.location_of(row)
        if (row, location) in self._into_dram:
            return None
        r.pin([row])
        slot = self._demotion.slot(r.index.stored_bytes[row])
        if slot is None:
            r.unpin([row])
            return None
        load = self._load(row, namespace_id, slot, location, None)
        load.readers = 0
        r.metrics.add("read_ahead_blocks")
        return load

    def is_loading(self, row: int) -> bool:
        """Whether the SSD's copy of a row is on its way already."""
        return (row, self._residency.location_of(row)) in self._into_dram

    def begin_copy_back(self, row: int, namespace_id: bytes) -> Load | None:
        """A load of a row that HBM holds and DRAM does not, for no reader; None where one is under
        way already, or DRAM has no room."""
        r = self._residency
        if (row, r.hbm_slot_of(row)) in self._into_dram:
            return None
        source = self._hold_hbm(row)
        slot = self._demotion.slot(source.length)
        if slot is None:
            r.hbm_users.end_use(source)
            r.unpin([row])
            return None
        load = self._load(row, namespace_id, slot, None, source)
        load.readers = 0
        return load

    def finish(self, load: Load, corrupt: object = None, lost: bool = False) -> bool:
        """The read is over: with right bytes, with `corrupt` ones, or `lost` to an error of disk or
        device. Returns whether the bytes may be used. If so and they lie in `load.slot`, each of
        `load.readers` is a user of it now, whatever became of the block meanwhile."""
        r, row = self._residency, load.row
        good = corrupt is None and not lost
        if load.source is not None:
            current = self._end_hbm(load, load.source, corrupt, lost)
        else:
            current = self._end_ssd(load, corrupt)
        if load.slot is None:
            self._bounced -= 1
        else:
            del self._into_dram[load.place]
            self._settle_slot(load, load.slot, good, current)
        r.unpin([row])
        return good

    def _end_ssd(self, load: Load, corrupt: object) -> bool:
        """Whether the SSD still has the block where it was read."""
        r, row = self._residency, load.row
        assert load.location is not None
        self._end_read(load.location.segment)
        on_ssd = r.index.state[row] == READY and r.index.tiers[row] & _SSD
        current = bool(on_ssd) and r.location_of(row) == load.location
        if corrupt is not None and current:
            r.quarantine(row, Tier.SSD, corrupt)
        return current

    def _end_hbm(self, load: Load, source: Slot, corrupt: object, lost: bool) -> bool:
        """Whether HBM still has the block. A copy that can't be read back is as good as none."""
        r, row = self._residency, load.row
        r.hbm_users.end_use(source)
        current = self.is_in_hbm(row, source)
        if current and corrupt is not None:
            r.quarantine(row, Tier.HBM, corrupt)
        elif current and lost:
            r.lose(row, Tier.HBM)
        return current

    def is_in_hbm(self, row: int, slot: Slot) -> bool:
        """Whether the row is READY and that slot is its."""
        index = self._residency.index
        there = index.state[row] == READY and index.tiers[row] & _HBM
        return bool(there) and self._residency.hbm_slot_of(row) == slot

    def abandon(self, load: Load) -> None:
        """The device hangs in the load, and may write into its slot at any time."""
        r = self._residency
        if load.slot is None:
            self._bounced -= 1
        else:
            del self._into_dram[load.place]
            r.dram_users.abandon(load.slot)
        r.unpin([load.row])

    def _settle_slot(self, load: Load, slot: Slot, good: bool, current: bool) -> None:
        r, row = self._residency, load.row
        for _ in range(load.readers if good else 0):
            r.use(slot)
        if good and current and not r.index.tiers[row] & _DRAM:
            r.enter_dram(row, slot)
            r.metrics.add("promoted_blocks" if load.source is None else "copied_back_blocks")
        else:
            r.free_slot(slot)

    def arrived(self, loads: Iterable[Load]) -> None:
        """Loads that finished together: their rows are used in the order of their chains. Those
        above them were, when the reader got its lease."""
        r = self._residency
        rows = [load.row for load in loads if load.slot is not None]
        # a block may have left while its load was on the way
        there = [row for row in rows if r.index.tiers[row] & _DRAM]
        r.policies.arrived(there, Tier.DRAM)
        if self.nominate is not None:
            self.nominate(sorted(there, key=r.index.depth.__getitem__))

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
        from_ssd = sum(load.location is not None for load in self._into_dram.values())
        in_all = sum(self._reads_by_segment.values())
        assert from_ssd <= in_all <= from_ssd + self._bounced, "reads per segment are off"
        for row, _ in self._into_dram:
            assert self._residency.index.pins[row], f"row {row} is loading and not pinned"
