"""The core driven by hand: what is put, reserved, written and committed."""

import pytest
from store_steps import check
from tiny_blocks import NS, blocks_of, keys_of, names_of

from kvstore.block import Outcome, PutOutcome, Tier
from kvstore.errors import BlockOutOfOrder, InvalidRequest, ReservationExpired

STORED, PRESENT, PENDING = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.PENDING


def test_what_was_put_is_read(store, ns):
    blocks = blocks_of(ns, range(10))
    assert store.put(ns, blocks) == [STORED] * 10
    check(store)
    for block in blocks:
        assert store.read(NS, ns, block.key) == block.sections


def test_it_comes_back_from_ssd_and_is_promoted(store, ns):
    blocks = blocks_of(ns, range(10))
    store.put(ns, blocks)
    store.flush()
    assert store.core.evict(ns, None, Tier.DRAM) == 10
    check(store)
    assert {store.residency(b.key) for b in blocks} == {Tier.SSD}
    for block in blocks:
        assert store.read(NS, ns, block.key) == block.sections
        assert store.residency(block.key) == Tier.SSD | Tier.DRAM
    check(store)
    assert store.metrics.counts["promoted_blocks"] == 10


def test_the_first_writer_wins(store, ns):
    first, second = blocks_of(ns, range(3)), blocks_of(ns, range(3), writer=1)
    assert store.put(ns, first) == [STORED] * 3
    assert store.put(ns, second) == [PRESENT] * 3
    assert store.read(NS, ns, first[1].key) == first[1].sections


def test_a_reserved_block_is_pending_to_everyone(store, ns):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks[:1])
    reservation, _ = store.reserve(ns, names_of(blocks[1:]))
    assert store.core.match(ns, keys_of(blocks)).outcomes == (
        Outcome.HIT,
        Outcome.PENDING,
        Outcome.PENDING,
    )
    assert store.put(ns, blocks) == [PRESENT, PENDING, PENDING]
    for block in blocks[1:]:
        store.write(reservation, block)
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 1
    assert store.core.reservations.commit(reservation, store.now).outcomes == [STORED] * 2
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3
    check(store)


def test_a_block_without_all_its_bytes_is_not_stored(store, ns):
    blocks = blocks_of(ns, range(4))
    reservation, _ = store.reserve(ns, names_of(blocks))
    store.write(reservation, blocks[0])
    store.write(reservation, blocks[2])
    outcomes = store.core.reservations.commit(reservation, store.now).outcomes
    corrupt = PutOutcome.CORRUPT
    assert outcomes == [STORED, corrupt, PutOutcome.PARENT_MISSING, corrupt]
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 1
    assert store.dram.used_bytes == 4096
    check(store)


def test_bytes_that_do_not_match_their_checksum_are_not_stored(store, ns):
    (block,) = blocks_of(ns, [1])
    wrong = type(block)(block.key, block.parent, block.sections, [b"c" * 16] * 4)
    assert store.put(ns, [wrong]) == [PutOutcome.CORRUPT]
    assert store.metrics.counts["put_corrupt_blocks"] == 1
    assert store.dram.used_bytes == 0
    assert store.put(ns, [block]) == [STORED]
    check(store)


def test_every_outcome_of_a_put_is_counted_per_block(store, ns):
    blocks = blocks_of(ns, range(4))
    wrong = type(blocks[3])(blocks[3].key, blocks[3].parent, blocks[3].sections, [b"c" * 16] * 4)
    store.put(ns, blocks[:2])
    outcomes = store.put(ns, [*blocks[:3], wrong])
    assert outcomes == [PutOutcome.PRESENT] * 2 + [STORED, PutOutcome.CORRUPT]
    counted = {name: n for name, n in store.metrics.counts.items() if n and name.startswith("put_")}
    assert counted == {"put_stored_blocks": 3, "put_present_blocks": 2, "put_corrupt_blocks": 1}


def test_a_child_before_its_parent_changes_nothing(store, ns):
    blocks = blocks_of(ns, range(3))
    with pytest.raises(BlockOutOfOrder, match="block 0"):
        store.reserve(ns, names_of(blocks[::-1]))
    with pytest.raises(BlockOutOfOrder):
        store.reserve(ns, [(blocks[0].key, blocks[0].key)])
    ring = [(blocks[0].key, blocks[2].key), *names_of(blocks[1:])]
    with pytest.raises(BlockOutOfOrder, match="block 0"):
        store.reserve(ns, ring)
    assert len(store.core.index) == 0
    check(store)


def test_a_block_needs_its_parent(store, ns):
    blocks = blocks_of(ns, range(4))
    assert store.put(ns, blocks[2:]) == [PutOutcome.PARENT_MISSING] * 2
    assert store.put(ns, blocks[:2]) == [STORED] * 2
    assert store.put(ns, blocks[2:]) == [STORED] * 2
    check(store)


def test_a_parent_that_is_being_written_will_do(store, ns):
    blocks = blocks_of(ns, range(2))
    first, _ = store.reserve(ns, names_of(blocks[:1]))
    second, draft = store.reserve(ns, names_of(blocks[1:]))
    assert draft.outcomes == [STORED]
    store.write(second, blocks[1])
    assert store.core.reservations.commit(second, store.now).outcomes == [STORED]
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 0
    store.write(first, blocks[0])
    store.core.reservations.commit(first, store.now)
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 2
    check(store)


def test_a_parent_that_was_given_up_will_not_do(store, ns):
    blocks = blocks_of(ns, range(2))
    first, _ = store.reserve(ns, names_of(blocks[:1]))
    second, _ = store.reserve(ns, names_of(blocks[1:]))
    store.write(second, blocks[1])
    store.core.reservations.abort(first)
    check(store)
    outcomes = store.core.reservations.commit(second, store.now).outcomes
    assert outcomes == [PutOutcome.PARENT_MISSING]
    assert len(store.core.index) == 0
    assert store.dram.used_bytes == 0
    check(store)


def test_the_same_block_twice_in_one_put(store, ns):
    blocks = blocks_of(ns, range(2))
    assert store.put(ns, [blocks[0], blocks[1], blocks[0]]) == [STORED, STORED, PENDING]
    check(store)


def test_a_reservation_lapses(store, ns):
    blocks = blocks_of(ns, range(2))
    reservation, _ = store.reserve(ns, names_of(blocks), ttl_s=5.0)
    store.write(reservation, blocks[0])
    store.clock.advance(5.0)
    with pytest.raises(ReservationExpired):
        store.write(reservation, blocks[1])
    with pytest.raises(ReservationExpired):
        store.core.reservations.commit(reservation, store.now)
    store.core.expire(store.now)
    assert store.dram.used_bytes == 0
    assert len(store.core.index) == 0
    assert store.core.match(ns, keys_of(blocks)).outcomes == (Outcome.MISS,)
    assert store.put(ns, blocks) == [STORED] * 2
    check(store)


def test_a_slot_outlives_its_reservation_while_bytes_are_copied_into_it(store, ns):
    (block,) = blocks_of(ns, [1])
    reservation, _ = store.reserve(ns, names_of([block]), ttl_s=5.0)
    incoming = store.core.reservations.start_copy(reservation, block.key, store.now)
    store.clock.advance(9.0)
    store.core.expire(store.now)
    assert store.dram.used_bytes == 4096
    check(store)
    store.core.reservations.end_copies([incoming], [True])
    assert store.dram.used_bytes == 0
    check(store)


def test_a_block_is_written_once_and_by_its_own_reservation(store, ns):
    blocks = blocks_of(ns, range(2))
    one, _ = store.reserve(ns, names_of(blocks[:1]))
    two, _ = store.reserve(ns, names_of(blocks[1:]))
    store.write(one, blocks[0])
    with pytest.raises(InvalidRequest, match="already"):
        store.write(one, blocks[0])
    with pytest.raises(InvalidRequest, match="not part"):
        store.write(two, blocks[0])
