"""The core driven by hand: what leaves which tier, and what stays."""

from store_harness import HandDrivenStore, store_config
from store_steps import check, tight
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import PutOutcome, Tier

STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


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
