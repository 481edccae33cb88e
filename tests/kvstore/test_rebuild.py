"""An index that is lost is rebuilt from the frames: with news of how far it is, and not against a
stop."""

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from engine_harness import engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Tier
from kvstore.config import DaemonConfig, build_config
from kvstore.errors import StoreLocked, Unavailable
from kvstore.server.daemon import Daemon
from kvstore.store import Engine
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import OsFileSystem

SMALL = {"ssd.segment_bytes": "64KiB"}


class SlowFiles(OsFileSystem):
    """Every read takes its time."""

    def __init__(self, began: threading.Event | None = None) -> None:
        super().__init__()
        self._began = began

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._began is not None:
            self._began.set()
        time.sleep(0.03)
        return super().preadv(handle, buffers, offset)


async def store_without_index(directory: Path, blocks: int) -> list:
    async with opened(engine_config(directory, **SMALL)) as engine:
        ns = engine.open_namespace(NS)
        stored = blocks_of(ns, range(blocks))
        await engine.put(ns, stored)
    shutil.rmtree(directory / "index.lmdb")
    return stored


async def all_there(directory: Path, stored: list) -> None:
    async with opened(engine_config(directory, **SMALL)) as engine:
        ns = engine.open_namespace(NS)
        assert await read_all(engine, ns, keys_of(stored)) == [b.sections for b in stored]


@engine_test
async def test_it_says_how_far_it_is(tmp_path, caplog):
    stored = await store_without_index(tmp_path, 100)
    caplog.set_level(logging.INFO)
    await all_there(tmp_path, stored)
    assert "rebuilding the index from 7 segments" in caplog.text
    assert "rebuilding the index: 7 of 7 segments, 100 frames" in caplog.text


def test_a_stop_ends_it_and_the_next_start_begins_anew(tmp_path):
    stored = asyncio.run(store_without_index(tmp_path, 60))
    stop, config = threading.Event(), engine_config(tmp_path, **SMALL).ssd
    stop.set()
    with pytest.raises(Unavailable, match="the next one begins anew"):
        SsdTier.open(tmp_path, config, stop=stop)
    assert not (tmp_path / "index.lmdb").exists()
    asyncio.run(all_there(tmp_path, stored))


@engine_test
async def test_an_engine_whose_opening_is_cancelled_lets_go(tmp_path):
    stored = await store_without_index(tmp_path, 300)
    began = threading.Event()
    open_log = partial(SsdTier.open, files=SlowFiles(began))
    opening = asyncio.create_task(Engine.open(engine_config(tmp_path, **SMALL), open_log=open_log))
    assert await asyncio.to_thread(began.wait, 30.0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    ends_s = time.monotonic() + 30.0
    while True:
        try:
            await all_there(tmp_path, stored)
            break
        except StoreLocked:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.05)


@engine_test
async def test_a_daemon_told_to_stop_does_not_finish_it_first(tmp_path, monkeypatch):
    await store_without_index(tmp_path / "store", 300)
    began = threading.Event()
    open_log = partial(SsdTier.open, files=SlowFiles(began))
    monkeypatch.setattr(Engine, "open", partial(Engine.open, open_log=open_log))
    given = {"dir": tmp_path / "store", "server.listen": f"unix://{tmp_path}/kv.sock", **SMALL}
    daemon = Daemon(build_config(DaemonConfig, {}, given))
    running = asyncio.create_task(daemon.run())
    assert await asyncio.to_thread(began.wait, 30.0)
    daemon.stop()
    await asyncio.wait_for(running, 5.0)
    assert not (tmp_path / "store" / "index.lmdb").exists()


@engine_test
async def test_blocks_of_an_unknown_layout_have_a_size_all_the_same(tmp_path):
    stored = await store_without_index(tmp_path, 20)
    async with opened(engine_config(tmp_path, **SMALL)) as engine:
        report = await engine.verify()
        assert (report.frames[Tier.SSD], report.clean) == (20, True)
        on_ssd = next(t for t in engine.stat().tiers if t.tier is Tier.SSD)
        whole = on_ssd.live_bytes
        assert whole > 0
        assert report.payload_bytes[Tier.SSD] == on_ssd.payload_bytes == whole
        assert sum(b.payload_bytes for b in engine.ls(None, 100)) == whole
        engine.open_namespace(NS)
        sections = sum(len(s) for b in stored for s in b.sections)
        assert (await engine.verify()).payload_bytes[Tier.SSD] == sections < whole
