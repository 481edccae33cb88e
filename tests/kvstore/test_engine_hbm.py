"""The engine with HBM on simulated devices: promotion beside the traffic, faults, a device that
hangs."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
from engine_harness import engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Durability, Outcome, Tier
from kvstore.testing.blocks import TINY_LAYOUT, payload
from kvstore.tiers.hbm.device import DeviceError
from kvstore.tiers.hbm.opening import open_hbm
from kvstore.tiers.hbm.simulated import SimulatedDevice, no_fault

WAIT_S = 20.0
FRAME = 4096
"""Bytes of the tiny layout's frame."""


@asynccontextmanager
async def with_hbm(directory, blocks=16, devices=1, **settings):
    made = [SimulatedDevice(i) for i in range(devices)]
    given = {"hbm.device": "simulated", "hbm.budget_bytes": blocks * FRAME // devices}
    # which block is cold is what these tests say
    given["eviction.policy"] = "lru"
    config = engine_config(directory, **{**given, **settings})
    find = partial(open_hbm, find=lambda _: made)
    async with opened(config, open_devices=find) as engine:
        yield engine, made


async def until(check):
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0.002)


def objects(engine, tier):
    return next((t.objects for t in engine.stat().tiers if t.tier is tier), 0)


async def hit(engine, ns, keys):
    """A request for blocks, after which they may be promoted."""
    lease = await engine.acquire(ns, keys)
    await engine.release(lease.lease_id)
    return lease.blocks


async def put_and_promote(engine, ns, blocks, durability=Durability.DURABLE):
    await engine.put(ns, blocks, durability)
    before = objects(engine, Tier.HBM)
    await hit(engine, ns, keys_of(blocks))
    await until(lambda: objects(engine, Tier.HBM) == before + len(blocks))


def right(blocks):
    return [payload(TINY_LAYOUT, b.key) for b in blocks]


@engine_test
async def test_what_is_hit_is_promoted_and_read_back_past_an_empty_dram(tmp_path):
    async with with_hbm(tmp_path, devices=2) as (engine, _):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(8))
        await put_and_promote(engine, ns, blocks)
        found = engine.match(ns, keys_of(blocks))
        assert set(found.residency) == {Tier.HBM | Tier.DRAM | Tier.SSD}
        assert await engine.evict(tier=Tier.DRAM) == 8
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)
        stat = engine.stat()
        assert stat.counters["read_hbm_blocks"] == 8
        assert stat.counters["read_ssd_blocks"] == 0
        assert stat.lookup_blocks["hit_hbm"] == 8
        assert sum(stat.lookup_blocks.values()) == 8
        report = await engine.verify()
        assert report.clean
        assert report.frames == {Tier.HBM: 8, Tier.DRAM: 8, Tier.SSD: 8}


@engine_test
async def test_cold_blocks_make_room_and_go_to_dram_first(tmp_path):
    async with with_hbm(tmp_path, blocks=8) as (engine, _):
        ns = engine.open_namespace(NS)
        old, new = blocks_of(ns, [1] * 8), blocks_of(ns, [2] * 6)
        await put_and_promote(engine, ns, old)
        await engine.evict(tier=Tier.DRAM)
        await engine.put(ns, new, Durability.DURABLE)
        await hit(engine, ns, keys_of(new))
        await until(lambda: engine.metrics.counts["promoted_hbm_blocks"] == 14)
        residency = engine.match(ns, keys_of(new)).residency
        assert all(tiers & Tier.HBM for tiers in residency)
        # the coldest six, the chain's end, came back to DRAM
        assert engine.metrics.counts["copied_back_blocks"] == 6
        assert engine.metrics.counts["demoted_hbm_blocks"] == 6
        residency = engine.match(ns, keys_of(old)).residency
        assert [bool(tiers & Tier.DRAM) for tiers in residency] == [False] * 2 + [True] * 6
        assert await read_all(engine, ns, keys_of(old)) == right(old)


@engine_test
async def test_what_a_lease_holds_is_not_pushed_out(tmp_path):
    async with with_hbm(tmp_path, blocks=8) as (engine, _):
        ns = engine.open_namespace(NS)
        old, new = blocks_of(ns, [1] * 8), blocks_of(ns, [2] * 4)
        await put_and_promote(engine, ns, old)
        lease = await engine.acquire(ns, keys_of(old))
        await engine.put(ns, new)
        await hit(engine, ns, keys_of(new))
        await engine.flush()
        assert engine.metrics.counts["promoted_hbm_blocks"] == 8
        await engine.release(lease.lease_id)
        await hit(engine, ns, keys_of(new))
        await until(lambda: engine.metrics.counts["promoted_hbm_blocks"] == 12)


@engine_test
async def test_a_chain_longer_than_hbm_keeps_its_beginning(tmp_path):
    async with with_hbm(tmp_path, blocks=8) as (engine, _):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(20))
        await put_and_promote(engine, ns, blocks[:8])
        await engine.put(ns, blocks[8:], Durability.DURABLE)
        for _ in range(3):
            await hit(engine, ns, keys_of(blocks))
            await engine.flush()
        residency = engine.match(ns, keys_of(blocks)).residency
        assert [bool(tiers & Tier.HBM) for tiers in residency] == [True] * 8 + [False] * 12
        assert engine.metrics.counts["promoted_hbm_blocks"] == 8


@pytest.mark.parametrize("op", ["in", "queue"])
@engine_test
async def test_a_copy_that_fails_costs_itself_and_a_pause(tmp_path, op):
    quick = {"migration.retry_s_min": 0.05, "limits.upkeep_s": 0.02}
    async with with_hbm(tmp_path, **quick) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        await engine.put(ns, blocks, Durability.DURABLE)

        def before(what, length):
            if what == op:
                raise DeviceError("injected")

        device.before = before
        await hit(engine, ns, keys_of(blocks))
        await until(lambda: engine.metrics.counts["device_errors"])
        assert objects(engine, Tier.HBM) == 0
        assert not next(t for t in engine.stat().tiers if t.tier is Tier.HBM).accepting
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)
        device.before = no_fault
        await asyncio.sleep(0.1)
        await hit(engine, ns, keys_of(blocks))
        await until(lambda: objects(engine, Tier.HBM) == 4)
        assert next(t for t in engine.stat().tiers if t.tier is Tier.HBM).accepting


@engine_test
async def test_what_can_not_be_read_back_is_read_from_ssd(tmp_path):
    async with with_hbm(tmp_path) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(6))
        await put_and_promote(engine, ns, blocks)
        await engine.evict(tier=Tier.DRAM)

        def before(what, length):
            if what == "out":
                raise DeviceError("injected")

        device.before = before
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)
        assert engine.metrics.counts["read_ssd_blocks"] == 6


@engine_test
async def test_wrong_bytes_that_come_back_are_quarantined_and_read_from_ssd(tmp_path):
    async with with_hbm(tmp_path) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(6))
        await put_and_promote(engine, ns, blocks)
        await engine.evict(tier=Tier.DRAM)
        slot = engine._core.residency.hbm_slot_of(engine._core.index.find(blocks[2].key))
        device.memory[slot.offset + 600] ^= 1
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)
        assert engine.metrics.counts["corrupt_hbm_blocks"] == 1
        assert engine.metrics.counts["read_ssd_blocks"] == 1


@engine_test
async def test_verify_finds_wrong_bytes_on_the_device(tmp_path):
    async with with_hbm(tmp_path) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await put_and_promote(engine, ns, blocks)
        slot = engine._core.residency.hbm_slot_of(engine._core.index.find(blocks[0].key))
        device.memory[slot.offset + 600] ^= 1
        report = await engine.verify()
        assert report.corrupt == (blocks[0].key,)
        assert engine.match(ns, keys_of(blocks)).residency[0] == Tier.DRAM | Tier.SSD
        assert (await engine.verify()).clean


@engine_test
async def test_dram_that_changed_is_found_before_it_is_copied_in(tmp_path):
    async with with_hbm(tmp_path) as (engine, _):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await engine.put(ns, blocks, Durability.DURABLE)
        r = engine._core.residency
        r.dram.view(r.slot_of(engine._core.index.find(blocks[1].key)))[600] ^= 1
        await hit(engine, ns, keys_of(blocks))
        await until(lambda: objects(engine, Tier.HBM) == 2)
        assert engine.metrics.counts["corrupt_dram_blocks"] == 1
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)


@engine_test
async def test_a_slot_that_a_lease_was_told_of_stays_whatever_becomes_of_its_block(tmp_path):
    async with with_hbm(tmp_path, blocks=4) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(2))
        await put_and_promote(engine, ns, blocks)
        lease = await engine.acquire(ns, keys_of(blocks))
        places = engine.locate_hbm(lease.lease_id)
        table = engine._core.residency.hbm
        row = engine._core.index.find(blocks[0].key)
        engine._core.residency.quarantine(row, Tier.HBM, "for the test")
        engine.check_integrity()
        others = blocks_of(ns, [7] * 4)
        await engine.put(ns, others)
        await hit(engine, ns, keys_of(others))
        await engine.flush()
        offset, generation = places[0].tolist()
        assert table._generations[offset // 4096] == generation
        start = offset + 512
        assert device.memory[start : start + 8] == payload(TINY_LAYOUT, blocks[0].key)[0][:8]
        await engine.release(lease.lease_id)
        assert table._generations[offset // 4096] != generation


@engine_test
async def test_a_device_that_hangs_costs_the_tier_and_nothing_else(tmp_path):
    async with with_hbm(tmp_path, **{"hbm.copy_s_max": 2.0}) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        blocks, more = blocks_of(ns, range(4)), blocks_of(ns, [9] * 4)
        await put_and_promote(engine, ns, blocks)
        await engine.evict(tier=Tier.DRAM)
        await engine.put(ns, more, Durability.DURABLE)
        device.hold()
        # a read that needs the device, and a promotion, at once
        reading = asyncio.create_task(read_all(engine, ns, keys_of(blocks)))
        await hit(engine, ns, keys_of(more))
        assert await reading == right(blocks)
        await until(lambda: engine._core.hbm_lane.failed)
        engine.check_integrity()
        assert objects(engine, Tier.HBM) == 0
        assert await read_all(engine, ns, keys_of(more)) == right(more)
        await hit(engine, ns, keys_of(blocks))
        assert objects(engine, Tier.HBM) == 0
        dram = next(t for t in engine.stat().tiers if t.tier is Tier.DRAM)
        # what the device may still write to is not used again
        held = engine._core.residency.dram_users._abandoned
        assert held
        assert dram.used_bytes >= 8 * FRAME + sum(slot.length for slot in held)
        device.release()
        await asyncio.sleep(0.3)
        assert (await engine.verify()).clean
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)


@engine_test
async def test_hbm_alone_is_written_when_the_disk_is_back(tmp_path):
    async with with_hbm(tmp_path) as (engine, _):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        await until(lambda: engine._core.lane.idle)
        engine._core.lane._retry_at_s = float("inf")  # the log does nothing
        await put_and_promote(engine, ns, blocks, Durability.ACCEPTED)
        r, row = engine._core.residency, engine._core.index.find(blocks[2].key)
        r.quarantine(row, Tier.DRAM, "for the test")
        assert row in r.stranded
        assert engine.stat().dirty_blocks == 3
        engine._core.lane._retry_at_s = 0.0
        await engine.flush()
        residency = engine.match(ns, keys_of(blocks)).residency
        assert all(tiers & Tier.SSD for tiers in residency)
        assert not r.stranded
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)


@engine_test
async def test_a_reader_joins_a_block_on_its_way_back(tmp_path):
    async with with_hbm(tmp_path, blocks=4) as (engine, (device,)):
        ns = engine.open_namespace(NS)
        old, new = blocks_of(ns, [1] * 4), blocks_of(ns, [2] * 2)
        await put_and_promote(engine, ns, old)
        await engine.evict(tier=Tier.DRAM)
        await engine.put(ns, new, Durability.DURABLE)
        device.hold()
        await hit(engine, ns, keys_of(new))
        await until(lambda: len(engine._core.promotion) > 0)
        reading = asyncio.create_task(read_all(engine, ns, keys_of(old)))
        await asyncio.sleep(0.05)
        assert not reading.done()
        device.release()
        assert await reading == right(old)
        assert engine.metrics.counts["device_errors"] == 0


@engine_test
async def test_a_store_of_hbm_and_dram_keeps_what_dram_has_no_room_for():
    settings = {"dram.budget_bytes": 16 * FRAME, "hbm.held_fraction_max": 0}
    async with with_hbm(None, blocks=8, **settings) as (engine, _):
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(8))
        await put_and_promote(engine, ns, blocks, Durability.ACCEPTED)
        for i in range(4):
            await engine.put(ns, blocks_of(ns, [100 + i] * 4))
        residency = engine.match(ns, keys_of(blocks)).residency
        assert Tier.HBM in residency
        assert await read_all(engine, ns, keys_of(blocks)) == right(blocks)


@engine_test
async def test_outcomes_of_a_store_without_the_tier_say_so(tmp_path):
    config = engine_config(tmp_path, **{"hbm.device": "off"})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        lease = await engine.acquire(ns, keys_of(blocks_of(ns, range(2))))
        assert lease.match.outcomes[0] is Outcome.MISS
        assert engine.stat().notes == ("hbm: absent, hbm.device is off",)
        assert engine.shared_hbm is None
