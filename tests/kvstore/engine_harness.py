"""Engines over real tiers, for tests that are coroutines."""

import asyncio
import functools
import time
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.block import Outcome
from kvstore.config import StoreConfig, build_config
from kvstore.store import Engine


def engine_test(test):
    """Run a coroutine test on a loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def engine_config(directory: Path | None, **settings) -> StoreConfig:
    given = {
        "dir": directory,
        "dram": {"budget_bytes": "1MiB"},
        "ssd": {
            "budget_bytes": "64MiB",
            "segment_bytes": "1MiB",
            "free_floor_bytes": 0,
            "lifetime_min_s": 0,
        },
    }
    return build_config(StoreConfig, given, settings)


@asynccontextmanager
async def opened(config: StoreConfig, clock=None, **how):
    engine = await Engine.open(config, clock, **how)
    try:
        yield engine
        engine.check_integrity()
    finally:
        await engine.close()


async def read_all(engine, namespace_id, keys, step=16):
    """Sections per key, or None for a miss; through one lease, in steps."""
    lease = await engine.acquire(namespace_id, keys)
    found = []
    for at in range(0, len(keys), step):
        for frames in await engine.read(lease.lease_id, keys[at : at + step]):
            hit = frames.outcome is Outcome.HIT
            found.append([bytes(s) for s in frames.sections] if hit else None)
            frames.done()
    await engine.release(lease.lease_id)
    return found


def disk_bytes(directory: Path) -> int:
    """Real bytes of a directory and all in it, as `du` counts them."""
    total = 0
    for path in (directory, *directory.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


async def true_size(engine, directory):
    """Wait until the store reports what the disk shows: the index is written beside the call, and
    counts when it is."""
    ends_s = time.monotonic() + 20.0
    while engine.stat().tiers[1].used_bytes != disk_bytes(directory):
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.01)
