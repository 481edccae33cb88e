"""The store as a caller has it: `Engine`, one event loop, every call in order.

Concurrency: all methods belong to the loop on which `open` ran. A call that awaits leaves the core
in order at every step, so any number of them may be under way; a cancelled one gives back what it
held. Residency and durability: see `kvstore.migration`. What a wrong byte costs: the copy it is in,
and the caller a miss.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.block import BlockPut, Buffer, Durability, Match, Outcome, Outlook, PutOutcome
from kvstore.clock import Clock, SteadyClock, SystemClock
from kvstore.config import HbmConfig, SsdConfig, StoreConfig
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.metrics import Metrics
from kvstore.migration.workers import Lane, LogWriter, ThreadWorkers, Workers
from kvstore.namespace import Namespace
from kvstore.store import boot
from kvstore.store.audit import Audit
from kvstore.store.core import Core
from kvstore.store.driver import Driver
from kvstore.store.hbm import Hbm
from kvstore.store.loads import Loads
from kvstore.store.probe import Probe
from kvstore.store.puts import Puts
from kvstore.store.reads import Reads
from kvstore.store.types import (
    BlockFrames,
    Gathered,
    LeaseGrant,
    PackedBlocks,
    ReservationGrant,
    SharedArena,
    SharedHbm,
)
from kvstore.store.upkeep_calls import UpkeepCalls
from kvstore.store.window_calls import WindowCalls
from kvstore.store.windows import Windows
from kvstore.tiers.base import LogTier, Recovered
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm.opened import OpenedHbm as HbmView
from kvstore.tiers.hbm.opening import OpenedHbm, open_hbm
from kvstore.tiers.ssd import SsdTier


class OpenLog(Protocol):
    """How the log is opened: see `SsdTier.open`."""

    def __call__(
        self, directory: Path, config: SsdConfig, clock: Clock, *, stop: threading.Event
    ) -> tuple[LogTier, Recovered]: ...


OpenDevices = Callable[[HbmConfig], OpenedHbm]
_SECRET_BYTES = 32
_log = logging.getLogger(__name__)


class Engine(WindowCalls, UpkeepCalls):
    """One store. Made by `open`, ended by `close`; methods after that raise `Unavailable`."""

    def __init__(
        self,
        config: StoreConfig,
        clock: Clock,
        workers: Workers,
        log: tuple[LogTier, Recovered] | None,
        first_id: int,
        hbm: OpenedHbm,
    ) -> None:
        self._config, self._workers = config, workers
        self._dram = _arena(config.dram.budget_bytes)
        self._ssd: LogTier | None = log[0] if log else None
        self.metrics = Metrics()
        secret = self._ssd.tenant_secret if self._ssd else secrets.token_bytes(_SECRET_BYTES)
        newest_wall_s = float(log[1].created_wall_s.max(initial=0.0)) if log else 0.0
        steady = SteadyClock(clock, newest_wall_s)
        self._core = Core(
            config,
            self._dram,
            self._ssd,
            secret,
            self.metrics,
            clock.monotonic_s,
            first_id,
            steady.wall_offset_s,
            hbm.tier,
        )
        writer = None
        if log is not None:
            ssd, recovered = log
            boot.load(self._core, recovered, secret)
            numbers = {row.namespace_id: row.number for row in recovered.namespaces}
            writer = LogWriter(ssd, self._dram, numbers)
        self._driver = Driver(self._core, config, steady, workers, writer)
        if self._ssd is not None:
            self._driver.look_around = Probe(self._driver, self._ssd).look
        self._notes = [hbm.note]
        self._hbm: Hbm | None = None
        if hbm.tier is not None:
            self._hbm = Hbm(self._driver, self._dram, hbm.tier)
        self._loads = Loads(self._driver, self._dram, self._ssd, self._hbm)
        self._reads = Reads(self._driver, self._loads)
        self._puts = Puts(self._driver, self._dram)
        self._windows = Windows(self._driver)
        self._driver.pump()
        if log is not None:
            # later, when nobody holds what was recovered any more
            self._driver.loop.call_soon(boot.return_memory)

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        clock: Clock | None = None,
        *,
        workers: Workers | None = None,
        open_log: OpenLog = SsdTier.open,
        open_devices: OpenDevices = open_hbm,
        first_id: int | None = None,
    ) -> "Engine":
        """Open the store that `config` describes, making its directory where there is none.

        `workers`, `open_log`, `open_devices` and `first_id` (leases and reservations count up from
        it) are for simulations. Raises `StoreLocked`, `StoreFormatError`, `DiskError` where the
        directory can't be written or is full, and `ConfigError` where memory, or a device that is
        asked for, can't be had.
        """
        clock = clock or SystemClock()
        workers = workers or ThreadWorkers(config.migration, config.hbm.copy_workers)
        # ids of an earlier run must mean nothing to this one
        first_id = secrets.randbits(40) << 20 | 1 if first_id is None else first_id
        log: tuple[LogTier, Recovered] | None = None
        hbm, stop = OpenedHbm(None, ""), threading.Event()
        try:
            hbm = await workers.run(Lane.DEVICE, partial(open_devices, config.hbm))
            _log.info("%s", hbm.note)
            if config.dir is not None and config.ssd is not None:
                opening = partial(open_log, config.dir, config.ssd, clock, stop=stop)
                log = await workers.run(Lane.LOG, opening)
            engine = cls(config, clock, workers, log, first_id, hbm)
        except BaseException:
            stop.set()
            if hbm.tier is not None:
                hbm.tier.close()
            if log is not None:
                log[0].close()
            workers.close()
            raise
        if engine._hbm is not None:
            await engine._hbm.register(engine._dram.memory)
        return engine

    async def close(self) -> None:
        """Write what is dirty, within `limits.drain_s_max`, and let go of everything. Idempotent.
        Frames that were read stay valid until they are dropped."""
        if self._driver.closing:
            return
        self._driver.closing = True
        self._driver.settled.wake_all()
        await self._driver.drain()
        if self._ssd is not None and not self._driver.log_hangs:
            await self._close_log(self._ssd)
        if self._hbm is not None:
            await self._hbm.close()
        self._workers.close()
        self._dram.close()

    async def _close_log(self, ssd: LogTier) -> None:
        closing = asyncio.ensure_future(self._workers.run(Lane.LOG, ssd.close))
        done, _ = await asyncio.wait((closing,), timeout=self._config.limits.drain_s_max)
        if done:
            closing.result()
        else:
            _log.error("closing %s hangs; it is left to the next start", self._config.dir)

    # namespaces and lookups

    def open_namespace(self, namespace: Namespace) -> bytes:
        """Its 32-byte id. The descriptor becomes durable with the next write.

        Raises `InvalidRequest` where one block would fit no tier in one piece.
        """
        self._driver.enter()
        namespace_id = self._core.open_namespace(namespace)
        self._driver.pump()
        return namespace_id

    def namespace(self, namespace_id: bytes) -> Namespace:
        """The descriptor. Raises `UnknownNamespace`."""
        return self._core.namespaces.namespace(self._core.namespaces.number(namespace_id))

    def match(self, namespace_id: bytes, keys: Sequence[bytes]) -> Match:
        """How much of a chain is here, what fetching it will cost, and which window snapshots lie
        behind its blocks. Moves and pins nothing. Without `keys`: of the snapshots, those before
        the first block's end.

        Raises `UnknownNamespace`, `MessageTooLarge`.
        """
        self._driver.enter()
        return self._windows.shown(namespace_id, keys, self._core.match(namespace_id, keys))

    async def wait_for(
        self, namespace_id: bytes, keys: Sequence[bytes], deadline_s: float
    ) -> Match:
        """`match`, after waiting while the first block that is not READY is PENDING: until its
        writer commits or gives up, or `deadline_s` from now (at most `limits.wait_s_max`).

        Raises `Overloaded` where too many wait.
        """
        self._driver.enter()
        deadline = self._driver.deadline(min(deadline_s, self._config.limits.wait_s_max))
        while True:
            found = self._core.peek(namespace_id, keys)
            at = found.hit_blocks
            if at == len(keys) or found.outcomes[at] is not Outcome.PENDING:
                break
            if not await self._driver.settled.wait(keys[at], deadline):
                break
            self._driver.enter()
        self._driver.enter()
        return self._windows.shown(namespace_id, keys, self._core.match(namespace_id, keys))

    # leases and reads

    async def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], ttl_s: float | None = None
    ) -> LeaseGrant:
        """Pin the READY prefix of `keys` in the store for `ttl_s` (`lease.lease_ttl_s_default`
        without, `lease.lease_ttl_s_max` at most). A lease over nothing is a lease too.

        Raises `UnknownNamespace`, `InvalidRequest`, `MessageTooLarge`, `Overloaded`.
        """
        self._driver.enter()
        lease_id, ttl_s, match = self._core.acquire(namespace_id, keys, self._driver.now_s(), ttl_s)
        match = self._windows.shown(namespace_id, keys, match)
        return LeaseGrant(lease_id, match.hit_blocks, ttl_s, match)

    async def renew(self, lease_id: int, ttl_s: float | None = None) -> float:
        """Let a lease last `ttl_s` from now, or as long as it would anyway: seconds left. Raises
        `LeaseExpired`."""
        self._driver.enter()
        return self._core.leases.renew(lease_id, self._driver.now_s(), ttl_s)

    async def release(self, lease_id: int) -> None:
        """End a lease; nothing where it is over already."""
        self._driver.enter()
        self._core.release(lease_id)
        self._driver.pump()

    async def answered(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None = None,
    ) -> None:
        """An answer ended. `keys`: all blocks of the request and its answer, root first.
        `lasting_blocks`: how many of them the next request can have, all by default. It decides
        nothing but who goes first.

        Raises `UnknownNamespace`, `MessageTooLarge`.
        """
        self._driver.enter()
        self._core.answered(namespace_id, keys, lasting_blocks, outlook)

    def locate(self, lease_id: int, keys: Sequence[bytes] | None = None) -> npt.NDArray[np.uint64]:
        """Where the arena holds blocks (those of the lease without `keys`), for a reader that maps
        it: per block the frame's offset and its slot's generation, both `NOT_IN_DRAM` for a block
        that DRAM does not hold. Shape (blocks, 2).

        The slots stay until the lease ends, up to `dram.held_fraction_max` of the arena for all
        leases together; beyond it, and after the lease, the generation tells whether one stayed.
        Raises `LeaseExpired`.
        """
        self._driver.enter()
        return self._core.locate(lease_id, keys, self._driver.now_s())

    @property
    def arena(self) -> SharedArena:
        """What another process needs to map the arena; valid until `close`."""
        dram = self._dram
        return SharedArena(dram.fd, dram.budget_bytes, dram.generations_offset)

    def locate_hbm(
        self, lease_id: int, keys: Sequence[bytes] | None = None
    ) -> npt.NDArray[np.uint64]:
        """`locate`, for the pools of HBM, whose pages are numbered through: per block the frame's
        offset over all pools and its slot's generation. `hbm.held_fraction_max` bounds what stays.
        """
        self._driver.enter()
        return self._core.locate_hbm(lease_id, keys, self._driver.now_s())

    @property
    def shared_hbm(self) -> SharedHbm | None:
        """What another process needs to open the pools; None where there are none, or the device
        can't share them. Valid until `close`."""
        return self._hbm.share() if self._hbm is not None else None

    def view_hbm(self) -> HbmView | None:
        """The pools for readers in this process, who MUST let go of them before `close`; None where
        there are none. Raises `DeviceError`."""
        return self._hbm.tier.view() if self._hbm is not None else None

    async def read(
        self,
        lease_id: int,
        keys: Sequence[bytes],
        sections: Sequence[int] | None = None,
        verify: bool = True,
    ) -> list[BlockFrames]:
        """Sections (all without `sections`) of blocks of the lease's namespace, in the order asked.

        What only the SSD holds is read into DRAM first, or past it where DRAM is full of blocks in
        use. A block that is not there any more, that the disk does not give within
        `limits.disk_wait_s_max`, or whose bytes are wrong is a MISS; wrong bytes are quarantined
        and counted. The lease keeps its own blocks from going; others are read at their own risk.
        `verify=False` leaves the check of what DRAM holds to a caller who makes it
        (`report_corrupt`). Every entry MUST get its `done`.

        Raises `LeaseExpired`, `InvalidRequest`, `MessageTooLarge` (`limits.read_bytes_max`) and
        `Overloaded` where no memory is left to read into.
        """
        self._driver.enter()
        return await self._reads.read(lease_id, keys, sections, verify)

    def gather(
        self, lease_id: int, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> Gathered | None:
        """`read` without `verify` and without waiting, of blocks that DRAM holds all of; None where
        that is not so. It takes some microseconds per block of the core's time."""
        self._driver.enter()
        return self._reads.gather(lease_id, keys, sections)

    async def report_corrupt(self, namespace_id: bytes, key: bytes) -> None:
        """A client got bytes that do not match their checksum: count it, and look here too."""
        self._driver.enter()
        self.metrics.add("corrupt_reported_blocks")
        number = self._core.namespaces.number(namespace_id)
        if self._core.ready_row(number, key) is not None:
            await Audit(self._driver, self._dram, self._ssd, self._hbm).check_block(key)

    # writes

    async def reserve(
        self,
        namespace_id: bytes,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None = None,
    ) -> ReservationGrant:
        """Room for blocks, (key, parent key) each, parents before children; a first block's parent
        is the namespace id. Waits up to `limits.room_wait_s_max` for room.

        Raises, with nothing changed, `UnknownNamespace`, `BlockOutOfOrder`, `InvalidRequest`,
        `MessageTooLarge`, `Overloaded`.
        """
        self._driver.enter()
        return await self._puts.reserve(namespace_id, blocks, ttl_s)

    async def write(
        self,
        reservation_id: int,
        key: bytes,
        sections: Sequence[Buffer],
        checksums: Sequence[bytes] | None = None,
    ) -> None:
        """One reserved block's bytes, all sections in the layout's order; once per block. They are
        checked against `checksums` (xxh3-128 each) where there are any; the verdict comes with
        `commit`.

        Raises `ReservationExpired`, `WrongSectionSize` (write again), `InvalidRequest`.
        """
        self._driver.enter()
        await self._puts.write(reservation_id, key, sections, checksums)

    async def commit(
        self, reservation_id: int, durability: Durability = Durability.ACCEPTED
    ) -> list[PutOutcome]:
        """Make the reservation's blocks readable, each with all its sections or not at all; final
        outcomes, one per block asked for in `reserve`. A block whose bytes were wrong, or never
        came, is CORRUPT. DURABLE returns when the blocks survive a crash, those stored before
        included.

        Raises `ReservationExpired`; `InvalidRequest` for DURABLE without a durable tier;
        `DiskError` where that takes longer than `limits.disk_wait_s_max`.
        """
        self._driver.enter()
        return await self._puts.commit(reservation_id, durability)

    async def abort(self, reservation_id: int) -> None:
        """Give a reservation up; nothing where it is over already."""
        self._driver.enter()
        self._puts.abort(reservation_id)

    async def put(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability = Durability.ACCEPTED,
    ) -> list[PutOutcome]:
        """`reserve`, `write` and `commit` in one, in parts that leave DRAM room for others; one
        outcome per block. Raises what those raise; a part that was committed stays."""
        self._driver.enter()
        return await self._puts.put(namespace_id, blocks, durability)

    async def put_packed(
        self,
        namespace_id: bytes,
        blocks: PackedBlocks,
        durability: Durability = Durability.ACCEPTED,
    ) -> list[PutOutcome]:
        """`put`, for blocks that lie in one buffer. It may change meanwhile: what is stored is what
        the checksums are made of."""
        self._driver.enter()
        return await self._puts.put_packed(namespace_id, blocks, durability)

    async def flush(self) -> None:
        """Until everything accepted so far is durable.

        Raises `InvalidRequest` without an SSD tier, and `DiskError` where it takes longer than
        `limits.drain_s_max` or blocks had to leave first.
        """
        self._driver.enter()
        if self._core.lane is None:
            raise InvalidRequest("this store has no ssd tier, nothing in it is durable")
        r = self._core.residency
        ticket = r.ticket(r.wanted_durable([*r.dirty, *r.stranded, *r.declined]))
        await self._driver.durable([ticket], self._config.limits.drain_s_max)


def _arena(budget_bytes: int) -> DramTier:
    try:
        return DramTier(budget_bytes)
    except OSError as e:
        raise ConfigError(
            f"{budget_bytes} B of memory can't be had ({e.strerror}); lower dram.budget_bytes"
        ) from e
