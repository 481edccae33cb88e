"""What the readers of a lease want next is on its way before they ask."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from engine_harness import engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Outcome, Tier

BLOCKS = 64


@asynccontextmanager
async def on_ssd_alone(directory, **settings):
    """An engine with a chain that its SSD alone holds, and a lease of it."""
    async with opened(engine_config(directory, **settings)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(BLOCKS))
        await engine.put(ns, blocks)
        await engine.flush()
        await engine.evict(ns, tier=Tier.DRAM)
        lease = await engine.acquire(ns, keys_of(blocks))
        yield engine, lease.lease_id, blocks
        await engine.release(lease.lease_id)


async def read(engine, lease_id, blocks):
    """Read blocks, check their bytes, and let what was begun ahead come to its end; their tiers."""
    tiers = []
    for block, frames in zip(blocks, await engine.read(lease_id, keys_of(blocks)), strict=True):
        assert frames.outcome is Outcome.HIT
        assert [bytes(section) for section in frames.sections] == block.sections
        tiers.append(frames.tier)
        frames.done()
    engine.check_integrity()
    ends_s = time.monotonic() + 20
    await asyncio.sleep(0)
    while len(engine._core.promotion):
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.001)
    engine.check_integrity()
    return tiers


def loaded(engine):
    return engine.stat().counters["promoted_blocks"]


@engine_test
async def test_twice_what_was_read_in_a_row_is_on_its_way(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        await read(engine, lease, blocks[:4])
        assert loaded(engine) == 4 + 8
        # nothing new before half of that was asked for
        await read(engine, lease, blocks[4:5])
        assert loaded(engine) == 12
        await read(engine, lease, blocks[5:9])
        assert loaded(engine) == 9 + 18
        assert engine.stat().counters["read_ahead_blocks"] == 23


@engine_test
async def test_its_first_reader_read_it_from_ssd_whoever_began(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        for at in range(0, BLOCKS, 8):
            assert set(await read(engine, lease, blocks[at : at + 8])) == {Tier.SSD}
        assert loaded(engine) == BLOCKS
        assert engine.stat().counters["read_ssd_blocks"] == BLOCKS
        for at in range(0, BLOCKS, 8):
            assert engine.gather(lease, keys_of(blocks[at : at + 8])) is not None
            assert set(await read(engine, lease, blocks[at : at + 8])) == {Tier.DRAM}


@engine_test
async def test_what_came_ahead_is_not_handed_out_as_if_dram_had_held_it(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        await read(engine, lease, blocks[:4])
        assert engine.gather(lease, keys_of(blocks[4:8])) is None
        assert set(await read(engine, lease, blocks[4:8])) == {Tier.SSD}


@pytest.mark.parametrize("order", [(8, 4, 12, 0), (3, 3, 3), (60, 40, 20)])
@engine_test
async def test_reads_that_jump_are_not_followed(tmp_path, order):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        for at in order:
            await read(engine, lease, blocks[at : at + 2])
        assert loaded(engine) == 2 * len(set(order))


@engine_test
async def test_it_goes_no_further_than_the_lease_and_the_limits(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        await read(engine, lease, blocks[: BLOCKS - 2])
        assert loaded(engine) == BLOCKS
    async with on_ssd_alone(tmp_path / "few", **{"migration.read_ahead_bytes_max": 20480}) as each:
        engine, lease, blocks = each
        await read(engine, lease, blocks[:16])
        assert loaded(engine) == 16 + 5
    async with on_ssd_alone(tmp_path / "off", **{"migration.read_ahead_bytes_max": 0}) as each:
        engine, lease, blocks = each
        await read(engine, lease, blocks[:16])
        assert loaded(engine) == 16
    async with on_ssd_alone(tmp_path / "tight", **{"dram.budget_bytes": 24 * 4096}) as each:
        engine, lease, blocks = each
        await read(engine, lease, blocks[:16])
        assert loaded(engine) == 16 + 3


@engine_test
async def test_readers_beside_each_other_share_what_comes(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, _, blocks):
        ns, keys = engine.open_namespace(NS), keys_of(blocks)
        found = await asyncio.gather(*(read_all(engine, ns, keys, step) for step in (3, 5, 8, 16)))
        assert all(each == [block.sections for block in blocks] for each in found)
        assert loaded(engine) == BLOCKS


@engine_test
async def test_a_guess_takes_no_memory_from_who_waits(tmp_path):
    limit = {"migration.load_bytes_max": 8 * 4096}
    async with on_ssd_alone(tmp_path, **limit) as (engine, lease, blocks):
        # these take all that may be under way at a time
        await read(engine, lease, blocks[:8])
        assert loaded(engine) == 8
        for at in range(8, BLOCKS, 4):
            await read(engine, lease, blocks[at : at + 4])
        assert loaded(engine) == BLOCKS
        assert engine.stat().counters["bounced_blocks"] == 0


@engine_test
async def test_a_flipped_byte_ahead_is_a_counted_miss(tmp_path):
    async with on_ssd_alone(tmp_path) as (engine, lease, blocks):
        core = engine._core
        place = core.residency.location_of(core.index.find(blocks[5].key))
        path = tmp_path / "segments" / f"{place.segment:08d}.seg"
        with path.open("r+b") as file:
            file.seek(place.offset + 700)
            byte = file.read(1)
            file.seek(place.offset + 700)
            file.write(bytes([byte[0] ^ 0x40]))
        await read(engine, lease, blocks[:4])
        assert engine.stat().counters["corrupt_ssd_blocks"] == 1
        (frames,) = await engine.read(lease, [blocks[5].key])
        assert frames.outcome is Outcome.MISS
        frames.done()
        await read(engine, lease, blocks[6:10])
