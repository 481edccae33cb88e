"""Contract suites for tiers.

A test class inherits a suite and says how its tier is made; pytest then runs the whole contract of
`kvstore.tiers.base` against it.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from kvstore.testing.tiers_frames import (
    DESCRIPTOR,
    NAMESPACE_ID,
    key_of,
    load,
    make_frame,
    rows,
    store,
)
from kvstore.tiers.base import (
    PAGE_BYTES,
    Location,
    LogTier,
    PoolTier,
    ReadItem,
    Recovered,
    Slot,
    SlotTier,
    StaleSlot,
    WriteItem,
)
from kvstore.tiers.frame import (
    FrameTruncated,
    SectionCorrupt,
    WrongFrame,
    decode_header,
    verify_frame,
)
from kvstore.tiers.ssd.files import aligned_buffer


class PoolTierContract:
    """What every `PoolTier` does. Say `make(budget_bytes)`, and how bytes come and go."""

    pages = 64

    def make(self, budget_bytes: int) -> PoolTier:
        """A fresh tier."""
        raise NotImplementedError

    def write(self, tier: Any, slot: Slot, data: bytes) -> None:
        """Put bytes into a slot, from its start."""
        raise NotImplementedError

    def read(self, tier: Any, slot: Slot, length: int) -> bytes:
        """The first bytes of a slot."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Iterator[PoolTier]:
        tier = self.make(self.pages * PAGE_BYTES)
        yield tier
        tier.check_integrity()
        tier.close()

    def test_a_slot_is_whole_aligned_pages(self, tier: PoolTier) -> None:
        slot = tier.alloc(PAGE_BYTES + 1)
        assert slot is not None
        assert slot.length == 2 * PAGE_BYTES
        assert slot.offset % PAGE_BYTES == 0
        assert tier.used_bytes == slot.length

    def test_the_budget_is_all_there_is_and_holds(self, tier: PoolTier) -> None:
        assert tier.budget_bytes == self.pages * PAGE_BYTES
        slots = [tier.alloc(PAGE_BYTES) for _ in range(self.pages)]
        assert None not in slots
        assert tier.alloc(1) is None
        assert tier.used_bytes == tier.budget_bytes

    def test_the_largest_slot_is_as_it_says(self, tier: PoolTier) -> None:
        assert tier.alloc(tier.slot_bytes_max + 1) is None
        assert tier.alloc(tier.slot_bytes_max) is not None

    def test_neighbours_join_when_freed(self, tier: PoolTier) -> None:
        slots = [tier.alloc(PAGE_BYTES) for _ in range(self.pages)]
        for slot in slots[::2] + slots[1::2]:
            assert slot is not None
            tier.free(slot)
        assert tier.used_bytes == 0
        assert tier.alloc(tier.budget_bytes) is not None

    def test_a_freed_slot_is_stale_even_when_its_pages_are_taken_again(
        self, tier: PoolTier
    ) -> None:
        old = tier.alloc(PAGE_BYTES)
        assert old is not None
        tier.free(old)
        new = tier.alloc(PAGE_BYTES)
        assert new is not None
        assert new.page == old.page
        assert new.generation != old.generation
        with pytest.raises(StaleSlot):
            tier.free(old)
        assert tier.slot_at(new.page) == new

    def test_generations_are_told_by_page(self, tier: PoolTier) -> None:
        slots = [tier.alloc(PAGE_BYTES) for _ in range(5)]
        live = [slot for slot in slots if slot is not None]
        tier.free(live.pop(2))
        again = tier.alloc(PAGE_BYTES)
        assert again is not None
        live.append(again)
        pages = np.array([slot.page for slot in live], np.uint32)
        assert tier.generations_of(pages).tolist() == [slot.generation for slot in live]

    def test_only_a_live_slots_first_page_names_it(self, tier: PoolTier) -> None:
        slot = tier.alloc(2 * PAGE_BYTES)
        assert slot is not None
        with pytest.raises(StaleSlot):
            tier.slot_at(slot.page + 1)

    def test_an_empty_slot_is_refused(self, tier: PoolTier) -> None:
        with pytest.raises(ValueError, match="at least one byte"):
            tier.alloc(0)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_use_never_lets_slots_overlap(self, tier: PoolTier, seed: int) -> None:
        random = Random(seed)
        held: dict[Slot, bytes] = {}
        for step in range(600):
            if held and random.random() < 0.45:
                slot = random.choice(list(held))
                assert self.read(tier, slot, 16) == held.pop(slot)
                tier.free(slot)
            else:
                slot_or_none = tier.alloc(random.randint(1, 9 * PAGE_BYTES))
                if slot_or_none is None:
                    continue
                mark = step.to_bytes(16, "little")
                self.write(tier, slot_or_none, mark * (slot_or_none.length // 16))
                held[slot_or_none] = mark
            tier.check_integrity()
            assert tier.used_bytes == sum(s.length for s in held)
        for slot, mark in held.items():
            assert self.read(tier, slot, slot.length) == mark * (slot.length // 16)
            tier.free(slot)
        assert tier.used_bytes == 0


class SlotTierContract(PoolTierContract):
    """What every `SlotTier` does. Say `make(budget_bytes)`."""

    def write(self, tier: SlotTier, slot: Slot, data: bytes) -> None:
        tier.view(slot)[: len(data)] = data

    def read(self, tier: SlotTier, slot: Slot, length: int) -> bytes:
        return bytes(tier.view(slot)[:length])

    def test_a_view_is_the_whole_slot(self, tier: SlotTier) -> None:
        slot = tier.alloc(PAGE_BYTES + 1)
        assert slot is not None
        assert len(tier.view(slot)) == slot.length

    def test_a_freed_slot_has_no_view(self, tier: SlotTier) -> None:
        old = tier.alloc(PAGE_BYTES)
        assert old is not None
        tier.free(old)
        assert tier.alloc(PAGE_BYTES) is not None
        with pytest.raises(StaleSlot):
            tier.view(old)


class LogTierContract:
    """What every `LogTier` does. Say `open()`, which opens the same store again after `close`, with
    `segment_bytes` and `budget_bytes`."""

    segment_bytes = 64 << 10
    budget_bytes = 1 << 20

    def open(self) -> tuple[LogTier, Recovered]:
        """Open the store, making it the first time."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Iterator[LogTier]:
        tier, recovered = self.open()
        assert recovered.keys == []
        yield tier
        tier.check_integrity()
        tier.close()

    def test_what_is_written_is_read_again(self, tier: LogTier) -> None:
        stored = store(tier, [make_frame(key_of(i), (100 + 999 * i, 50)) for i in range(9)])
        for s in stored:
            got = load(tier, s.location, s.length)
            assert got == s.frame
            assert verify_frame(got, s.key, NAMESPACE_ID) is None
        assert tier.live_bytes == sum(s.length for s in stored)

    def test_a_batch_of_reads_answers_each_for_itself(self, tier: LogTier) -> None:
        stored = store(tier, [make_frame(key_of(i)) for i in range(5)])
        items = [ReadItem(s.location, aligned_buffer(s.length)) for s in reversed(stored)]
        items.insert(2, ReadItem(Location(77, 4096), aligned_buffer(PAGE_BYTES)))
        items.append(ReadItem(Location(1, 10 << 20), aligned_buffer(PAGE_BYTES)))
        errors = tier.read_batch(items)
        whole = [errors.pop(6), errors.pop(2), *errors]
        assert [type(e) for e in whole] == [FrameTruncated] * 2 + [type(None)] * 5
        for s in stored:
            assert any(i.location == s.location and i.into == s.frame for i in items)

    def test_it_is_all_there_after_a_restart(self) -> None:
        tier, _ = self.open()
        parent = NAMESPACE_ID
        frames = []
        for i in range(20):
            frames.append(make_frame(key_of(i), (500 * i + 1, 7), parent=parent, depth=i))
            parent = key_of(i)
        stored = store(tier, frames)
        live = tier.live_bytes
        tier.close()
        tier, recovered = self.open()
        assert tier.live_bytes == live
        assert rows(recovered) == {s.key: (s.location, s.length) for s in stored}
        by_key = {key: i for i, key in enumerate(recovered.keys)}
        for depth, s in enumerate(stored):
            i = by_key[s.key]
            header = decode_header(s.frame)
            assert recovered.depth[i] == depth
            assert recovered.parents.tolist()[i] == header.parent
            assert recovered.payload_length[i] == header.payload_length
            assert recovered.created_wall_s[i] == header.created_wall_s
            assert load(tier, s.location, s.length) == s.frame
        assert [(n.namespace_id, n.descriptor) for n in recovered.namespaces] == [
            (NAMESPACE_ID, DESCRIPTOR)
        ]
        assert recovered.notes == []
        tier.close()

    def test_what_is_removed_stays_away(self) -> None:
        tier, _ = self.open()
        stored = store(tier, [make_frame(key_of(i)) for i in range(6)])
        tier.remove([stored[0].key, stored[5].key, key_of("never stored")])
        tier.close()
        tier, recovered = self.open()
        assert sorted(recovered.keys) == sorted(s.key for s in stored[1:5])
        tier.close()

    def test_removes_come_before_writes_of_the_same_key(self) -> None:
        tier, _ = self.open()
        store(tier, [make_frame(key_of(0), seed=1)])
        (new,) = store(tier, [make_frame(key_of(0), seed=2)], removes=[key_of(0)])
        tier.close()
        tier, recovered = self.open()
        assert rows(recovered) == {new.key: (new.location, new.length)}
        assert load(tier, new.location, new.length) == new.frame
        tier.close()

    def test_a_frame_that_changed_in_memory_is_refused_alone(self, tier: LogTier) -> None:
        number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
        frames = [make_frame(key_of(i)) for i in range(4)]
        frames[1][600] ^= 1
        items = []
        for i, frame in enumerate(frames):
            location = tier.place(len(frame))
            assert location is not None
            items.append(WriteItem(location, key_of(i if i != 2 else "other"), number, frame))
        verdicts = tier.write_batch(items)
        assert [type(v) for v in verdicts] == [type(None), SectionCorrupt, WrongFrame, type(None)]
        assert tier.live_bytes == 2 * len(frames[0])
        for i in (0, 3):
            assert load(tier, items[i].location, len(frames[i])) == frames[i]

    def test_a_namespace_keeps_its_number(self) -> None:
        tier, _ = self.open()
        numbers = [tier.put_namespace(key_of(i), b"%d" % i) for i in range(3)]
        assert len(set(numbers)) == 3
        assert [tier.put_namespace(key_of(i), b"%d" % i) for i in range(3)] == numbers
        secret = tier.tenant_secret
        tier.close()
        tier, recovered = self.open()
        assert {n.namespace_id: n.number for n in recovered.namespaces} == {
            key_of(i): numbers[i] for i in range(3)
        }
        assert tier.put_namespace(key_of(1), b"1") == numbers[1]
        assert tier.tenant_secret == secret
        assert len(secret) == 32
        tier.close()

    def test_places_never_overlap_and_stop_at_the_budget(self, tier: LogTier) -> None:
        places = []
        while (location := tier.place(2 * PAGE_BYTES)) is not None:
            places.append(location)
        assert len(places) > 20
        assert len(set(places)) == len(places)
        for location in places:
            assert location.offset % PAGE_BYTES == 0
            assert location.offset + 2 * PAGE_BYTES <= self.segment_bytes
            assert location._replace(offset=location.offset + PAGE_BYTES) not in places
        assert tier.place(2 * PAGE_BYTES, compaction=True) is not None

    def test_the_budget_holds_on_the_real_disk(self, tier: LogTier) -> None:
        frame = make_frame(key_of("x"), (9000,))
        number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
        placed = True
        i = 0
        while placed:
            items = []
            for _ in range(5):
                i += 1
                location = tier.place(len(frame))
                if location is None:
                    placed = False
                    break
                items.append(WriteItem(location, key_of(i), number, make_frame(key_of(i), (9000,))))
            tier.write_batch(items)
            assert tier.used_bytes <= tier.budget_bytes - self.segment_bytes
        assert tier.used_bytes > tier.budget_bytes // 2

    def test_a_frame_no_segment_can_hold_is_refused(self, tier: LogTier) -> None:
        with pytest.raises(ValueError, match="does not fit a segment"):
            tier.place(self.segment_bytes)
        with pytest.raises(ValueError, match="whole number of pages"):
            tier.place(1000)

    def test_space_comes_back_a_segment_at_a_time(self) -> None:
        tier, _ = self.open()
        per_segment = (self.segment_bytes - PAGE_BYTES) // PAGE_BYTES
        stored = store(tier, [make_frame(key_of(i)) for i in range(2 * per_segment + 3)])
        assert tier.victim_segment() is None
        first = stored[0].location.segment
        inside = [s for s in stored if s.location.segment == first]
        keep, go = inside[:2], inside[2:]
        tier.remove([s.key for s in go])
        for s in go:
            tier.mark_dead(s.location, s.length)
        assert tier.victim_segment() == first
        assert tier.live_in(first) == sum(s.length for s in keep)
        with pytest.raises(ValueError, match="not to be dropped"):
            tier.drop_segment(first)
        before = tier.used_bytes
        moved = store(tier, [load(tier, s.location, s.length) for s in keep])
        for s in keep:
            tier.mark_dead(s.location, s.length)
        tier.drop_segment(first)
        assert tier.used_bytes < before
        assert tier.live_in(first) == 0
        tier.check_integrity()
        tier.close()
        tier, recovered = self.open()
        there = moved + [s for s in stored if s.location.segment != first]
        assert rows(recovered) == {s.key: (s.location, s.length) for s in there}
        for s in there:
            assert load(tier, s.location, s.length) == s.frame
        tier.close()

    def test_a_segment_with_index_entries_is_not_dropped(self, tier: LogTier) -> None:
        per_segment = (self.segment_bytes - PAGE_BYTES) // PAGE_BYTES
        stored = store(tier, [make_frame(key_of(i)) for i in range(per_segment + 1)])
        for s in stored[:per_segment]:
            tier.mark_dead(s.location, s.length)
        with pytest.raises(ValueError, match="index entries"):
            tier.drop_segment(stored[0].location.segment)
