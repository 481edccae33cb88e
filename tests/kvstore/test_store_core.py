"""The core, step by step: each decision on its own."""

from random import Random

import pytest
from store_harness import HandDrivenStore, store_config

from kvstore.block import Outcome, PutOutcome, Tier
from kvstore.errors import (
    BlockOutOfOrder,
    InvalidRequest,
    LeaseExpired,
    MessageTooLarge,
    Overloaded,
    ReservationExpired,
    UnknownNamespace,
)
from kvstore.index import GHOST, ROOT, BlockIndex
from kvstore.namespace import Layout, SectionSpec
from kvstore.store import boot
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace

STORED, PRESENT, PENDING = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.PENDING
NS = tiny_namespace()


@pytest.fixture
def store():
    return HandDrivenStore(store_config())


@pytest.fixture
def ns(store):
    return store.core.open_namespace(NS)


def blocks_of(ns, tokens, **more):
    return chain(ns, TINY_LAYOUT, tokens, **more)


def keys_of(blocks):
    return [block.key for block in blocks]


def names_of(blocks):
    return [(block.key, block.parent) for block in blocks]


def check(store):
    store.core.check_integrity()


# put and read


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


def test_a_child_before_its_parent_changes_nothing(store, ns):
    blocks = blocks_of(ns, range(3))
    with pytest.raises(BlockOutOfOrder, match="block 0"):
        store.reserve(ns, names_of(blocks[::-1]))
    with pytest.raises(BlockOutOfOrder):
        store.reserve(ns, [(blocks[0].key, blocks[0].key)])
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
    store.core.reservations.end_copy(incoming, right=True)
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


@pytest.mark.parametrize("what", ["match", "acquire", "reserve"])
def test_an_unknown_namespace_is_an_error(store, what):
    calls = {
        "match": lambda: store.core.match(b"x" * 32, []),
        "acquire": lambda: store.core.acquire(b"x" * 32, [], 0.0, None),
        "reserve": lambda: store.reserve(b"x" * 32, []),
    }
    with pytest.raises(UnknownNamespace, match="787878"):
        calls[what]()


def test_keys_have_32_bytes(store, ns):
    with pytest.raises(InvalidRequest, match="32"):
        store.reserve(ns, [(b"short", ns)])


def test_one_call_has_its_limits(ns):
    store = HandDrivenStore(store_config(**{"limits.keys_per_call_max": 3}))
    ns = store.core.open_namespace(NS)
    with pytest.raises(MessageTooLarge, match="keys_per_call_max"):
        store.core.match(ns, [bytes(32)] * 4)
    with pytest.raises(MessageTooLarge, match="keys_per_call_max"):
        store.reserve(ns, [(bytes([i] * 32), ns) for i in range(4)])


def test_namespaces_do_not_share(store, ns):
    other_namespace = tiny_namespace("other")
    other = store.core.open_namespace(other_namespace)
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    assert store.core.match(other, keys_of(blocks)).hit_blocks == 0
    assert store.read(other_namespace, other, blocks[0].key) is None
    with pytest.raises(InvalidRequest, match="another namespace"):
        store.reserve(other, [(blocks[0].key, other)])
    assert store.core.evict(other, None, None) == 0


def test_there_is_a_most_of_namespaces():
    store = HandDrivenStore(store_config(**{"limits.namespaces_max": 2}))
    for name in "ab":
        store.core.open_namespace(tiny_namespace(name))
    store.core.open_namespace(tiny_namespace("a"))
    with pytest.raises(InvalidRequest, match="namespaces_max"):
        store.core.open_namespace(tiny_namespace("c"))


def test_a_block_has_to_fit_every_tier():
    layout = Layout((SectionSpec(0, "main", 1, 1 << 18),), 1)
    store = HandDrivenStore(store_config())
    with pytest.raises(InvalidRequest, match="segment_bytes"):
        store.core.open_namespace(tiny_namespace(layout=layout))


# lookups


def test_lookups_add_up(store, ns):
    blocks = blocks_of(ns, range(8))
    store.put(ns, blocks[:4])
    store.flush()
    store.core.evict(ns, keys_of(blocks[2:4]), Tier.DRAM)
    store.reserve(ns, names_of(blocks[4:6]))
    match = store.core.match(ns, keys_of(blocks))
    assert match.hit_blocks == 4
    hit, pending = Outcome.HIT, Outcome.PENDING
    assert match.outcomes == (hit, hit, hit, hit, pending, pending, Outcome.MISS)
    assert match.residency[:4] == (Tier.DRAM | Tier.SSD,) * 2 + (Tier.SSD,) * 2
    assert match.residency[4:] == (Tier.NONE,) * 3
    assert match.block_bytes == TINY_LAYOUT.block_bytes
    counts = store.metrics.counts
    found = [counts[f"lookup_{n}_blocks"] for n in ("hit_dram", "hit_ssd", "pending", "miss")]
    assert found == [2, 2, 2, 2]


def test_what_lies_behind_a_pending_block_is_no_hit(store, ns):
    blocks = blocks_of(ns, range(2))
    store.reserve(ns, names_of(blocks[:1]))
    second, _ = store.reserve(ns, names_of(blocks[1:]))
    store.write(second, blocks[1])
    store.core.reservations.commit(second, store.now)
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 0
    assert store.metrics.counts["lookup_pending_blocks"] == 2


def test_an_empty_lookup(store, ns):
    match = store.core.match(ns, [])
    assert (match.hit_blocks, match.outcomes) == (0, ())


# leases


def test_a_lease_pins_the_ready_prefix(store, ns):
    blocks = blocks_of(ns, range(6))
    store.put(ns, blocks[:4])
    lease, ttl_s, match = store.core.acquire(ns, keys_of(blocks), store.now, 5.0)
    assert (match.hit_blocks, ttl_s) == (4, 5.0)
    assert store.core.evict(None, None, None) == 0
    check(store)
    store.core.release(lease)
    store.core.release(lease)
    assert store.core.evict(None, None, None) == 4
    assert len(store.core.index) == 0
    check(store)


def test_a_lease_lapses(store, ns):
    store.put(ns, blocks_of(ns, range(3)))
    lease, _, _ = store.core.acquire(ns, keys_of(blocks_of(ns, range(3))), store.now, 5.0)
    store.clock.advance(5.0)
    with pytest.raises(LeaseExpired):
        store.core.rows_to_read(lease, [], store.now)
    store.core.expire(store.now)
    assert store.metrics.counts["leases_expired"] == 1
    assert store.core.evict(None, None, None) == 3
    check(store)


def test_leases_overlap(store, ns):
    blocks = blocks_of(ns, range(5))
    store.put(ns, blocks)
    one, _, _ = store.core.acquire(ns, keys_of(blocks[:3]), store.now, None)
    two, _, _ = store.core.acquire(ns, keys_of(blocks[:2]) * 2, store.now, None)
    check(store)
    assert store.core.evict(None, None, None) == 2
    store.core.release(one)
    assert store.core.evict(None, None, None) == 1
    store.core.release(two)
    assert store.core.evict(None, None, None) == 2


def test_too_many_leases_pin_nothing():
    store = HandDrivenStore(store_config(**{"lease.leases_max": 1}))
    ns = store.core.open_namespace(NS)
    blocks = blocks_of(ns, range(2))
    store.put(ns, blocks)
    store.core.acquire(ns, [], store.now, None)
    with pytest.raises(Overloaded):
        store.core.acquire(ns, keys_of(blocks), store.now, None)
    check(store)
    assert store.core.evict(None, None, None) == 2


# eviction


def test_leaves_go_first_and_parents_stay_with_a_child(store, ns):
    trunk = blocks_of(ns, range(4))
    branch = blocks_of(ns, [0, 1, 9])
    store.put(ns, trunk)
    store.put(ns, branch[2:])
    assert store.core.evict(ns, keys_of(trunk[:2]), None) == 0
    assert store.core.evict(ns, keys_of(trunk), None) == 2
    assert store.core.match(ns, keys_of(branch)).hit_blocks == 3
    assert store.core.evict(ns, keys_of(branch[::-1]), None) == 3
    check(store)


def test_dirty_blocks_stay_in_dram(store, ns):
    store.put(ns, blocks_of(ns, range(3)))
    assert store.core.evict(ns, None, Tier.DRAM) == 0
    store.flush()
    assert store.core.evict(ns, None, Tier.DRAM) == 3


def tight(**settings) -> HandDrivenStore:
    """16 blocks of DRAM, and an SSD of about 190 in segments of 15."""
    given = {"dram.budget_bytes": 16 * 4096, "ssd.segment_bytes": "64KiB", "eviction.policy": "lru"}
    return HandDrivenStore(store_config(**given, **{"ssd.budget_bytes": "1MiB"} | settings))


def test_dram_takes_more_than_it_holds_by_writing_back():
    store = tight()
    ns = store.core.open_namespace(NS)
    blocks = blocks_of(ns, range(100))
    for at in range(0, 100, 7):
        outcomes = store.put(ns, blocks[at : at + 7])
        assert set(outcomes) == {STORED}
        check(store)
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 100
    for block in blocks:
        assert store.read(NS, ns, block.key) == block.sections
    check(store)


def test_the_ssd_budget_holds_and_the_coldest_leaves_go():
    store = tight()
    ns = store.core.open_namespace(NS)
    assert store.ssd is not None
    chains = [blocks_of(ns, [100 * n + i for i in range(10)]) for n in range(60)]
    for n, blocks in enumerate(chains):
        # the first chain is used again and again
        lease, _, _ = store.core.acquire(ns, keys_of(chains[0]), store.now, None)
        store.core.release(lease)
        assert set(store.put(ns, blocks)) == {STORED}
        store.flush()
        check(store)
        assert store.ssd.used_bytes <= store.ssd.budget_bytes
        assert store.core.match(ns, keys_of(chains[0])).hit_blocks == 10, n
    hits = [store.core.match(ns, keys_of(blocks)).hit_blocks for blocks in chains]
    assert hits[-1] == 10
    assert sum(hits) > 100
    assert hits[1:20] == [0] * 19
    counts = store.metrics.counts
    assert counts["evicted_ssd_blocks"] > 300
    assert counts["segments_reclaimed"] > 20
    assert not store.core.lane.degraded
    for blocks, hit in zip(chains, hits, strict=True):
        for block in blocks[:hit]:
            assert store.read(NS, ns, block.key) == block.sections


def test_compaction_keeps_what_is_wanted():
    store = tight()
    ns = store.core.open_namespace(NS)
    kept = [blocks_of(ns, [10_000 + n]) for n in range(40)]
    for n in range(200):
        if n < 40:
            store.put(ns, kept[n])
        # chains that come and go between those that are kept in use
        store.put(ns, blocks_of(ns, [n, n + 1, n + 2]))
        store.flush()
        for (block,) in kept[: n + 1]:
            lease, _, match = store.core.acquire(ns, [block.key], store.now, None)
            assert match.hit_blocks == 1
            store.core.release(lease)
    check(store)
    assert store.metrics.counts["compacted_blocks"] > 0
    for (block,) in kept:
        assert store.read(NS, ns, block.key) == block.sections


def test_a_chain_longer_than_the_ssd_keeps_its_beginning():
    store = tight()
    ns = store.core.open_namespace(NS)
    blocks = blocks_of(ns, range(400))
    outcomes = []
    for at in range(0, 400, 8):
        outcomes += store.put(ns, blocks[at : at + 8])
        check(store)
    hits = store.core.match(ns, keys_of(blocks)).hit_blocks
    assert 150 < hits < 400
    # another chain gets in all the same: the long one's tail makes room
    other = blocks_of(ns, range(1000, 1030))
    for at in range(0, 30, 5):
        store.put(ns, other[at : at + 5])
        for _ in range(200):
            store.clock.advance(1.0)
            if not store.log_turn():
                break
        check(store)
    assert store.core.match(ns, keys_of(other)).hit_blocks == 30
    assert store.core.match(ns, keys_of(blocks)).hit_blocks < hits


def test_dram_alone_keeps_the_beginning_of_a_chain_too_long_for_it():
    store = HandDrivenStore(store_config(ssd=False, **{"dram.budget_bytes": 16 * 4096}))
    ns = store.core.open_namespace(NS)
    blocks = blocks_of(ns, range(20))
    outcomes = store.put(ns, blocks)
    assert outcomes == [STORED] * 16 + [PutOutcome.NO_SPACE] * 4
    check(store)
    other = blocks_of(ns, range(100, 105))
    assert store.put(ns, other) == [STORED] * 5
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 11
    check(store)


def test_pinned_blocks_make_no_room():
    store = HandDrivenStore(store_config(ssd=False, **{"dram.budget_bytes": 16 * 4096}))
    ns = store.core.open_namespace(NS)
    blocks = blocks_of(ns, range(16))
    store.put(ns, blocks)
    lease, _, _ = store.core.acquire(ns, keys_of(blocks[:15]), store.now, None)
    other = blocks_of(ns, range(100, 103))
    assert store.put(ns, other) == [STORED, PutOutcome.NO_SPACE, PutOutcome.NO_SPACE]
    store.core.release(lease)
    assert store.put(ns, other) == [PRESENT, STORED, STORED]
    check(store)


def test_the_index_has_its_own_limit():
    store = HandDrivenStore(store_config(**{"limits.index_blocks_max": 10}))
    ns = store.core.open_namespace(NS)
    store.put(ns, blocks_of(ns, range(10)))
    store.flush()
    other = blocks_of(ns, range(100, 104))
    assert store.put(ns, other) == [STORED] * 4
    assert len(store.core.index) == 10
    check(store)


# corruption


@pytest.mark.parametrize("at", [9, 40, 600, 2600])
def test_a_flipped_byte_in_dram_is_a_counted_miss(store, ns, at):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    store.flip_dram(blocks[1].key, at)
    assert store.read(NS, ns, blocks[1].key) is None
    assert store.metrics.counts["corrupt_dram_blocks"] == 1
    match = store.core.match(ns, keys_of(blocks))
    assert match.outcomes == (Outcome.HIT, Outcome.MISS)
    check(store)
    # it can be written again, and what hangs below it is back
    assert store.put(ns, blocks_of(ns, range(2), writer=1)) == [PRESENT, STORED]
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3
    check(store)


@pytest.mark.parametrize("at", [9, 40, 600, 2600])
def test_a_flipped_byte_on_ssd_is_a_counted_miss(store, ns, at):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    store.flush()
    store.core.evict(ns, None, Tier.DRAM)
    store.flip_ssd(blocks[1].key, at)
    assert store.read(NS, ns, blocks[1].key) is None
    assert store.metrics.counts["corrupt_ssd_blocks"] == 1
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 1
    check(store)
    store.flush()
    store.close()
    store.open()
    ns = store.core.open_namespace(NS)
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 1
    assert store.read(NS, ns, blocks[2].key) == blocks[2].sections
    check(store)


def test_a_copy_that_is_right_serves_on(store, ns):
    (block,) = blocks_of(ns, [1])
    store.put(ns, [block])
    store.flush()
    store.flip_dram(block.key, 700)
    assert store.read(NS, ns, block.key) is None
    assert store.residency(block.key) == Tier.SSD
    assert store.read(NS, ns, block.key) == block.sections


def test_a_frame_that_went_bad_before_it_was_written_is_not_written(store, ns):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    store.flip_dram(blocks[1].key, 700)
    store.flush()
    assert store.metrics.counts["corrupt_dram_blocks"] == 1
    assert store.residency(blocks[1].key) == Tier.NONE
    assert store.residency(blocks[2].key) == Tier.SSD | Tier.DRAM
    check(store)


def test_what_hangs_below_a_lost_block_goes_first():
    store = tight()
    ns = store.core.open_namespace(NS)
    old, broken = blocks_of(ns, range(50, 55)), blocks_of(ns, range(5))
    store.put(ns, old)
    store.put(ns, broken)
    store.flush()
    store.core.evict(ns, None, Tier.DRAM)
    store.flip_ssd(broken[0].key, 700)
    assert store.read(NS, ns, broken[0].key) is None
    policy = store.core.residency.ssd_policy
    order = []
    while (row := policy.victim(store.core.residency.may_leave_store)) is not None:
        order.append(store.core.index.keys[row])
        store.core.residency.drop(row)
    assert order[:4] == keys_of(broken[:0:-1])
    check(store)


def test_a_pinned_block_that_goes_bad_is_a_ghost_until_it_is_released(store, ns):
    blocks = blocks_of(ns, range(2))
    store.put(ns, blocks)
    lease, _, _ = store.core.acquire(ns, keys_of(blocks), store.now, None)
    store.flip_dram(blocks[1].key, 700)
    assert store.read(NS, ns, blocks[1].key) is None
    row = store.core.index.find(blocks[1].key)
    assert store.core.index.state[row] == GHOST
    check(store)
    store.core.release(lease)
    assert store.core.index.find(blocks[1].key) is None
    check(store)


def test_a_block_that_goes_bad_while_it_is_written_leaves_nothing_behind(store, ns):
    (block,) = blocks_of(ns, [1])
    store.put(ns, [block])
    job = store.begin_log()
    result = store.writer.run(job)
    store.flip_dram(block.key, 700)
    assert store.read(NS, ns, block.key) is None
    assert store.put(ns, blocks_of(ns, [1], writer=2)) == [STORED]
    store.core.lane.finish(job, result, store.now)
    check(store)
    store.flush()
    check(store)
    store.core.evict(ns, None, Tier.DRAM)
    expected = blocks_of(ns, [1], writer=2)[0].sections
    assert store.read(NS, ns, block.key) == expected
    store.close()
    store.open()
    assert store.read(NS, store.core.open_namespace(NS), block.key) == expected


# failing disks


def failing(store, *what):
    def before(op, path):
        if op in what:
            raise OSError(5, "Input/output error")

    store.disk.before = before


def test_a_disk_that_fails_to_write_degrades_and_recovers(store, ns):
    blocks = blocks_of(ns, range(6))
    store.put(ns, blocks[:3])
    store.flush()
    failing(store, "pwrite")
    assert store.put(ns, blocks[3:]) == [STORED] * 3
    assert store.log_turn()
    assert store.core.lane.degraded
    assert store.metrics.counts["disk_errors"] == 1
    assert not store.log_turn(), "it waits before it tries again"
    check(store)
    store.core.evict(ns, keys_of(blocks[:3]), Tier.DRAM)
    for block in blocks:
        assert store.read(NS, ns, block.key) == block.sections
    store.clock.advance(1.0)
    assert store.log_turn()
    assert store.metrics.counts["disk_errors"] == 2
    store.disk.before = lambda what, path: None
    store.clock.advance(2.0)
    store.flush()
    assert not store.core.lane.degraded
    assert {store.residency(b.key) for b in blocks[3:]} == {Tier.DRAM | Tier.SSD}
    check(store)


def test_dram_serves_on_as_if_alone_while_the_disk_fails():
    store = tight()
    ns = store.core.open_namespace(NS)
    failing(store, "pwrite", "commit")
    chains = [blocks_of(ns, range(100 * n, 100 * n + 8)) for n in range(6)]
    for blocks in chains:
        assert store.put(ns, blocks) == [STORED] * 8
        store.clock.advance(100.0)
        store.log_turn()
        check(store)
    assert store.core.match(ns, keys_of(chains[-1])).hit_blocks == 8
    assert store.core.match(ns, keys_of(chains[0])).hit_blocks == 0
    store.disk.before = lambda what, path: None
    store.clock.advance(100.0)
    store.flush()
    check(store)
    assert store.residency(chains[-1][0].key) == Tier.DRAM | Tier.SSD


def test_a_block_that_can_not_be_read_is_a_miss_and_stays(store, ns):
    (block,) = blocks_of(ns, [1])
    store.put(ns, [block])
    store.flush()
    store.core.evict(ns, None, Tier.DRAM)
    failing(store, "preadv")
    assert store.read(NS, ns, block.key) is None
    check(store)
    store.disk.before = lambda what, path: None
    assert store.read(NS, ns, block.key) == block.sections


def test_a_full_disk_sheds_writes_and_comes_back(ns):
    store = HandDrivenStore(store_config())
    ns = store.core.open_namespace(NS)
    store.put(ns, blocks_of(ns, range(3)))
    store.flush()
    store.disk.capacity_bytes = 1 << 16
    store.put(ns, blocks_of(ns, range(100, 120)))
    while store.log_turn():
        pass
    check(store)
    store.disk.capacity_bytes = 1 << 40
    for _ in range(5):
        store.clock.advance(60.0)
        store.flush()
    assert not store.core.residency.dirty
    check(store)


# restarts


def test_a_restart_keeps_the_cache_and_its_order():
    store = tight()
    ns = store.core.open_namespace(NS)
    chains = [blocks_of(ns, range(100 * n, 100 * n + 10)) for n in range(6)]
    for blocks in chains:
        store.clock.advance(10.0)
        store.put(ns, blocks)
        store.flush()
    # a late child makes its whole chain young
    store.clock.advance(10.0)
    late = blocks_of(ns, [0, 1, 2, 77], start=3)
    assert store.put(ns, late) == [STORED]
    store.close()
    store.open()
    check(store)
    assert store.core.namespaces.namespace(0) == NS
    for blocks in chains:
        assert store.core.match(ns, keys_of(blocks)).hit_blocks == 10
    r = store.core.residency
    order = []
    while (row := r.ssd_policy.victim(r.may_leave_store)) is not None:
        order.append(store.core.index.keys[row])
        r.drop(row)
    first = [key for blocks in chains[1:] for key in keys_of(blocks[::-1])]
    cold_tail = keys_of(chains[0][:2:-1])
    assert order == cold_tail + first + keys_of(late) + keys_of(chains[0][2::-1])


def test_a_parent_is_never_colder_than_its_child_at_boot(monkeypatch, seed):
    random = Random(seed)
    index = BlockIndex()
    rows = []
    for n in range(3000):
        parent = random.choice(rows[-40:]) if rows and random.random() < 0.95 else ROOT
        depth = 0 if parent == ROOT else index.depth[parent] + 1
        row = index.insert(n.to_bytes(32, "big"), 0, parent, depth, random.random())
        index.make_ready(row)
        index.tiers[row] = Tier.SSD
        rows.append(row)
    orders = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(boot, "_LEVEL_ROWS_MIN", least)
        orders.append(boot.coldest_first(index).tolist())
    assert orders[0] == orders[1]
    turn = {row: at for at, row in enumerate(orders[0])}
    assert sorted(turn) == rows
    youngest = {row: index.created_wall_s[row] for row in rows}
    for row in reversed(rows):
        if index.parent[row] != ROOT:
            assert turn[row] < turn[index.parent[row]]
            youngest[index.parent[row]] = max(youngest[index.parent[row]], youngest[row])
    times = [youngest[row] for row in orders[0]]
    assert times == sorted(times)


def test_power_loss_keeps_what_was_made_durable():
    for run in range(10):
        store = HandDrivenStore(store_config())
        ns = store.core.open_namespace(NS)
        durable, accepted = blocks_of(ns, range(5)), blocks_of(ns, range(10), start=5)
        store.put(ns, durable)
        store.flush()
        store.put(ns, accepted)
        store.power_loss(Random(run))
        check(store)
        ns = store.core.open_namespace(NS)
        assert store.core.match(ns, keys_of(durable)).hit_blocks == 5
        for block in durable + accepted:
            assert store.read(NS, ns, block.key) in (
                [block.sections] if block in durable else [block.sections, None]
            )
        check(store)


def test_a_tenant_is_found_again_after_a_restart(store):
    tenant = tiny_namespace(tenant="t")
    ns = store.core.open_namespace(tenant)
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    store.close()
    store.open()
    assert store.core.open_namespace(tenant) == ns
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3


def test_a_failing_disk_is_no_reason_to_drop_what_dram_alone_holds(store, ns):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    failing(store, "pwrite")
    store.flush()
    assert store.core.lane.degraded
    assert store.core.evict(ns, None, Tier.DRAM) == 0
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3
