"""The engine over real tiers: what every call promises."""

import asyncio
import threading
import time

import numpy as np
import pytest
import xxhash
from engine_harness import (
    NS,
    blocks_of,
    disk_bytes,
    engine_config,
    engine_test,
    keys_of,
    names_of,
    opened,
    read_all,
)

from kvstore.block import BlockPut, Durability, Outcome, PutOutcome, Tier
from kvstore.errors import (
    ConfigError,
    DiskError,
    InvalidRequest,
    LeaseExpired,
    MessageTooLarge,
    Overloaded,
    ReservationExpired,
    StoreLocked,
    Unavailable,
    UnknownNamespace,
    WrongSectionSize,
)
from kvstore.namespace import DS41F_LAYOUT, Namespace
from kvstore.store import Engine
from kvstore.testing.blocks import TINY_LAYOUT, tiny_namespace
from kvstore.testing.clock import ManualClock

STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


# what goes in comes out


@engine_test
async def test_sections_come_out_as_they_went_in(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(5))
        assert await engine.put(ns, blocks) == [STORED] * 5
        lease = await engine.acquire(ns, keys_of(blocks))
        assert (lease.blocks, lease.match.hit_blocks) == (5, 5)
        for block, frames in zip(
            blocks, await engine.read(lease.lease_id, keys_of(blocks), [3, 0]), strict=True
        ):
            assert frames.outcome is Outcome.HIT
            assert frames.tier is Tier.DRAM
            assert [bytes(s) for s in frames.sections] == [block.sections[3], block.sections[0]]
            sums = tuple(xxhash.xxh3_128_digest(block.sections[i]) for i in (3, 0))
            assert frames.checksums == sums
            assert frames.sections[0].readonly
            frames.done()
            frames.done()
            assert frames.sections == ()


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array", "wide array", "memoryview"])
@engine_test
async def test_sections_may_be_any_buffer(tmp_path, kind):
    make = {
        "bytes": bytes,
        "bytearray": bytearray,
        "array": lambda b: np.frombuffer(b, np.uint8).reshape(4, -1),
        "wide array": lambda b: np.frombuffer(b, np.uint16),
        "memoryview": lambda b: memoryview(b).cast("H"),
    }[kind]
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        (block,) = blocks_of(ns, [7])
        put = BlockPut(block.key, block.parent, [make(s) for s in block.sections])
        assert await engine.put(ns, [put]) == [STORED]
        assert await read_all(engine, ns, [block.key]) == [block.sections]


async def true_size(engine, directory):
    """The index is written beside the call, and counts when it is."""
    ends_s = time.monotonic() + 20.0
    while engine.stat().tiers[1].used_bytes != disk_bytes(directory):
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.01)


@engine_test
async def test_a_released_block_has_the_size_of_the_report(tmp_path):
    config = engine_config(tmp_path, **{"dram.budget_bytes": "8MiB"})
    async with opened(config) as engine:
        ns = engine.open_namespace(Namespace("m", "1", DS41F_LAYOUT))
        block = BlockPut(b"k" * 32, ns, [bytes(n) for n in DS41F_LAYOUT.section_bytes])
        assert await engine.put(ns, [block], Durability.DURABLE) == [STORED]
        dram, ssd = engine.stat().tiers
        assert dram.payload_bytes == ssd.payload_bytes == 227_840 == 256 * 890
        assert dram.used_bytes == 229_376
        await true_size(engine, tmp_path)


@engine_test
async def test_a_restart_keeps_the_cache(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(50))
        await engine.put(ns, blocks)
    async with opened(config) as engine:
        assert engine.namespace(ns) == NS
        match = engine.match(ns, keys_of(blocks))
        assert match.hit_blocks == 50
        assert set(match.residency) == {Tier.SSD}
        assert match.fetch_cost_s() > 0
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        assert engine.match(ns, keys_of(blocks)).residency[0] == Tier.SSD | Tier.DRAM


@engine_test
async def test_durable_blocks_are_there_without_a_clean_stop(tmp_path):
    import shutil

    async with opened(engine_config(tmp_path / "a")) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(20))
        assert await engine.put(ns, blocks, Durability.DURABLE) == [STORED] * 20
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with opened(engine_config(tmp_path / "b")) as engine:
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        assert (await engine.verify()).clean


@engine_test
async def test_one_put_may_be_larger_than_dram(tmp_path):
    config = engine_config(tmp_path, **{"dram.budget_bytes": "64KiB"})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(500))
        assert await engine.put(ns, blocks) == [STORED] * 500
        assert engine.stat().tiers[0].used_bytes <= 64 << 10
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]


@engine_test
async def test_a_long_lease_is_read_through_a_small_arena(tmp_path):
    config = engine_config(tmp_path, **{"dram.budget_bytes": "1MiB"})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4096))
        assert await engine.put(ns, blocks) == [STORED] * 4096
        found = await read_all(engine, ns, keys_of(blocks), step=40)
        assert found == [b.sections for b in blocks]
        stat = engine.stat()
        assert stat.tiers[0].used_bytes <= 1 << 20
        assert stat.counters["read_ssd_blocks"] > 3800


@engine_test
async def test_two_writers_of_one_chain(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        puts = [blocks_of(ns, range(40), writer=w) for w in range(3)]
        outcomes = await asyncio.gather(*(engine.put(ns, blocks) for blocks in puts))
        for block in zip(*outcomes, strict=True):
            assert block.count(STORED) == 1
        found = await read_all(engine, ns, keys_of(puts[0]))
        for i, sections in enumerate(found):
            (winner,) = [w for w in range(3) if outcomes[w][i] is STORED]
            assert sections == puts[winner][i].sections


# two-phase writes


@engine_test
async def test_reserve_write_commit(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        grant = await engine.reserve(ns, names_of(blocks))
        assert grant.outcomes == (STORED,) * 3
        await asyncio.gather(
            *(engine.write(grant.reservation_id, b.key, b.sections) for b in blocks)
        )
        assert engine.match(ns, keys_of(blocks)).hit_blocks == 0
        assert await engine.commit(grant.reservation_id, Durability.DURABLE) == [STORED] * 3
        assert engine.match(ns, keys_of(blocks)).residency[0] == Tier.DRAM | Tier.SSD
        with pytest.raises(ReservationExpired):
            await engine.commit(grant.reservation_id)
        again = await engine.reserve(ns, names_of(blocks))
        assert (again.reservation_id, again.outcomes) == (0, (PRESENT,) * 3)


@engine_test
async def test_commit_waits_for_copies_under_way(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        (block,) = blocks_of(ns, [1])
        grant = await engine.reserve(ns, names_of([block]))
        write = asyncio.create_task(engine.write(grant.reservation_id, block.key, block.sections))
        await asyncio.sleep(0)
        assert await engine.commit(grant.reservation_id) == [STORED]
        await write


@engine_test
async def test_a_wrong_section_size_changes_nothing(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        (block,) = blocks_of(ns, [1])
        short = [*block.sections[:3], block.sections[3][:-1]]
        cases = (
            (short, "section 3 .layer 20, index. has 272 B, not 271"),
            (block.sections[:3], "4 sections, not 3"),
        )
        grant = await engine.reserve(ns, names_of([block]))
        for sections, says in cases:
            with pytest.raises(WrongSectionSize, match=says):
                await engine.put(ns, [BlockPut(block.key, block.parent, sections)])
            with pytest.raises(WrongSectionSize, match=says):
                await engine.write(grant.reservation_id, block.key, sections)
        wide = np.zeros((4, 2 * len(block.sections[0])), np.uint8)[:, ::2][0]
        with pytest.raises(InvalidRequest, match="contiguous"):
            await engine.write(grant.reservation_id, block.key, [wide, *block.sections[1:]])
        with pytest.raises(InvalidRequest, match="16 B"):
            await engine.write(grant.reservation_id, block.key, block.sections, [b"x"] * 4)
        await engine.write(grant.reservation_id, block.key, block.sections)
        assert await engine.commit(grant.reservation_id) == [STORED]


@engine_test
async def test_an_abandoned_reservation_leaves_nothing(tmp_path):
    clock = ManualClock()
    async with opened(engine_config(tmp_path), clock) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        first = await engine.reserve(ns, names_of(blocks[:2]), ttl_s=5.0)
        await engine.write(first.reservation_id, blocks[0].key, blocks[0].sections)
        await engine.abort(first.reservation_id)
        await engine.abort(first.reservation_id)
        await engine.reserve(ns, names_of(blocks[:2]), ttl_s=5.0)
        clock.advance(6.0)
        stat = engine.stat()
        assert stat.reservations == stat.tiers[0].used_bytes == stat.blocks == 0
        assert stat.counters["reservations_expired"] == 1


# leases


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


# limits


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


# ends


@engine_test
async def test_a_second_engine_is_refused(tmp_path):
    async with opened(engine_config(tmp_path)):
        with pytest.raises(StoreLocked):
            await Engine.open(engine_config(tmp_path))


@engine_test
async def test_a_directory_that_can_not_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file"):
        await Engine.open(engine_config(tmp_path / "file" / "store"))


@engine_test
async def test_more_memory_than_there_can_be_is_an_error():
    with pytest.raises(ConfigError, match="lower dram"):
        await Engine.open(engine_config(None, **{"dram.budget_bytes": 1 << 60}))


@engine_test
async def test_closing_writes_what_is_dirty_and_ends_everything(tmp_path):
    config = engine_config(tmp_path)
    engine = await Engine.open(config)
    ns = engine.open_namespace(NS)
    blocks = blocks_of(ns, range(60))
    await engine.put(ns, blocks)
    threads = threading.active_count()
    await engine.close()
    await engine.close()
    with pytest.raises(Unavailable):
        engine.match(ns, [])
    with pytest.raises(Unavailable):
        await engine.put(ns, blocks)
    for _ in range(1000):
        # a thread that was begun last is on its way out
        if threading.active_count() <= threads:
            break
        await asyncio.sleep(0.01)
    assert threading.active_count() <= threads
    async with opened(config) as engine:
        assert engine.match(ns, keys_of(blocks)).hit_blocks == 60


@engine_test
async def test_dram_alone_is_a_store_that_forgets(tmp_path):
    async with opened(engine_config(None)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(5))
        assert await engine.put(ns, blocks) == [STORED] * 5
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        for call in (engine.flush(), engine.put(ns, blocks, Durability.DURABLE)):
            with pytest.raises(InvalidRequest, match="no ssd tier"):
                await call
        assert [t.tier for t in engine.stat().tiers] == [Tier.DRAM]
    async with opened(engine_config(None)) as engine:
        with pytest.raises(UnknownNamespace):
            engine.match(ns, keys_of(blocks))


@engine_test
async def test_nothing_is_durable_without_sync(tmp_path):
    async with opened(engine_config(tmp_path, **{"ssd.sync": False})) as engine:
        ns = engine.open_namespace(NS)
        with pytest.raises(InvalidRequest, match="sync"):
            await engine.put(ns, blocks_of(ns, [1]), Durability.DURABLE)


# inspection


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
