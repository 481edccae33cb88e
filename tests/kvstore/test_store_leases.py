"""The core driven by hand: lookups, and the leases that follow them."""

import pytest
from store_harness import HandDrivenStore, store_config
from store_steps import check
from tiny_blocks import NS, blocks_of, keys_of, names_of

from kvstore.block import Outcome, Tier
from kvstore.errors import LeaseExpired, Overloaded
from kvstore.testing.blocks import TINY_LAYOUT


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


@pytest.mark.parametrize("told", ["with the lease", "with a read"])
def test_slots_of_blocks_that_a_caller_names_twice_are_given_back(store, ns, told):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    keys = keys_of(blocks)
    asked = [keys[0], keys[0], *keys[1:], keys[2]]
    lease, _, _ = store.core.acquire(ns, asked, store.now, 5.0)
    places = store.core.locate(lease, asked if told == "with a read" else None, store.now)
    assert len(places) == len(asked)
    assert (places[0] == places[1]).all()
    assert store.core.residency.slots_in_use == 3
    check(store)
    store.core.release(lease)
    assert store.core.residency.slots_in_use == 0
    assert store.core.held_bytes == 0
    check(store)


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
