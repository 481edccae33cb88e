"""The engine where things go wrong: wrong bytes, full and failing and hanging disks, churn."""

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from engine_harness import disk_bytes, engine_config, engine_test, opened, read_all
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Durability, Outcome, PutOutcome, Tier
from kvstore.errors import DiskError
from kvstore.namespace import Layout
from kvstore.store import Engine
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace
from kvstore.testing.disk import SimDisk, no_fault
from kvstore.tiers.ssd import SsdTier

STORED = PutOutcome.STORED
BYTES_THAT_MATTER = (3, 200, 511, 512, 1500, 2600)
"""In magic, header, header checksum, first section, in the middle, in the last section."""


# wrong bytes


def flip_in_dram(engine, key, at):
    core = engine._core
    view = engine._dram.view(core.residency.slot_of(core.index.find(key)))
    view[at] ^= 0x10


def flip_on_ssd(engine, directory, key, at):
    core = engine._core
    place = core.residency.location_of(core.index.find(key))
    with (directory / "segments" / f"{place.segment:08d}.seg").open("r+b") as f:
        f.seek(place.offset + at)
        byte = f.read(1)[0]
        f.seek(place.offset + at)
        f.write(bytes([byte ^ 0x10]))
        os.fsync(f.fileno())


@pytest.mark.parametrize("at", BYTES_THAT_MATTER)
@engine_test
async def test_a_flipped_byte_in_dram_is_a_counted_miss(tmp_path, at, caplog):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        await engine.put(ns, blocks, Durability.DURABLE)
        flip_in_dram(engine, blocks[2].key, at)
        expected = [b.sections for b in blocks]
        expected[2] = None
        assert await read_all(engine, ns, keys_of(blocks)) == expected
        counters = engine.stat().counters
        assert (counters["corrupt_dram_blocks"], counters["read_miss_blocks"]) == (1, 1)
        assert blocks[2].key.hex() in caplog.text
        # the copy on SSD was checked on its own, and serves
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]


@pytest.mark.parametrize("at", BYTES_THAT_MATTER)
@engine_test
async def test_a_flipped_byte_on_ssd_is_a_counted_miss(tmp_path, at, caplog):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        await engine.put(ns, blocks)
    async with opened(config) as engine:
        flip_on_ssd(engine, tmp_path, blocks[2].key, at)
        expected = [b.sections for b in blocks]
        expected[2] = None
        assert await read_all(engine, ns, keys_of(blocks)) == expected
        assert engine.stat().counters["corrupt_ssd_blocks"] == 1
        assert blocks[2].key.hex() in caplog.text
        assert engine.match(ns, keys_of(blocks)).hit_blocks == 2
        # written again, the whole chain is back
        again = blocks_of(ns, range(3), writer=1, start=2)
        assert await engine.put(ns, again, Durability.DURABLE) == [STORED]
        expected[2] = again[0].sections
        assert await read_all(engine, ns, keys_of(blocks)) == expected
    async with opened(config) as engine:
        assert await read_all(engine, ns, keys_of(blocks)) == expected


@engine_test
async def test_verify_finds_all_of_it(tmp_path):
    config = engine_config(tmp_path)
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(30))
        await engine.put(ns, blocks, Durability.DURABLE)
        told = []
        report = await engine.verify(lambda done, total: told.append((done, total)))
        assert report.clean
        assert report.frames == {Tier.DRAM: 30, Tier.SSD: 30}
        assert report.payload_bytes[Tier.SSD] == 30 * TINY_LAYOUT.block_bytes
        assert told[-1] == (60, 60)
        flip_in_dram(engine, blocks[5].key, 900)
        for i in (7, 29):
            flip_on_ssd(engine, tmp_path, blocks[i].key, 900)
        report = await engine.verify()
        assert not report.clean
        assert set(report.corrupt) == {blocks[i].key for i in (5, 7, 29)}
        # what was right in the other tier is written again or serves on
        await engine.flush()
        assert (await engine.verify()).clean
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]


@engine_test
async def test_a_client_that_got_wrong_bytes_reports_them(tmp_path):
    async with opened(engine_config(tmp_path)) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(2))
        await engine.put(ns, blocks)
        lease = await engine.acquire(ns, keys_of(blocks))
        flip_in_dram(engine, blocks[1].key, 900)
        unchecked = await engine.read(lease.lease_id, keys_of(blocks), verify=False)
        assert [f.outcome for f in unchecked] == [Outcome.HIT] * 2
        assert bytes(unchecked[1].sections[0]) != blocks[1].sections[0]
        for frames in unchecked:
            frames.done()
        for block in blocks:
            await engine.report_corrupt(ns, block.key)
        await engine.report_corrupt(ns, b"x" * 32)
        counters = engine.stat().counters
        assert counters["corrupt_reported_blocks"] == 3
        assert counters["corrupt_dram_blocks"] == 1
        await engine.flush()
        assert engine.match(ns, keys_of(blocks)).hit_blocks == 1


# budgets


class Watch:
    """Looks at a directory's real size all the time."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stop = directory, threading.Event()
        self.most = self.looks = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, disk_bytes(self._directory))
            self.looks += 1
            time.sleep(0.001)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


@engine_test
async def test_budgets_hold_under_churn(tmp_path, seed):
    layout = Layout(TINY_LAYOUT.sections, 64)
    settings = {
        "dram.budget_bytes": "512KiB",
        "ssd.budget_bytes": "4MiB",
        "ssd.segment_bytes": "256KiB",
        # one that lets everything in
        "eviction.policy": "lru",
    }
    config = engine_config(tmp_path, **settings)
    with Watch(tmp_path) as watch:
        for run in range(2):
            async with opened(config) as engine:
                ns = engine.open_namespace(tiny_namespace(layout=layout))
                for n in range(24):
                    tokens = [1000 * run + n // 3, n, *range(8)]
                    outcomes = await engine.put(ns, chain(ns, layout, tokens))
                    assert {STORED} <= set(outcomes) <= {STORED, PutOutcome.PRESENT}
                    stat = engine.stat()
                    for tier in stat.tiers:
                        assert tier.used_bytes <= tier.budget_bytes
                await engine.flush()
                stat = engine.stat()
                assert stat.counters["evicted_ssd_blocks"] > 100
                assert stat.counters["segments_reclaimed"] > 5
                assert stat.counters["disk_errors"] == 0
                assert stat.tiers[1].used_bytes == disk_bytes(tmp_path)
                assert stat.tiers[1].used_bytes > 2 << 20
                assert (await engine.verify()).clean
    assert watch.looks > 20
    assert watch.most <= 4 << 20


# disks


@asynccontextmanager
async def on_disk(disk, **settings):
    """An engine on a simulated disk, with real threads."""
    quick = {
        "limits.disk_wait_s_max": 0.3,
        "limits.drain_s_max": 3.0,
        "limits.room_wait_s_max": 0.3,
        "limits.upkeep_s": 0.02,
        "migration.retry_s_min": 0.05,
        "migration.retry_s_max": 0.1,
    }
    config = engine_config(Path("/store"), **quick | settings)
    open_log = partial(SsdTier.open, files=disk, open_index=disk.open_index)
    async with opened(config, open_log=open_log) as engine:
        yield engine


class Hang:
    """A disk operation that does not come back until it is let go."""

    def __init__(self, what: str) -> None:
        self._what, self._free = what, threading.Event()

    def __call__(self, what: str, path: Path) -> None:
        if what == self._what:
            assert self._free.wait(60)

    def let_go(self) -> None:
        self._free.set()


async def until(true, wait_s=20.0):
    deadline = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


@engine_test
async def test_a_read_that_hangs_is_a_miss_in_time():
    disk = SimDisk()
    async with on_disk(disk) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(6))
        await engine.put(ns, blocks, Durability.DURABLE)
        await engine.evict(ns, keys_of(blocks[3:]), Tier.DRAM)
        disk.before = hang = Hang("preadv")
        began = time.monotonic()
        expected = [b.sections for b in blocks]
        assert await read_all(engine, ns, keys_of(blocks)) == expected[:3] + [None] * 3
        assert time.monotonic() - began < 20
        # DRAM serves and accepts as ever
        more = blocks_of(ns, range(100, 105))
        assert await engine.put(ns, more) == [STORED] * 5
        assert await read_all(engine, ns, keys_of(more)) == [b.sections for b in more]
        disk.before = no_fault
        hang.let_go()
        await until(lambda: not len(engine._core.promotion))
        assert await read_all(engine, ns, keys_of(blocks)) == expected


@engine_test
async def test_a_write_that_hangs_costs_its_deadline():
    disk = SimDisk()
    async with on_disk(disk) as engine:
        ns = engine.open_namespace(NS)
        await engine.put(ns, blocks_of(ns, range(3)), Durability.DURABLE)
        disk.before = hang = Hang("fdatasync")
        blocks = blocks_of(ns, range(100, 105))
        with pytest.raises(DiskError, match="5 blocks were not durable"):
            await engine.put(ns, blocks, Durability.DURABLE)
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        disk.before = no_fault
        hang.let_go()
        await engine.flush()
        assert engine.match(ns, keys_of(blocks)).residency[4] == Tier.DRAM | Tier.SSD


@pytest.mark.parametrize("what", ["pwrite", "fdatasync", "commit"])
@engine_test
async def test_a_disk_that_fails_degrades_and_recovers(what):
    disk = SimDisk()
    async with on_disk(disk, **{"dram.budget_bytes": "128KiB"}) as engine:
        ns = engine.open_namespace(NS)
        old = blocks_of(ns, range(10))
        await engine.put(ns, old, Durability.DURABLE)
        await engine.evict(tier=Tier.DRAM)

        def before(op, path):
            if op == what:
                raise OSError(5, "Input/output error")

        disk.before = before
        if what == "commit":
            # durable frames need no index to survive; what comes behind a failed commit is told
            await engine.put(ns, blocks_of(ns, range(50, 53)), Durability.DURABLE)
        with pytest.raises(DiskError):
            await engine.put(ns, blocks_of(ns, range(100, 103)), Durability.DURABLE)
        assert not engine.stat().tiers[1].accepting
        # reads go on, and DRAM takes far more than it holds, forgetting the oldest
        assert await read_all(engine, ns, keys_of(old)) == [b.sections for b in old]
        for n in range(2, 12):
            blocks = blocks_of(ns, range(100 * n, 100 * n + 8))
            assert await engine.put(ns, blocks) == [STORED] * 8
            assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        assert engine.stat().counters["disk_errors"] >= 1
        disk.before = no_fault
        await until(lambda: engine.stat().tiers[1].accepting)
        await engine.flush()
        assert engine.match(ns, keys_of(blocks)).residency[7] & Tier.SSD
        assert (await engine.verify()).clean


@engine_test
async def test_a_disk_that_can_not_read_gives_misses():
    disk = SimDisk()
    async with on_disk(disk) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        await engine.put(ns, blocks, Durability.DURABLE)
        await engine.evict(tier=Tier.DRAM)

        def before(op, path):
            if op == "preadv":
                raise OSError(5, "Input/output error")

        disk.before = before
        assert await read_all(engine, ns, keys_of(blocks)) == [None] * 4
        report = await engine.verify()
        assert (report.unreadable, report.corrupt) == (4, ())
        assert engine.stat().counters["disk_errors"] == 4
        disk.before = no_fault
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]


@engine_test
async def test_a_disk_that_is_full_sheds_writes_until_there_is_room():
    disk = SimDisk()
    async with on_disk(disk) as engine:
        ns = engine.open_namespace(NS)
        await engine.put(ns, blocks_of(ns, range(5)), Durability.DURABLE)
        disk.capacity_bytes = 0
        blocks = blocks_of(ns, range(100, 120))
        with pytest.raises(DiskError):
            await engine.put(ns, blocks, Durability.DURABLE)
        assert await read_all(engine, ns, keys_of(blocks)) == [b.sections for b in blocks]
        disk.capacity_bytes = 1 << 40
        await until(lambda: not engine.stat().dirty_blocks)
        assert (await engine.verify()).clean


@engine_test
async def test_verify_does_not_wait_for_ever():
    disk = SimDisk()
    async with on_disk(disk) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        await engine.put(ns, blocks, Durability.DURABLE)
        disk.before = hang = Hang("preadv")
        report = await engine.verify()
        assert (report.unreadable, report.frames[Tier.DRAM]) == (4, 4)
        await engine.report_corrupt(ns, blocks[0].key)
        disk.before = no_fault
        hang.let_go()
        await until(lambda: not len(engine._core.promotion))
        assert (await engine.verify()).clean


@pytest.mark.parametrize("what", ["fdatasync", "commit"])
@engine_test
async def test_closing_does_not_wait_for_ever(what):
    disk = SimDisk()
    hang = Hang(what)
    began = time.monotonic()
    async with on_disk(disk, **{"limits.drain_s_max": 0.3}) as engine:
        ns = engine.open_namespace(NS)
        await engine.put(ns, blocks_of(ns, range(4)), Durability.DURABLE)
        disk.before = hang
        await engine.put(ns, blocks_of(ns, range(100, 104)))
    assert time.monotonic() - began < 20
    hang.let_go()


@engine_test
async def test_closing_does_not_wait_for_a_disk_that_fails():
    disk = SimDisk()
    began = time.monotonic()
    async with on_disk(disk, **{"limits.drain_s_max": 50.0}) as engine:
        ns = engine.open_namespace(NS)
        disk.before = partial(_fail, "pwrite")
        await engine.put(ns, blocks_of(ns, range(5)))
        await until(lambda: not engine.stat().tiers[1].accepting)
    assert time.monotonic() - began < 40


def _fail(what, op, path):
    if op == what:
        raise OSError(5, "Input/output error")


@engine_test
async def test_closing_ends_with_the_jobs_of_the_log_whatever_they_changed(tmp_path):
    config = engine_config(tmp_path, **{"limits.drain_s_max": 600.0})
    engine = await Engine.open(config)
    ns = engine.open_namespace(NS)
    await engine.put(ns, blocks_of(ns, range(4)), Durability.DURABLE)
    refreshing, go_on = threading.Event(), threading.Event()
    refresh = engine._ssd.refresh

    def slow_refresh():
        refreshing.set()
        assert go_on.wait(60.0)
        refresh()

    engine._ssd.refresh = slow_refresh
    # as after a batch that failed: the log looks around, and nothing comes of it
    engine._core.lane._given_up = True
    engine._driver.pump()
    assert await asyncio.to_thread(refreshing.wait, 60.0)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    go_on.set()
    await asyncio.wait_for(closing, 60.0)
