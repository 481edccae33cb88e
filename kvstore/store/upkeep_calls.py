"""The calls of `kvstore.store.Engine` for those who look after a store."""

from collections.abc import Callable, Sequence

from kvstore.block import Tier
from kvstore.store import inspect
from kvstore.store.audit import Audit
from kvstore.store.core import Core
from kvstore.store.driver import Driver
from kvstore.store.hbm import Hbm
from kvstore.store.types import BlockInfo, Stat, VerifyReport
from kvstore.tiers.base import LogTier
from kvstore.tiers.dram import DramTier

_LS_BLOCKS_DEFAULT = 1000


class UpkeepCalls:
    """A part of `Engine`, which sets all fields."""

    _driver: Driver
    _core: Core
    _dram: DramTier
    _ssd: LogTier | None
    _hbm: Hbm | None
    _notes: list[str]

    async def evict(
        self,
        namespace_id: bytes | None = None,
        keys: Sequence[bytes] | None = None,
        tier: Tier | None = None,
    ) -> int:
        """Blocks go: `keys`, or all of a namespace, or all. Deepest first; what is pinned, in use
        or still has children stays. `tier` DRAM: those that the SSD holds leave DRAM only; HBM:
        those that another tier holds leave HBM only. Returns how many went."""
        self._driver.enter()
        gone = self._core.evict(namespace_id, keys, tier)
        self._driver.pump()
        return gone

    async def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every frame in DRAM and on SSD; wrong ones are quarantined. `progress` is
        told how many frames are done, of how many."""
        self._driver.enter()
        return await Audit(self._driver, self._dram, self._ssd, self._hbm).run(progress)

    def stat(self) -> Stat:
        """Tiers, counters and what is held, now."""
        self._driver.enter()
        return inspect.stat(self._core, self._driver.clock.wall_s(), self._notes)

    def ls(
        self,
        namespace_id: bytes | None = None,
        limit: int = _LS_BLOCKS_DEFAULT,
        after: bytes | None = None,
    ) -> list[BlockInfo]:
        """Up to `limit` blocks (`limits.ls_blocks_max` at most) behind the block `after`.

        Raises `InvalidRequest` where `after` has left the store meanwhile.
        """
        self._driver.enter()
        wall_s = self._driver.clock.wall_s()
        return inspect.ls(self._core, namespace_id, limit, after, wall_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` saying which of the store's books disagree."""
        self._core.check_integrity(self._driver.pinned.elements())
