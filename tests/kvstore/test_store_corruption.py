"""The core driven by hand: bytes that went bad are a counted miss, whoever finds them."""

import pytest
from store_steps import check, tight
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Outcome, PutOutcome, Tier
from kvstore.index import GHOST

STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


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
