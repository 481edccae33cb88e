"""Runs of `store_world` from seeds, and the proof that they would notice."""

import logging
from random import Random

import pytest
from store_world import World

from kvstore.block import Tier
from kvstore.migration.residency import Residency
from kvstore.store import loads
from kvstore.testing.clock import ManualClock, Stuck, run_simulated
from kvstore.tiers.hbm.simulated import SimulatedEvent

QUICK_RUNS, LONG_RUNS = 6, 400


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("kvstore").setLevel(logging.CRITICAL + 1)
    yield
    logging.getLogger("kvstore").setLevel(logging.NOTSET)


def run_seed(seed: int, **size) -> World:
    try:
        return World(seed, **size).run()
    except BaseException as e:
        e.add_note(f"rerun: pytest tests/simulation -k one_seed --seed {seed}")
        raise


def run_many(random: Random, runs: int) -> None:
    for _ in range(runs):
        World(random.randrange(1 << 32)).run()


def test_one_seed(seed):
    world = run_seed(seed)
    assert world.counts["read"] > 20
    assert world.counts["put"] > 20


def test_many_seeds(seed, long):
    random, total = Random(seed), None
    for _ in range(LONG_RUNS if long else QUICK_RUNS):
        world = run_seed(random.randrange(1 << 32))
        total = world.counts + (total or world.counts)
    # the runs went where it matters
    for what in ("power loss", "closed", "fault", "refused", "survivors", "commit", "evicted"):
        assert total[what], f"no run saw: {what}"
    for what in ("promoted to hbm", "left hbm", "copied back"):
        assert total[what], f"no run saw: {what}"


def test_the_same_seed_is_the_same_run(seed):
    one, two = run_seed(seed), run_seed(seed)
    assert one.trace.digest() == two.trace.digest()
    assert run_seed(seed + 1).trace.digest() != one.trace.digest()


def durable_too_early(self, row, slot, enter=Residency.enter_dram):
    enter(self, row, slot)
    self.tickets.durable(row)
    if self.dirty.pop(row, 0) is None:
        self.dirty_bytes -= slot.length


BREAKAGES = {
    "slots are taken from their readers": (
        (Residency, "may_leave_dram", lambda self, row: bool(self.index.tiers[row] & Tier.SSD)),
        (Residency, "free_slot", lambda self, slot: self.dram.free(slot)),
    ),
    "durable is said too early": ((Residency, "enter_dram", durable_too_early),),
    "what comes from the disk is not looked at": (
        (
            loads,
            "read_loads",
            lambda ssd, wanted, frames: (
                [loads.Loaded(load, f, None) for load, f in zip(wanted, frames, strict=True)],
                0.0,
            ),
        ),
    ),
    "a copy into hbm is done before it is done": (
        (SimulatedEvent, "wait", lambda self, timeout_s: True),
    ),
    "leases do not pin": ((Residency, "is_free", lambda self, row: not self.index.children[row]),),
}


@pytest.mark.parametrize(
    "what", [*list(BREAKAGES)[:4], pytest.param("leases do not pin", marks=pytest.mark.long)]
)
def test_a_broken_store_is_noticed(what, seed, monkeypatch):
    for breakage in BREAKAGES[what]:
        monkeypatch.setattr(*breakage)
    with pytest.raises(AssertionError):
        run_many(Random(seed), 40)


def test_a_hang_is_an_error_and_not_a_hang():
    async def forever():
        import asyncio

        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        run_simulated(ManualClock(), forever())
