"""The engine over real tiers: how it opens, closes, and does without a disk."""

import asyncio
import threading

import pytest
from engine_harness import engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Durability, PutOutcome, Tier
from kvstore.errors import (
    ConfigError,
    DiskError,
    InvalidRequest,
    StoreLocked,
    Unavailable,
    UnknownNamespace,
)
from kvstore.store import Engine

STORED = PutOutcome.STORED


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
