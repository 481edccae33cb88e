"""Loads into DRAM whose block changes on the way."""

from store_steps import check
from tiny_blocks import NS, blocks_of

from kvstore.block import Tier
from kvstore.migration.log_lane import LogJob
from kvstore.testing.blocks import TINY_LAYOUT


def test_a_load_does_not_bring_back_what_was_lost_and_put_again_meanwhile(store, ns):
    (first,), (second,) = blocks_of(ns, range(1)), blocks_of(ns, range(1), writer=1)
    core, r = store.core, store.core.residency

    def only_on_ssd(block):
        store.put(ns, [block])
        store.flush()
        core.evict(ns, None, Tier.DRAM)
        assert store.residency(block.key) == Tier.SSD

    only_on_ssd(first)
    row = core.index.find(first.key)
    load, _ = core.promotion.begin(row, ns)
    r.quarantine(row, Tier.SSD, "as if verified meanwhile")
    only_on_ssd(second)
    assert core.index.find(first.key) == row
    later, new = core.promotion.begin(row, ns)
    assert new, "a reader of the second block waits for the first one's bytes"
    check(store)
    # its own reader asked before the second was there
    assert store.finish_load(TINY_LAYOUT, load) == first.sections
    assert store.residency(first.key) == Tier.SSD
    check(store)
    assert store.finish_load(TINY_LAYOUT, later) == second.sections
    assert store.residency(first.key) == Tier.SSD | Tier.DRAM
    assert store.read(NS, ns, first.key) == second.sections
    check(store)


def test_a_load_of_what_compaction_moves_meanwhile_gives_its_bytes(store, ns):
    blocks = blocks_of(ns, range(1))
    store.put(ns, blocks)
    store.flush()
    core = store.core
    core.evict(ns, None, Tier.DRAM)
    row = core.index.find(blocks[0].key)
    load, _ = core.promotion.begin(row, ns)
    length = core.index.stored_bytes[row]
    job = LogJob()
    core.lane._append(job, row, store.ssd.place(length), None, core.residency.location_of(row))
    core.lane._job = job
    store.finish_log(job)
    later, new = core.promotion.begin(row, ns)
    assert new
    for each in (load, later):
        assert store.finish_load(TINY_LAYOUT, each) == blocks[0].sections
        check(store)
    assert store.residency(blocks[0].key) == Tier.SSD | Tier.DRAM
    assert store.metrics.counts["promoted_blocks"] == 1
