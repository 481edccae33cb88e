"""The guaranteed lifetime on SSD: young blocks stay, new ones are refused and counted."""

import asyncio
from functools import partial
from pathlib import Path
from random import Random

import pytest
from engine_harness import engine_config, opened, read_all
from store_harness import HandDrivenStore, store_config
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import Durability, PutOutcome, Tier
from kvstore.clock import SteadyClock
from kvstore.config import SsdConfig
from kvstore.errors import DiskError
from kvstore.store import inspect
from kvstore.testing.blocks import chain as chain_of
from kvstore.testing.blocks import tiny_namespace
from kvstore.testing.clock import ManualClock, run_simulated
from kvstore.testing.disk import SimDisk
from kvstore.testing.workers import SimulatedWorkers
from kvstore.tiers.ssd import SsdTier

STORED = PutOutcome.STORED
LIFE_S = 600.0
TIGHT = {
    "dram.budget_bytes": "64KiB",
    "ssd.segment_bytes": "64KiB",
    "ssd.budget_bytes": "1MiB",
    "ssd.lifetime_min_s": LIFE_S,
    # one that lets everything in
    "eviction.policy": "lru",
}
"""16 blocks of DRAM, and an SSD of about 190."""


def tight(**settings) -> tuple[HandDrivenStore, bytes]:
    store = HandDrivenStore(store_config(**TIGHT | settings))
    return store, store.core.open_namespace(NS)


def turn(store: HandDrivenStore) -> None:
    """What the log does within a while."""
    for _ in range(50):
        store.clock.advance(1.0)
        if not store.log_turn():
            break
    store.core.check_integrity()


def fill(store: HandDrivenStore, ns: bytes, start: int = 0) -> list[bytes]:
    """Single blocks until the SSD takes no more; their keys, in order, the refused ones last."""
    keys = []
    for n in range(start, start + 400):
        (block,) = blocks_of(ns, [n])
        assert store.put(ns, [block]) == [STORED]
        keys.append(block.key)
        store.flush()
        if store.metrics.counts["refused_ssd_blocks"]:
            return keys
        store.clock.advance(0.01)
    raise AssertionError("it was never full")


def on_ssd(store: HandDrivenStore, keys: list[bytes]) -> int:
    return sum(bool(store.residency(key) & Tier.SSD) for key in keys)


def test_the_default_is_three_days():
    assert SsdConfig().lifetime_min_s == 72 * 3600


def test_young_blocks_stay_and_new_ones_are_refused_and_counted():
    store, ns = tight(**{"ssd.lifetime_min_s": 1e5})
    keys = fill(store, ns)
    assert on_ssd(store, keys[:-1]) == len(keys) - 1 > 150
    counts = store.metrics.counts
    assert (counts["refused_ssd_blocks"], counts["evicted_ssd_blocks"]) == (1, 0)
    assert not store.core.lane.degraded
    for n in range(1000, 1040):
        assert store.put(ns, blocks_of(ns, [n])) == [STORED]
        turn(store)
    assert counts["refused_ssd_blocks"] == 41
    assert on_ssd(store, keys[:-1]) == len(keys) - 1
    assert counts["evicted_ssd_blocks"] == 0
    assert counts["evicted_dram_blocks"] > 20
    assert store.core.lifetime.evicted_age_s_min is None


def test_once_old_enough_they_go_and_the_age_of_the_youngest_is_kept():
    store, ns = tight()
    keys = fill(store, ns)
    store.clock.advance(LIFE_S)
    turn(store)
    assert store.residency(keys[-1]) & Tier.SSD
    lived_s = store.core.lifetime.evicted_age_s_min
    assert LIFE_S <= lived_s < LIFE_S + 100
    gone = store.metrics.counts["evicted_ssd_blocks"]
    assert gone > 0
    store.clock.advance(LIFE_S)
    assert store.put(ns, blocks_of(ns, range(5000, 5012))) == [STORED] * 12
    turn(store)
    assert store.core.lifetime.evicted_age_s_min <= lived_s


def test_an_old_parent_stays_under_a_young_child_and_an_old_leaf_goes():
    store, ns = tight()
    parent, child = blocks_of(ns, [1, 2])
    leaf = blocks_of(ns, [3])[0]
    for block in (parent, leaf):
        store.put(ns, [block])
    store.flush()
    store.clock.advance(2 * LIFE_S)
    store.put(ns, [child])
    keys = fill(store, ns, start=100)
    assert store.residency(leaf.key) is Tier.NONE
    assert all(store.residency(b.key) & Tier.SSD for b in (parent, child))
    assert on_ssd(store, keys) >= len(keys) - 1
    assert store.metrics.counts["evicted_ssd_blocks"] == 1


def test_an_old_block_goes_before_a_colder_young_one():
    store, ns = tight()
    (old,) = blocks_of(ns, [3])
    store.put(ns, [old])
    store.flush()
    store.clock.advance(2 * LIFE_S)
    young = blocks_of(ns, [4])
    store.put(ns, young)
    store.flush()
    lease, _, _ = store.core.acquire(ns, [old.key], store.now, None)
    store.core.release(lease)
    keys = fill(store, ns, start=100)
    assert store.residency(old.key) is Tier.NONE
    assert on_ssd(store, [young[0].key, *keys]) >= len(keys)
    assert store.metrics.counts["evicted_ssd_blocks"] == 1


def test_a_request_to_evict_is_obeyed_and_makes_room():
    store, ns = tight()
    keys = fill(store, ns)
    assert store.core.evict(ns, keys[:60], None) == 60
    turn(store)
    assert store.residency(keys[-1]) & Tier.SSD
    assert store.core.residency.log_refuses is False
    assert store.metrics.counts["refused_ssd_blocks"] == 1
    assert store.core.lifetime.evicted_age_s_min is None


def ssd_of(store: HandDrivenStore):
    return inspect.stat(store.core, store.clock.wall_s()).tiers[-1]


@pytest.mark.parametrize("how", ["all", "some", "time"])
def test_stat_says_why_the_ssd_refuses_and_until_when(how):
    store, ns = tight()
    assert ssd_of(store).accepting
    keys = fill(store, ns)
    refusing = ssd_of(store)
    assert not refusing.accepting
    assert refusing.refuses_why == "all is younger than ssd.lifetime_min_s"
    if how == "time":
        store.clock.advance(LIFE_S)
    else:
        store.core.evict(ns, None if how == "all" else keys[:9], None)
    assert ssd_of(store).accepting
    assert ssd_of(store).refuses_why == ""


def test_the_index_limit_does_not_cost_young_blocks_their_place():
    store, ns = tight(**{"limits.index_blocks_max": 20})
    blocks = [blocks_of(ns, [n])[0] for n in range(24)]
    outcomes = []
    for block in blocks:
        outcomes += store.put(ns, [block])
        store.flush()
    assert outcomes == [STORED] * 20 + [PutOutcome.NO_SPACE] * 4
    store.clock.advance(LIFE_S)
    assert store.put(ns, [blocks[20]]) == [STORED]
    assert store.core.lifetime.evicted_age_s_min >= LIFE_S


def test_without_a_lifetime_any_may_go():
    store, ns = tight(**{"ssd.lifetime_min_s": 0})
    for n in range(400):
        store.put(ns, blocks_of(ns, [n]))
        store.flush()
    assert store.metrics.counts["refused_ssd_blocks"] == 0
    assert store.metrics.counts["evicted_ssd_blocks"] > 100
    assert store.core.lifetime.evicted_age_s_min < 1.0


# through the engine, over restarts


class MovedClock(ManualClock):
    """A machine whose calendar somebody sets."""

    def __init__(self, wall_s: float) -> None:
        super().__init__(wall_s)
        self.moved_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.moved_s


def on_disk(disk: SimDisk, clock: ManualClock):
    open_log = partial(SsdTier.open, files=disk, open_index=disk.open_index)
    config = engine_config(Path("/store"), **TIGHT)
    return opened(config, clock, open_log=open_log, workers=SimulatedWorkers(Random(1)))


def test_the_steady_clock_follows_no_setting_of_the_calendar():
    clock = MovedClock(1000.0)
    steady = SteadyClock(clock)
    assert (steady.wall_s(), steady.monotonic_s()) == (1000.0, 0.0)
    clock.moved_s = -500.0
    clock.advance(7.0)
    assert steady.wall_s() == 1007.0
    assert SteadyClock(clock, not_before_s=2000.0).wall_s() == 2000.0
    assert SteadyClock(clock, not_before_s=100.0).wall_s() == 507.0


@pytest.mark.parametrize("set_back_s", [0.0, 10 * 365 * 86400.0, -100.0])
def test_ages_survive_restarts_and_a_calendar_that_is_set_back(set_back_s):
    disk, clock = SimDisk(), MovedClock(1.8e9)

    async def fill_up(ns, engine, start: int) -> int:
        """How many blocks the SSD took before it refused one."""
        refused = engine.stat().counters["refused_ssd_blocks"]
        for n in range(start, start + 400):
            (block,) = chain_of(ns, tiny_namespace().layout, [n])
            if engine.stat().counters["refused_ssd_blocks"] == refused:
                await engine.put(ns, [block])
                await asyncio.sleep(0.1)
                continue
            with pytest.raises(DiskError, match=r"younger than ssd\.lifetime_min_s"):
                await engine.put(ns, [block], Durability.DURABLE)
            return n - start - 1
        raise AssertionError("it was never full")

    async def run() -> None:
        async with on_disk(disk, clock) as engine:
            ns = engine.open_namespace(NS)
            began = clock.monotonic_s()
            taken = await fill_up(ns, engine, 0)
            assert taken > 150
            assert clock.monotonic_s() - began < 60, "a refusal was waited for"
            with pytest.raises(DiskError, match="were not taken by the ssd"):
                await engine.flush()
            stat = engine.stat()
            assert not stat.tiers[1].accepting
            assert stat.counters["refused_ssd_blocks"] == 2
            assert stat.evicted_ssd_age_s_min is None
            await asyncio.sleep(0.4 * LIFE_S)
        clock.moved_s = -set_back_s
        async with on_disk(disk, clock) as engine:
            ns = engine.open_namespace(NS)
            assert await fill_up(ns, engine, 1000) == 0
            keys = [chain_of(ns, tiny_namespace().layout, [n])[0].key for n in range(taken)]
            assert sum(engine.match(ns, [key]).hit_blocks for key in keys) == taken
            # time while it is stopped counts only as far as the calendar can be trusted
            await asyncio.sleep(LIFE_S)
            await engine.put(ns, blocks_of(ns, range(3000, 3004)), Durability.DURABLE)
            stat = engine.stat()
            assert stat.evicted_ssd_age_s_min >= LIFE_S
            assert stat.tiers[1].accepting
            found = await read_all(engine, ns, keys_of(blocks_of(ns, range(3000, 3004))))
            assert None not in found

    run_simulated(clock, run())
