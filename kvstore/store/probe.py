"""One block read from SSD now and then, so that its cost is known before somebody has to pay it.

Without it the first reader would go by an assumption; and where reading costs more than computing,
nobody would read any more and find out that the disk is fast again.
"""

from functools import partial

from kvstore.block import Tier
from kvstore.migration.promotion import Load
from kvstore.migration.workers import Lane, read_loads
from kvstore.store.driver import Driver
from kvstore.tiers.base import LogTier
from kvstore.tiers.frame import FrameError
from kvstore.tiers.ssd.files import aligned_buffer


class Probe:
    """`look` is called every while; it reads where the estimate of the SSD's cost is assumed, or
    older than `migration.cost_refresh_s`."""

    def __init__(self, driver: Driver, ssd: LogTier) -> None:
        self._driver, self._ssd = driver, ssd
        self._looking = False

    def look(self) -> None:
        """Begin a read where one is due."""
        driver = self._driver
        age_s = driver.cost_age_s(Tier.SSD)
        due = age_s is None or age_s > driver.config.migration.cost_refresh_s
        if self._looking or not due or driver.closing or driver.core.residency.log_degraded:
            return
        on_ssd = driver.core.index.rows_on(Tier.SSD)
        if not len(on_ssd):
            return
        core, row = driver.core, int(on_ssd[len(on_ssd) // 2])
        namespace_id = core.namespaces.ids[core.index.namespace[row]]
        self._looking = True
        driver.spawn(self._read(core.promotion.begin_check(row, namespace_id)))

    async def _read(self, load: Load) -> None:
        driver, corrupt, lost = self._driver, None, True
        try:
            work = partial(read_loads, self._ssd, [load], [aligned_buffer(load.length)])
            (loaded,), seconds = await driver.workers.run(Lane.READ, work)
            corrupt = loaded.error if isinstance(loaded.error, FrameError) else None
            lost = loaded.error is not None
            if not lost:
                driver.observe(Tier.SSD, load.length, seconds)
        finally:
            driver.core.promotion.finish(load, corrupt, lost)
            self._looking = False
            driver.pump()
