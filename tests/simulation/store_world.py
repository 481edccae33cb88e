"""A whole life of a store from one seed: clients, faults, crashes, in simulated time.

Clients run as tasks against the engine; work off the loop takes random simulated time
(`SimulatedWorkers`), so everything that threads could reorder is reordered, and the same seed gives
the same run. The world knows what every writer wrote and what was acknowledged, and checks:

* a read gives the bytes of a writer that was told STORED, or a miss, and a miss only where the
  lease had lapsed or the disk failed;
* what was acknowledged durable is there after a crash, unless it was evicted for room;
* no call outlasts its bound, and none hangs (`Stuck`);
* `check_integrity` holds whenever the loop is idle, and `verify` is clean at the end.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from kvstore.block import Durability, Outcome, PutOutcome, Tier
from kvstore.config import StoreConfig, build_config
from kvstore.errors import DiskError, LeaseExpired, Overloaded, ReservationExpired
from kvstore.eviction import POLICIES
from kvstore.namespace import Layout, Namespace
from kvstore.store import Engine
from kvstore.testing.blocks import TINY_LAYOUT, chain, payload, tiny_namespace
from kvstore.testing.clock import ManualClock, run_simulated
from kvstore.testing.disk import History, SimDisk, no_fault
from kvstore.testing.workers import SimulatedWorkers
from kvstore.tiers.hbm.device import DeviceError
from kvstore.tiers.hbm.opening import open_hbm
from kvstore.tiers.hbm.simulated import SimulatedDevice
from kvstore.tiers.ssd import SsdTier

LAYOUT = Layout(TINY_LAYOUT.sections, 16)
CALL_S_MAX = 60.0
SETTINGS = {
    "dir": Path("/store"),
    "dram": {"budget_bytes": 24 * 12288},
    "hbm": {"devices": (0, 1), "budget_bytes": 6 * 12288, "copy_bytes_max": 4 * 12288},
    "ssd": {
        "budget_bytes": "1MiB",
        "segment_bytes": "128KiB",
        "free_floor_bytes": 0,
        "lifetime_min_s": 0,
    },
    "migration": {"bounce_bytes_max": 8 * 12288, "load_bytes_max": 16 * 12288},
    "limits": {
        "room_wait_s_max": 2.0,
        "disk_wait_s_max": 5.0,
        "drain_s_max": 20.0,
        "upkeep_s": 0.25,
    },
    "lease": {"lease_ttl_s_default": 3.0, "reservation_ttl_s_default": 3.0},
}


@dataclass
class World:
    """One run. `seed` decides all of it."""

    seed: int
    lives: int = 3
    clients: int = 4
    turns: int = 12
    trace: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    counts: Counter = field(default_factory=Counter)
    written: dict[bytes, set[int]] = field(default_factory=dict)
    durable: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.clock = ManualClock()
        self.disk = SimDisk()
        self.unrest = 0
        self._base = deepcopy(self.disk.state)
        self.namespace: Namespace = tiny_namespace(layout=LAYOUT)
        policy = self.random.choice(sorted(POLICIES))
        self.hbm = self.random.random() < 0.6
        how = {"eviction.policy": policy, "hbm.device": "simulated" if self.hbm else "off"}
        self.config = build_config(StoreConfig, SETTINGS, how)
        self.devices: list[SimulatedDevice] = []
        self.counts[policy] += 1

    def run(self) -> "World":
        """All lives, each ended by a stop or a power loss, and a last look at everything."""
        run_simulated(self.clock, self._run())
        return self

    async def _run(self) -> None:
        for _ in range(self.lives):
            await self._life()
        await self._last_look()

    async def _open(self) -> Engine:
        self.devices = [SimulatedDevice(i, stepped=True) for i in self.config.hbm.devices]
        opening = partial(SsdTier.open, files=self.disk, open_index=self.disk.open_index)
        engine = await Engine.open(
            self.config,
            self.clock,
            workers=SimulatedWorkers(Random(self.random.random()), latency_s=0.02),
            open_log=opening,
            open_devices=partial(open_hbm, find=lambda _: list(self.devices)),
            first_id=1 + self.random.randrange(1 << 40),
        )
        self.ns = engine.open_namespace(self.namespace)
        return engine

    def note(self, what: str, detail: object = "") -> None:
        """Something happened; the same seed gives the same notes."""
        self.counts[what] += 1
        self.trace.update(f"{self.clock.monotonic_s():.9f} {what} {detail}\n".encode())

    # one life

    async def _life(self) -> None:
        engine = await self._open()
        await self._check_survivors(engine)
        faults = asyncio.create_task(self._faults())
        clients = [
            asyncio.create_task(Client(self, engine, n, Random(self.random.random())).run())
            for n in range(self.clients)
        ]
        crash = self.random.random() < 0.6
        if crash:
            await asyncio.wait(clients, timeout=self.random.uniform(0.5, 15.0))
        else:
            await asyncio.wait(clients)
        for task in (*clients, faults):
            task.cancel()
        results = await asyncio.gather(*clients, faults, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        self.disk.before = no_fault
        for device in self.devices:
            device.before = no_fault
        self.unrest += self.unrest % 2
        counted = engine.metrics.counts
        self.counts["promoted to hbm"] += counted["promoted_hbm_blocks"]
        self.counts["left hbm"] += counted["demoted_hbm_blocks"]
        self.counts["copied back"] += counted["copied_back_blocks"]
        if crash:
            self._power_loss(engine)
        else:
            engine.check_integrity()
            await engine.close()
            self._forget_evicted(engine)
            self.note("closed")

    def _power_loss(self, engine: Engine) -> None:
        self.note("power loss")
        # the process is gone: nothing of it runs on
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        engine._driver._upkeep_timer.cancel()
        engine._driver._stopped = True
        self._forget_evicted(engine)
        history = History(self.disk.log, self._base)
        self.disk = SimDisk(history.torn(len(history.ops), self.random))
        self._base = deepcopy(self.disk.state)

    def _forget_evicted(self, engine: Engine) -> None:
        """What left for want of room may be gone, or be brought back by a crash."""
        for key in list(self.durable):
            row = engine._core.index.find(key)
            if row is None or not engine._core.index.tiers[row] & Tier.SSD:
                del self.durable[key]

    async def _check_survivors(self, engine: Engine) -> None:
        engine.check_integrity()
        for key, writer in self.durable.items():
            assert engine.match(self.ns, [key]).hit_blocks == 1, "a durable block is lost"
            found = await self.read(engine, [key])
            assert found == [payload(LAYOUT, key, writer)], "a durable block is damaged"
        self.note("survivors", len(self.durable))

    async def _last_look(self) -> None:
        engine = await self._open()
        await self._check_survivors(engine)
        report = await engine.verify()
        assert report.clean, report
        await engine.evict()
        engine.check_integrity()
        await engine.close()
        self.note("verified", report.frames[Tier.SSD])

    async def read(self, engine: Engine, keys: Sequence[bytes]) -> list[list[bytes] | None]:
        """Sections of blocks, None for a miss."""
        lease = await engine.acquire(self.ns, keys)
        found = []
        for frames in await engine.read(lease.lease_id, keys):
            hit = frames.outcome is Outcome.HIT
            found.append([bytes(s) for s in frames.sections] if hit else None)
            frames.done()
        await engine.release(lease.lease_id)
        return found

    # what goes wrong

    async def _faults(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(1.0, 6.0))
            what = self.random.choice(
                ["pwrite", "fdatasync", "commit", "preadv", "unlink", "in", "out"]
            )
            self.note("fault", what)
            self.disk.before = partial(_fail, what)
            for device in self.devices:
                device.before = partial(_fail_device, what)
            self.unrest += 1
            await asyncio.sleep(self.random.uniform(0.1, 3.0))
            self.disk.before = no_fault
            for device in self.devices:
                device.before = no_fault
            self.unrest += 1


def _fail_device(what: str, op: str, length: int) -> None:
    if op == what:
        raise DeviceError("injected")


def _fail(what: str, op: str, path: Path) -> None:
    if op == what:
        raise OSError(5, "Input/output error")


class Client:
    """One client: sessions that grow turn by turn, over prefixes that all clients share."""

    def __init__(self, world: World, engine: Engine, number: int, random: Random) -> None:
        self.world, self.engine, self.number, self.random = world, engine, number, random

    async def run(self) -> None:
        tokens = self._prompt()
        for _ in range(self.world.turns):
            await asyncio.sleep(self.random.expovariate(2.0))
            if self.random.random() < 0.3:
                tokens = self._prompt()
            tokens += [self.random.randrange(1000) for _ in range(self.random.randint(1, 6))]
            began = self.world.clock.monotonic_s()
            try:
                await self._turn(tokens[:30])
            except (Overloaded, DiskError, LeaseExpired, ReservationExpired) as e:
                self.world.note("refused", type(e).__name__)
            took = self.world.clock.monotonic_s() - began
            assert took < CALL_S_MAX, f"a turn took {took} s"
            self.engine.check_integrity()

    def _prompt(self) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randint(1, 4))]

    async def _turn(self, tokens: list[int]) -> None:
        world, engine = self.world, self.engine
        blocks = chain(world.ns, LAYOUT, tokens, self.number)
        keys = [block.key for block in blocks]
        acquired_s, unrest = world.clock.monotonic_s(), world.unrest
        lease = await engine.acquire(world.ns, keys, self.random.choice([None, 0.05, 10.0]))
        world.note("hit", (lease.blocks, len(keys)))
        if lease.blocks:
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.random() * 4.0)
            until = acquired_s + lease.ttl_s
            misses = await self._read(lease.lease_id, keys[: lease.blocks])
            calm = unrest == world.unrest and unrest % 2 == 0
            if calm and world.clock.monotonic_s() < until:
                assert not misses, f"{misses} leased blocks were not there"
        how = self.random.random()
        if how < 0.75:
            await self._put(blocks[lease.blocks :])
        elif how < 0.9:
            await self._reserve_and_think_again(blocks[lease.blocks :])
        else:
            await engine.wait_for(world.ns, keys, 1.0)
        if self.random.random() < 0.8:
            await engine.release(lease.lease_id)
        if self.random.random() < 0.1:
            world.note("evicted", await engine.evict(world.ns, keys[-3:]))

    async def _read(self, lease_id: int, keys: list[bytes]) -> int:
        """How many of the blocks were not there."""
        wanted = self.random.choice([None, [0], [3, 1]])
        reading = self.engine.read(lease_id, keys, wanted)
        if self.random.random() < 0.1:
            task = asyncio.ensure_future(reading)
            await asyncio.sleep(self.random.random() * 0.02)
            if not task.cancel():
                for frames in task.result():
                    frames.done()
            return 0
        misses = 0
        for key, frames in zip(keys, await reading, strict=True):
            if frames.outcome is Outcome.HIT:
                self._check(key, [bytes(s) for s in frames.sections], wanted)
                if self.random.random() < 0.2:
                    await asyncio.sleep(self.random.random() * 0.1)
                    self._check(key, [bytes(s) for s in frames.sections], wanted)
            self.world.note("read", frames.outcome.name)
            misses += frames.outcome is Outcome.MISS
            frames.done()
        return misses

    def _check(self, key: bytes, sections: list[bytes], wanted: list[int] | None) -> None:
        possible = []
        for writer in self.world.written[key]:
            whole = payload(LAYOUT, key, writer)
            possible.append(whole if wanted is None else [whole[i] for i in wanted])
        assert sections in possible, f"wrong bytes for {key.hex()}"

    async def _put(self, blocks) -> None:
        durability = self.random.choice([Durability.ACCEPTED, Durability.DURABLE])
        # the bytes may be served before the put returns
        for block in blocks:
            self.world.written.setdefault(block.key, set()).add(self.number)
        try:
            outcomes = await self.engine.put(self.world.ns, blocks, durability)
        except BaseException:
            # nobody is told what was stored in the place of blocks evicted meanwhile
            for block in blocks:
                self.world.durable.pop(block.key, None)
            raise
        for block, outcome in zip(blocks, outcomes, strict=True):
            self.world.note("put", outcome.name)
            if outcome is PutOutcome.STORED:
                # an earlier one was evicted, or it would be there
                self.world.durable.pop(block.key, None)
                if durability is Durability.DURABLE:
                    self.world.durable[block.key] = self.number

    async def _reserve_and_think_again(self, blocks) -> None:
        grant = await self.engine.reserve(
            self.world.ns, [(b.key, b.parent) for b in blocks], self.random.choice([None, 0.3])
        )
        if not grant.reservation_id:
            return
        for block, outcome in zip(blocks, grant.outcomes, strict=True):
            if outcome is PutOutcome.STORED and self.random.random() < 0.8:
                self.world.written.setdefault(block.key, set()).add(self.number)
                await self.engine.write(grant.reservation_id, block.key, block.sections)
        await asyncio.sleep(self.random.random() * 0.5)
        if self.random.random() < 0.5:
            await self.engine.abort(grant.reservation_id)
        else:
            outcomes = await self.engine.commit(grant.reservation_id)
            self.world.note("commit", [o.name for o in outcomes])
            for block, outcome in zip(blocks, outcomes, strict=True):
                if outcome is PutOutcome.STORED:
                    self.world.durable.pop(block.key, None)
