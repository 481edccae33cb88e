"""The engine over real tiers: what it says of itself."""

import pytest
from engine_harness import engine_config, engine_test, opened, read_all, true_size
from tiny_blocks import NS, blocks_of, keys_of, names_of

from kvstore.block import Durability, Tier
from kvstore.errors import InvalidRequest
from kvstore.testing.blocks import TINY_LAYOUT, tiny_namespace
from kvstore.testing.clock import ManualClock


@engine_test
async def test_stat_adds_up(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(10))
        await engine.put(ns, blocks[:6], Durability.DURABLE)
        await engine.evict(ns, keys_of(blocks[3:]), Tier.DRAM)
        await engine.reserve(ns, names_of(blocks[6:8]))
        engine.match(ns, keys_of(blocks))
        await engine.acquire(ns, keys_of(blocks[:2]))
        stat = engine.stat()
        assert stat.lookup_blocks == {
            "hit_hbm": 0,
            "hit_dram": 3,
            "hit_ssd": 3,
            "pending": 2,
            "miss": 2,
        }
        assert (stat.blocks, stat.namespaces, stat.leases, stat.reservations) == (6, 1, 1, 1)
        assert (stat.pinned_blocks, stat.dirty_blocks, stat.write_back_bytes) == (2, 0, 0)
        dram, ssd = stat.tiers
        assert (dram.objects, ssd.objects) == (3, 6)
        assert dram.payload_bytes == 3 * TINY_LAYOUT.block_bytes
        assert dram.used_bytes == 5 * 4096
        await true_size(engine, tmp_path)
        assert dram.accepting
        assert ssd.accepting
        assert stat.puts["stored"] == 6


@engine_test
async def test_listing_page_by_page(tmp_path):
    clock = ManualClock()
    async with opened(engine_config(tmp_path), clock) as engine:
        ns = engine.open_namespace(NS)
        other = engine.open_namespace(tiny_namespace("other"))
        blocks = blocks_of(ns, range(7))
        await engine.put(ns, blocks)
        await engine.put(other, blocks_of(other, range(3)))
        clock.advance(9.0)
        pages, after = [], None
        while page := engine.ls(ns, 3, after):
            pages.append([info.key for info in page])
            after = page[-1].key
        assert pages == [keys_of(blocks[at : at + 3]) for at in (0, 3, 6)]
        (info,) = engine.ls(ns, 1, blocks[2].key)
        assert (info.key, info.parent, info.depth) == (blocks[3].key, blocks[2].key, 3)
        assert (info.namespace_id, info.payload_bytes) == (ns, TINY_LAYOUT.block_bytes)
        assert info.age_s == 9.0
        assert engine.ls(ns, 1)[0].parent == ns
        assert len(engine.ls()) == 10
        with pytest.raises(InvalidRequest, match="list from the start"):
            engine.ls(ns, 1, b"x" * 32)


@engine_test
async def test_costs_follow_what_reads_take(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(100))
        await engine.put(ns, blocks)
        before = engine.match(ns, keys_of(blocks)).costs
        assert set(before) == {Tier.DRAM, Tier.SSD}
        await engine.flush()
        await engine.evict(tier=Tier.DRAM)
        await read_all(engine, ns, keys_of(blocks))
        after = engine.match(ns, keys_of(blocks)).costs
        assert after[Tier.SSD] != before[Tier.SSD]
        assert engine.stat().tiers[1].cost == after[Tier.SSD]
