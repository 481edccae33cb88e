"""The core driven by hand: a disk that fails to write, to read, or is full."""

from store_harness import HandDrivenStore, store_config
from store_steps import check, failing, tight
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import PutOutcome, Tier

STORED = PutOutcome.STORED


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


def test_a_full_disk_sheds_writes_and_comes_back():
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


def test_a_failing_disk_is_no_reason_to_drop_what_dram_alone_holds(store, ns):
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    failing(store, "pwrite")
    store.flush()
    assert store.core.lane.degraded
    assert store.core.evict(ns, None, Tier.DRAM) == 0
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3
