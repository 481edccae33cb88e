"""The engine over real tiers: leases, and waits for another writer."""

import asyncio

import pytest
from engine_harness import engine_config, engine_test, opened
from tiny_blocks import NS, blocks_of, keys_of, names_of

from kvstore.block import Durability, Outcome, Tier
from kvstore.errors import LeaseExpired, Overloaded
from kvstore.testing.clock import ManualClock


@engine_test
async def test_leases_last_as_long_as_they_say(tmp_path):
    clock = ManualClock()
    async with opened(engine_config(tmp_path), clock) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await engine.put(ns, blocks, Durability.DURABLE)
        lease = await engine.acquire(ns, keys_of(blocks), ttl_s=5.0)
        clock.advance(4.0)
        assert await engine.renew(lease.lease_id, 7.0) == 7.0
        clock.advance(6.9)
        assert await engine.evict() == 0
        clock.advance(0.2)
        with pytest.raises(LeaseExpired):
            await engine.read(lease.lease_id, keys_of(blocks))
        with pytest.raises(LeaseExpired):
            await engine.renew(lease.lease_id)
        await engine.release(lease.lease_id)
        assert await engine.evict() == 3


@engine_test
async def test_bytes_in_use_outlive_lease_and_block(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        (block,) = blocks_of(ns, [1])
        await engine.put(ns, [block], Durability.DURABLE)
        lease = await engine.acquire(ns, [block.key])
        (frames,) = await engine.read(lease.lease_id, [block.key])
        await engine.release(lease.lease_id)
        assert await engine.evict() == 0
        engine._core.residency.lose(engine._core.index.find(block.key), Tier.DRAM)
        await engine.put(ns, blocks_of(ns, range(100, 400)))
        assert [bytes(s) for s in frames.sections] == block.sections
        frames.done()


@engine_test
async def test_ids_of_an_earlier_run_mean_nothing(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        old = (await engine.acquire(ns, [])).lease_id
    async with opened(config) as engine:
        await engine.acquire(ns, [])
        with pytest.raises(LeaseExpired):
            await engine.read(old, [])


# waiting


@engine_test
async def test_waiting_for_another_writer(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await engine.put(ns, blocks[:1])
        grant = await engine.reserve(ns, names_of(blocks[1:]))
        waiting = asyncio.create_task(engine.wait_for(ns, keys_of(blocks), 30.0))
        for block in blocks[1:]:
            await engine.write(grant.reservation_id, block.key, block.sections)
        assert not waiting.done()
        await engine.commit(grant.reservation_id)
        assert (await waiting).hit_blocks == 3
        lookups = engine.stat().lookup_blocks
        assert lookups == {"hit_hbm": 0, "hit_dram": 3, "hit_ssd": 0, "pending": 0, "miss": 0}


@engine_test
async def test_waiting_ends_with_an_abort_a_deadline_or_an_expiry(tmp_path):
    clock = ManualClock()
    async with opened(engine_config(tmp_path), clock) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(2))
        assert (await engine.wait_for(ns, keys_of(blocks), 30.0)).outcomes == (Outcome.MISS,)
        grant = await engine.reserve(ns, names_of(blocks))
        late = await engine.wait_for(ns, keys_of(blocks), 0.01)
        assert late.outcomes == (Outcome.PENDING,) * 2
        waiting = asyncio.create_task(engine.wait_for(ns, keys_of(blocks), 30.0))
        await asyncio.sleep(0)
        await engine.abort(grant.reservation_id)
        assert (await waiting).outcomes == (Outcome.MISS,)
        await engine.reserve(ns, names_of(blocks), ttl_s=1.0)
        waiting = asyncio.create_task(engine.wait_for(ns, keys_of(blocks), 30.0))
        await asyncio.sleep(0)
        clock.advance(1.0)
        # the store looks by itself, however idle
        assert (await asyncio.wait_for(waiting, 10)).outcomes == (Outcome.MISS,)


@engine_test
async def test_only_so_many_may_wait(tmp_path):
    config = engine_config(tmp_path, **{"limits.waiters_max": 1})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(1))
        grant = await engine.reserve(ns, names_of(blocks))
        first = asyncio.create_task(engine.wait_for(ns, keys_of(blocks), 30.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="waiters_max"):
            await engine.wait_for(ns, keys_of(blocks), 30.0)
        await engine.abort(grant.reservation_id)
        await first
