"""Frames from SSD and HBM for readers: grouped, bounded, read once however many want them.

A reader gets a future per block and may stop waiting at any time; the transfer goes on, and what it
brought is used or given back without it. So a disk that hangs costs a reader its deadline, and the
store the bytes that are under way, both bounded.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.block import Tier
from kvstore.errors import Overloaded
from kvstore.index import READY
from kvstore.migration.promotion import Load
from kvstore.migration.workers import Lane, Loaded, read_loads
from kvstore.store.driver import Driver
from kvstore.store.hbm import Hbm
from kvstore.store.waiting import ByteBudget
from kvstore.tiers.base import LogTier, Slot, SlotTier
from kvstore.tiers.frame import FrameError
from kvstore.tiers.hbm.device import DeviceHangs
from kvstore.tiers.ssd.files import aligned_buffer

_HBM, _DRAM, _SSD = int(Tier.HBM), int(Tier.DRAM), int(Tier.SSD)
_GROUP_BYTES = 16 << 20
"""Of one transfer: what one worker keeps the disk busy with, and a policy is told of in one piece,
in the order of the log, which is the order in which the blocks were put."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame that somebody may read until `release`, which MUST be called once. `slot` is None for
    a bounce buffer. `verified`: its bytes were checked on their way here."""

    view: memoryview
    tier: Tier
    slot: Slot | None
    verified: bool
    release: Callable[[], None]


Waiter = asyncio.Future[Frame | None]


class Loads:
    """See the module. `ssd` and `hbm` are None in a store without them."""

    def __init__(
        self, driver: Driver, dram: SlotTier, ssd: LogTier | None, hbm: Hbm | None = None
    ) -> None:
        self._driver, self._dram, self._ssd, self._hbm = driver, dram, ssd, hbm
        migration = driver.config.migration
        self._under_way = ByteBudget(migration.load_bytes_max)
        self._bounce = ByteBudget(migration.bounce_bytes_max)
        self._group_bytes = min(_GROUP_BYTES, migration.load_bytes_max, migration.bounce_bytes_max)
        self._waiting: dict[Load, list[Waiter]] = {}
        self._pump_is_due = False
        self._came_ahead: dict[int, int] = {}
        """Generation by page of slots that were filled ahead and that nobody has read yet; what has
        left DRAM unread stays until its page is filled so again."""
        if hbm is not None:
            hbm.hand_out = self.hand_out

    def in_slot(self, slot: Slot) -> Frame:
        """A frame that DRAM holds; its slot stays until the release. Where it was read ahead for
        whoever comes first, it is the SSD that this one read."""
        self._driver.core.residency.use(slot)
        ahead = self._came_ahead and self._came_ahead.pop(slot.page, None) == slot.generation
        return self._in_use(slot, Tier.SSD if ahead else Tier.DRAM, verified=False)

    def came_ahead(self, pages: Sequence[int]) -> bool:
        """Whether slots of DRAM, by their pages, may have been filled ahead and not been read."""
        return not self._came_ahead.keys().isdisjoint(pages)

    def _in_use(self, slot: Slot, tier: Tier, verified: bool) -> Frame:
        return Frame(self._dram.view(slot), tier, slot, verified, partial(self._end_use, slot))

    def _end_use(self, slot: Slot) -> None:
        self._driver.core.residency.end_use(slot)
        # a reader lets go of many frames in a row
        if not self._pump_is_due:
            self._pump_is_due = True
            self._driver.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        self._driver.pump()

    # requests

    def request(self, rows: Sequence[int]) -> list[Waiter]:
        """One future per row: a frame, or None where the block is not there any more, corrupt or
        unreadable; `Overloaded` where no memory is left to read into.

        The caller keeps the rows pinned until it has stopped waiting for all of them, and releases
        the frame of every future that was done.
        """
        index = self._driver.core.index
        waiters: list[Waiter] = [self._driver.loop.create_future() for _ in rows]
        wanted = sorted(
            zip(rows, waiters, strict=True), key=lambda w: (index.segment[w[0]], index.page[w[0]])
        )
        group: list[tuple[int, Waiter]] = []
        size = 0
        for row, waiter in wanted:
            if group and size + index.stored_bytes[row] > self._group_bytes:
                self._driver.spawn(self._serve(group, size))
                group, size = [], 0
            group.append((row, waiter))
            size += index.stored_bytes[row]
        if group:
            self._driver.spawn(self._serve(group, size))
        return waiters

    def ahead(self, rows: Sequence[int]) -> None:
        """Load rows that the SSD alone holds, in the order of their chain, as far as that takes
        room from nobody who waits."""
        stored_bytes, group, size = self._driver.core.index.stored_bytes, list[int](), 0
        for row in rows:
            if group and size + stored_bytes[row] > self._group_bytes:
                self._driver.spawn(self._serve_ahead(group, size))
                group, size = [], 0
            group.append(row)
            size += stored_bytes[row]
        self._driver.spawn(self._serve_ahead(group, size))

    async def _serve_ahead(self, rows: list[int], size: int) -> None:
        if not await self._under_way.take(size, self._driver.loop.time()):
            return
        core = self._driver.core
        try:
            loads = []
            for row in rows:
                if core.index.state[row] == READY and core.index.tiers[row] == _SSD:
                    namespace_id = core.namespaces.ids[core.index.namespace[row]]
                    load = core.promotion.begin_ahead(row, namespace_id)
                    if load is not None:
                        loads.append(load)
            await self._into_arena(loads)
        finally:
            self._under_way.give_back(size)

    async def _serve(self, group: list[tuple[int, Waiter]], size: int) -> None:
        deadline = self._driver.deadline(self._driver.config.limits.disk_wait_s_max)
        if not await self._under_way.take(size, deadline):
            for _, waiter in group:
                if not waiter.done():
                    waiter.set_result(None)
            return
        try:
            begun = [load for row, waiter in group if (load := self._begin(row, waiter))]
            await self._into_arena([load for load in begun if load.slot is not None])
            await self._past_arena([load for load in begun if load.slot is None])
        finally:
            self._under_way.give_back(size)

    def _begin(self, row: int, waiter: Waiter) -> Load | None:
        """Let the waiter have the row's frame; returns the load to execute for it, if any."""
        core = self._driver.core
        if waiter.done():
            return None
        tiers = core.index.tiers[row] if core.index.state[row] == READY else 0
        if tiers & _DRAM:
            waiter.set_result(self.in_slot(core.residency.slot_of(row)))
            return None
        if not tiers & (_SSD | _HBM):
            waiter.set_result(None)
            return None
        namespace_id = core.namespaces.ids[core.index.namespace[row]]
        load, new = core.promotion.begin(row, namespace_id)
        self._waiting.setdefault(load, []).append(waiter)
        return load if new else None

    # transfers

    async def _into_arena(self, loads: list[Load]) -> None:
        frames = [self._dram.view(load.slot) for load in loads if load.slot is not None]
        await self._transfer(loads, frames)

    async def _past_arena(self, loads: list[Load]) -> None:
        if not loads:
            return
        size = sum(load.length for load in loads)
        deadline = self._driver.deadline(self._driver.config.limits.room_wait_s_max)
        if not await self._bounce.take(size, deadline):
            self._refuse(loads)
            return
        self._driver.core.metrics.add("bounced_blocks", len(loads))
        await self._transfer(loads, [aligned_buffer(load.length) for load in loads])

    def _refuse(self, loads: list[Load]) -> None:
        for load in loads:
            self._driver.core.promotion.finish(load, lost=True)
            for waiter in self._waiting.pop(load):
                if not waiter.done():
                    waiter.set_exception(
                        Overloaded(
                            f"dram is full of blocks in use, and {self._bounce.taken_bytes} B of "
                            "bounce buffers are out (migration.bounce_bytes_max); read fewer "
                            "blocks at a time, or release those read"
                        )
                    )

    async def _transfer(self, loads: list[Load], frames: list[memoryview]) -> None:
        pairs = list(zip(loads, frames, strict=True))
        from_hbm = [pair for pair in pairs if pair[0].source is not None]
        from_ssd = [pair for pair in pairs if pair[0].source is None]
        if from_hbm:
            await self._transfer_from(Tier.HBM, from_hbm)
        if from_ssd:
            await self._transfer_from(Tier.SSD, from_ssd)

    async def _transfer_from(self, tier: Tier, pairs: list[tuple[Load, memoryview]]) -> None:
        driver = self._driver
        loads, frames = [load for load, _ in pairs], [frame for _, frame in pairs]
        try:
            results = await self._read(tier, loads, frames)
        except Exception as e:
            _log.exception("reading from ssd failed in an unforeseen way")
            results = [Loaded(load, memoryview(b""), e) for load in loads]
        for loaded in results:
            self._deliver(loaded)
        driver.core.promotion.arrived(loads)
        driver.pump()

    async def _read(self, tier: Tier, loads: list[Load], frames: list[memoryview]) -> list[Loaded]:
        if tier is Tier.HBM:
            assert self._hbm is not None
            return (await self._hbm.read(loads, frames))[0]
        assert self._ssd is not None
        work = partial(read_loads, self._ssd, loads, frames)
        return (await self._driver.workers.run(Lane.READ, work))[0]

    def _deliver(self, loaded: Loaded) -> None:
        load, error = loaded.load, loaded.error
        core = self._driver.core
        if isinstance(error, DeviceHangs):
            core.promotion.abandon(load)
            good = False
        else:
            good = self._finish(load, error)
        if not load.readers and load.slot is not None and good:
            self._came_ahead[load.slot.page] = load.slot.generation
        self.hand_out(loaded, good)
        if load.slot is None and not good:
            self._bounce.give_back(load.length)

    def hand_out(self, loaded: Loaded, good: bool) -> None:
        """Give a load that is finished to those who wait for it."""
        load = loaded.load
        waiters = self._waiting.pop(load, [])
        if not good and load.source is not None:
            self._read_elsewhere(load.row, [w for w in waiters if not w.done()])
            waiters = []
        for waiter in waiters:
            frame = self._frame(loaded) if good else None
            if not waiter.done():
                waiter.set_result(frame)
            elif frame is not None:
                frame.release()

    def _finish(self, load: Load, error: Exception | None) -> bool:
        core = self._driver.core
        corrupt = error if isinstance(error, FrameError) else None
        if error is not None and corrupt is None and load.source is None:
            core.metrics.add("disk_errors")
            _log.warning("block %s could not be read: %s", load.key.hex(), error)
        return core.promotion.finish(load, corrupt, lost=error is not None)

    def _read_elsewhere(self, row: int, waiters: list[Waiter]) -> None:
        """HBM's copy was of no use: those who wait, and keep the row pinned, get another."""
        if waiters:
            size = len(waiters) * self._driver.core.index.stored_bytes[row]
            self._driver.spawn(self._serve([(row, waiter) for waiter in waiters], size))

    def _frame(self, loaded: Loaded) -> Frame:
        load = loaded.load
        tier = Tier.SSD if load.source is None else Tier.HBM
        if load.slot is not None:
            return self._in_use(load.slot, tier, verified=True)
        release = partial(self._bounce.give_back, load.length)
        return Frame(loaded.frame, tier, None, True, release)
