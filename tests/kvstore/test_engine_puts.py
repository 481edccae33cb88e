"""The engine over real tiers: what goes in comes out, whichever way it was put."""

import asyncio

import numpy as np
import pytest
import xxhash
from engine_harness import engine_config, engine_test, opened, read_all, true_size
from tiny_blocks import NS, blocks_of, keys_of, names_of

from kvstore.block import BlockPut, Durability, Outcome, PutOutcome, Tier
from kvstore.errors import InvalidRequest, ReservationExpired, WrongSectionSize
from kvstore.migration.workers import Lane
from kvstore.namespace import DS41F_LAYOUT, Namespace
from kvstore.testing.clock import ManualClock

STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


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


class HeldWorkers:
    """Copies begin once `go` is set; then `wrong` is raised where it is given."""

    def __init__(self, wrong=None):
        self.go, self.wrong = asyncio.Event(), wrong

    async def run(self, lane, work):
        if lane is Lane.BYTES:
            await self.go.wait()
            if self.wrong is not None:
                raise self.wrong
        return work()

    def close(self):
        pass


async def put_written(engine, ns, blocks):
    """Reserve and write, one call after another."""
    grant = await engine.reserve(ns, names_of(blocks))
    for block in blocks:
        await engine.write(grant.reservation_id, block.key, block.sections)


@pytest.mark.parametrize("how", ["put", "write"])
@engine_test
async def test_a_slot_is_in_use_until_its_copy_is_over_whoever_has_gone(how):
    workers = HeldWorkers()
    async with opened(engine_config(None), workers=workers, first_id=1) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        work = engine.put(ns, blocks) if how == "put" else put_written(engine, ns, blocks)
        task = asyncio.create_task(work)
        while not engine._core.residency.slots_in_use:
            await asyncio.sleep(0)
        used = engine._core.residency.slots_in_use
        task.cancel()
        await asyncio.wait([task])
        await engine.abort(1)
        assert task.cancelled()
        assert engine._core.residency.slots_in_use == used
        assert engine.stat().tiers[0].used_bytes
        engine.check_integrity()
        workers.go.set()
        while engine._core.residency.slots_in_use:
            await asyncio.sleep(0)
        assert engine.stat().tiers[0].used_bytes == 0
        engine.check_integrity()
        assert await engine.put(ns, blocks) == [STORED] * 3


@pytest.mark.parametrize("how", ["put", "write"])
@engine_test
async def test_a_copy_that_fails_is_told_and_leaves_nothing(how):
    workers = HeldWorkers(MemoryError("no more"))
    workers.go.set()
    async with opened(engine_config(None), workers=workers, first_id=1) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(3))
        with pytest.raises(MemoryError, match="no more"):
            await (engine.put(ns, blocks) if how == "put" else put_written(engine, ns, blocks))
        await engine.abort(1)
        assert engine.stat().tiers[0].used_bytes == 0
        assert engine._core.residency.slots_in_use == 0
        engine.check_integrity()


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
