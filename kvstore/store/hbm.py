"""Runs the HBM lane: carries its jobs to the workers and brings the results back.

One job is under way at a time, in one task; reads from HBM go beside it (`kvstore.store.loads`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.block import Tier
from kvstore.migration.hbm_copies import HbmCopies, HbmJob, HbmResult
from kvstore.migration.hbm_lane import HbmLane
from kvstore.migration.promotion import Load
from kvstore.migration.workers import Lane, Loaded
from kvstore.store.driver import Driver
from kvstore.store.types import SharedHbm, SharedPool
from kvstore.tiers.base import SlotTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.device import DeviceError, DeviceHangs

_log = logging.getLogger(__name__)


class Hbm:
    """The tier at work."""

    def __init__(self, driver: Driver, dram: SlotTier, tier: HbmTier) -> None:
        lane = driver.core.hbm_lane
        assert lane is not None
        self.tier = tier
        self._driver, self._lane = driver, lane
        config = driver.config
        self._copies = HbmCopies(tier, dram, config.hbm.copy_s_max, config.migration.verify_workers)
        self._task: asyncio.Task[None] | None = None
        self.hand_out: Callable[[Loaded, bool], None] | None = None
        """Gives a load of the lane's own to readers that joined it; set by who has them."""
        driver.start_hbm = self._start

    @property
    def lane(self) -> HbmLane:
        """Its decisions."""
        return self._lane

    def _start(self) -> None:
        if self._task is not None:
            return
        job = self._lane.next_job(self._driver.now_s())
        if job is not None:
            self._task = self._driver.loop.create_task(self._run(job))
            self._task.add_done_callback(self._driver.reap)

    async def _run(self, job: HbmJob) -> None:
        try:
            result = await self._driver.workers.run(Lane.DEVICE, partial(self._copies.run, job))
        except Exception as e:
            _log.exception("copying to or from hbm failed in an unforeseen way")
            result = _all_failed(job, e)
        try:
            good = self._lane.finish(job, result, self._driver.now_s())
            if self.hand_out is not None:
                for loaded, usable in zip(result.loaded, good, strict=True):
                    self.hand_out(loaded, usable)
        finally:
            self._task = None
        self._driver.pump()

    async def read(
        self, loads: Sequence[Load], frames: Sequence[memoryview]
    ) -> tuple[list[Loaded], float]:
        """Frames from HBM to the host, verified."""
        try:
            work = partial(self._copies.read, loads, frames)
            results, seconds = await self._driver.workers.run(Lane.DEVICE, work)
        except Exception as e:
            _log.exception("reading from hbm failed in an unforeseen way")
            results, seconds = _all_failed(HbmJob(list(loads)), e).loaded, 0.0
        for loaded in results:
            if isinstance(loaded.error, DeviceError):
                self._lane.note_error(loaded.error, self._driver.now_s())
            if isinstance(loaded.error, DeviceHangs):
                self._lane.give_up(loaded.error)
        size = sum(load.length for load in loads)
        if size and not any(loaded.error for loaded in results):
            self._driver.observe(Tier.HBM, size, seconds)
        return results, seconds

    async def register(self, arena: memoryview) -> None:
        """Pin DRAM's memory, so that copies are asynchronous; without it they are slower."""
        for device in self.tier.devices:
            try:
                await self._driver.workers.run(Lane.DEVICE, partial(device.register, arena))
            except DeviceError as e:
                _log.warning("dram is not pinned for %s, copies will be slow: %s", device.name, e)

    def share(self) -> SharedHbm | None:
        """What another process needs to open the pools."""
        try:
            shared = self.tier.share()
        except (DeviceError, OSError) as e:
            _log.warning("hbm can't be shared with other processes: %s", e)
            return None
        pools = [SharedPool(p.kind, p.device, p.size_bytes, p.handle) for p in shared.pools]
        return SharedHbm(tuple(pools), shared.generations)

    async def close(self) -> None:
        """Wait for copies under way, and give the pools back, unless the device hangs."""
        limit = self._driver.config.hbm.copy_s_max
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=limit)
        # what is under way finds its memory whole, however long it takes
        if self._task is None and self._copies.close(timeout_s=limit):
            self.tier.close()
        else:
            _log.error("the device hangs; its memory is left to the end of the process")


def _all_failed(job: HbmJob, error: Exception) -> HbmResult:
    """What the copies did is not known: they may be under way still."""
    hangs = DeviceHangs(f"nobody can tell what became of copies: {error!r}")
    loaded = [Loaded(load, memoryview(b""), hangs) for load in job.loads]
    return HbmResult(loaded, [hangs] * len(job.copies))
