"""The engine over real tiers: limits, and many readers of few slots."""

import asyncio
import time

import pytest
from engine_harness import engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Durability, Outcome, PutOutcome, Tier
from kvstore.errors import InvalidRequest, MessageTooLarge, Overloaded

STORED = PutOutcome.STORED


@engine_test
async def test_a_read_has_a_limit(tmp_path):
    config = engine_config(tmp_path, **{"limits.read_bytes_max": 5000})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await engine.put(ns, blocks)
        lease = await engine.acquire(ns, keys_of(blocks))
        with pytest.raises(MessageTooLarge, match="5000"):
            await engine.read(lease.lease_id, keys_of(blocks))
        with pytest.raises(InvalidRequest, match="section 4"):
            await engine.read(lease.lease_id, keys_of(blocks), [4])
        for frames in await engine.read(lease.lease_id, keys_of(blocks), [1]):
            assert frames.outcome is Outcome.HIT
            frames.done()


@engine_test
async def test_reading_goes_past_a_dram_full_of_blocks_in_use(tmp_path):
    settings = {
        "dram.budget_bytes": "64KiB",
        "migration.bounce_bytes_max": "32KiB",
        "limits.room_wait_s_max": 2.0,
    }
    async with opened(engine_config(tmp_path, **settings)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(40))
        assert await engine.put(ns, blocks, Durability.DURABLE) == [STORED] * 40
        lease = await engine.acquire(ns, keys_of(blocks))
        held = await engine.read(lease.lease_id, keys_of(blocks[:16]))
        bounced = await engine.read(lease.lease_id, keys_of(blocks[16:24]))
        for block, frames in zip(blocks, held + bounced, strict=False):
            assert [bytes(s) for s in frames.sections] == block.sections
        with pytest.raises(Overloaded, match="bounce_bytes_max"):
            await engine.read(lease.lease_id, keys_of(blocks[24:26]))
        engine.check_integrity()
        bounced[0].done()
        (frames,) = await engine.read(lease.lease_id, keys_of(blocks[24:25]))
        assert [bytes(s) for s in frames.sections] == blocks[24].sections
        for each in (*held, *bounced, frames):
            each.done()
        await engine.release(lease.lease_id)
        assert engine.stat().counters["bounced_blocks"] == 9
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]


@engine_test
async def test_no_room_is_an_outcome_in_bounded_time(tmp_path):
    settings = {"dram.budget_bytes": "64KiB", "limits.room_wait_s_max": 0.2}
    async with opened(engine_config(None, **settings)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(16))
        await engine.put(ns, blocks)
        await engine.acquire(ns, keys_of(blocks))
        other = blocks_of(ns, range(100, 103))
        began = time.monotonic()
        assert await engine.put(ns, other) == [PutOutcome.NO_SPACE] * 3
        assert time.monotonic() - began < 30
        assert engine.stat().puts["no_space"] == 3


@engine_test
async def test_writers_wait_for_room_that_comes(tmp_path):
    settings = {"dram.budget_bytes": "64KiB"}
    async with opened(engine_config(None, **settings)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(16))
        await engine.put(ns, blocks)
        lease = await engine.acquire(ns, keys_of(blocks))
        frames = await engine.read(lease.lease_id, keys_of(blocks))
        put = asyncio.create_task(engine.put(ns, blocks_of(ns, [100])))
        await asyncio.sleep(0.05)
        assert not put.done()
        await engine.release(lease.lease_id)
        for each in frames:
            each.done()
        assert await put == [STORED]


# loads


@engine_test
async def test_many_readers_of_one_block_read_it_once(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(8))
        await engine.put(ns, blocks)
    async with opened(config) as engine:
        found = await asyncio.gather(*(read_all(engine, ns, keys_of(blocks)) for _ in range(10)))
        assert all(each == [b.sections for b in blocks] for each in found)
        counters = engine.stat().counters
        assert counters["promoted_blocks"] == 8
        assert counters["read_ssd_blocks"] + counters["read_dram_blocks"] == 80


@engine_test
async def test_a_reader_that_leaves_takes_nothing_along(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(30))
        await engine.put(ns, blocks)
    for ticks in range(12):
        async with opened(config) as engine:
            lease = await engine.acquire(ns, keys_of(blocks))
            task = asyncio.create_task(engine.read(lease.lease_id, keys_of(blocks)))
            for _ in range(ticks):
                await asyncio.sleep(0.0003)
            if not task.cancel():
                for frames in task.result():
                    frames.done()
            await asyncio.wait([task])
            await engine.release(lease.lease_id)
            while len(engine._core.promotion):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            engine.check_integrity()
            assert engine._core.residency.slots_in_use == 0
            await engine.evict(tier=Tier.DRAM)
            assert engine.stat().tiers[0].used_bytes == 0
