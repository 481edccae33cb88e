"""Reading everything to see whether it is what was accepted."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvstore.block import Tier
from kvstore.errors import DiskError
from kvstore.index import READY
from kvstore.migration.promotion import Load
from kvstore.migration.workers import Lane, Loaded, read_loads
from kvstore.store.driver import Driver
from kvstore.store.hbm import Hbm
from kvstore.store.types import VerifyReport
from kvstore.tiers.base import LogTier, Slot, SlotTier
from kvstore.tiers.frame import FrameError, verify_frame
from kvstore.tiers.hbm.device import DeviceError, DeviceHangs
from kvstore.tiers.ssd.files import aligned_buffer

_CHUNK_BYTES = 8 << 20
Progress = Callable[[int, int], None]


class Audit:
    """One run of `verify`, or a look at one block. Takes `_CHUNK_BYTES` of memory, and reads beside
    the traffic; what the disk does not give within `limits.disk_wait_s_max` is unreadable."""

    def __init__(
        self, driver: Driver, dram: SlotTier, ssd: LogTier | None, hbm: Hbm | None = None
    ) -> None:
        self._driver, self._dram, self._ssd, self._hbm = driver, dram, ssd, hbm
        tiers = [Tier.HBM] * (hbm is not None) + [Tier.DRAM, Tier.SSD]
        self._frames = dict.fromkeys(tiers, 0)
        self._payload = dict.fromkeys(tiers, 0)
        self._corrupt: dict[bytes, None] = {}
        self._unreadable = 0

    async def run(self, progress: Progress | None) -> VerifyReport:
        """Check all frames that are there now, in the order in which they lie on the disk."""
        index = self._driver.core.index
        in_hbm, in_dram = (
            [index.keys[row] for row in index.rows_on(tier).tolist()]
            for tier in (Tier.HBM, Tier.DRAM)
        )
        on_ssd = [index.keys[row] for row in self._disk_order()]
        total, done = len(in_hbm) + len(in_dram) + len(on_ssd), 0
        for tier, keys in ((Tier.HBM, in_hbm), (Tier.DRAM, in_dram), (Tier.SSD, on_ssd)):
            for chunk in self._chunks(keys):
                await self._check(tier, chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
        return VerifyReport(self._frames, self._payload, tuple(self._corrupt), self._unreadable)

    async def check_block(self, key: bytes) -> None:
        """Check one block wherever it lies."""
        for tier in (Tier.HBM, Tier.DRAM, Tier.SSD):
            await self._check(tier, [key])

    def _disk_order(self) -> list[int]:
        index = self._driver.core.index
        rows = index.rows_on(Tier.SSD)
        order = np.lexsort((index.view("page")[rows], index.view("segment")[rows]))
        in_order: list[int] = rows[order].tolist()
        return in_order

    def _chunks(self, keys: Sequence[bytes]) -> Iterator[list[bytes]]:
        index = self._driver.core.index
        chunk: list[bytes] = []
        size = 0
        for key in keys:
            row = index.find(key)
            if row is None:
                continue
            if chunk and size + index.stored_bytes[row] > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(key)
            size += index.stored_bytes[row]
        if chunk:
            yield chunk

    async def _check(self, tier: Tier, keys: Sequence[bytes]) -> None:
        index = self._driver.core.index
        rows = [row for key in keys if (row := index.find(key)) is not None]
        rows = [row for row in rows if index.state[row] == READY and index.tiers[row] & tier]
        if not rows:
            return
        if tier is Tier.DRAM:
            await self._check_dram(rows)
        else:
            await self._check_by_reading(tier, rows)
        self._driver.pump()

    async def _check_dram(self, rows: Sequence[int]) -> None:
        core = self._driver.core
        self._driver.pin(rows)
        slots = [core.residency.slot_of(row) for row in rows]
        for slot in slots:
            core.residency.use(slot)
        try:
            work = partial(
                _verify_all, [self._work(row, s) for row, s in zip(rows, slots, strict=True)]
            )
            errors = await self._driver.workers.run(Lane.BYTES, work)
            for row, slot, error in zip(rows, slots, errors, strict=True):
                number = core.index.namespace[row]
                self._count(Tier.DRAM, core.index.keys[row], number, slot.length, error)
                if error is not None and self._still_in(row, slot):
                    core.residency.quarantine(row, Tier.DRAM, error)
        finally:
            for slot in slots:
                core.residency.end_use(slot)
            self._driver.unpin(rows)

    def _work(self, row: int, slot: Slot) -> "partial[FrameError | None]":
        core = self._driver.core
        namespace_id = core.namespaces.ids[core.index.namespace[row]]
        return partial(verify_frame, self._dram.view(slot), core.index.keys[row], namespace_id)

    def _still_in(self, row: int, slot: Slot) -> bool:
        core = self._driver.core
        in_dram = core.index.state[row] == READY and core.index.tiers[row] & Tier.DRAM
        return bool(in_dram) and core.residency.slot_of(row) == slot

    async def _check_by_reading(self, tier: Tier, rows: Sequence[int]) -> None:
        core = self._driver.core
        numbers = [core.index.namespace[row] for row in rows]
        promotion = core.promotion
        begin = promotion.begin_check if tier is Tier.SSD else promotion.begin_hbm_check
        loads = [
            begin(row, core.namespaces.ids[number])
            for row, number in zip(rows, numbers, strict=True)
        ]
        # in a task of its own: what is begun has to be finished, whoever has gone by then
        reading = self._driver.loop.create_task(self._read(loads))
        limit = self._driver.config.limits.disk_wait_s_max
        done, _ = await asyncio.wait((reading,), timeout=limit)
        if not done:
            self._unreadable += len(loads)
            return
        for loaded, number in zip(reading.result(), numbers, strict=True):
            self._unreadable += isinstance(loaded.error, DiskError | DeviceError)
            self._count(tier, loaded.load.key, number, loaded.load.length, loaded.error)

    async def _read(self, loads: Sequence[Load]) -> list[Loaded]:
        promotion = self._driver.core.promotion
        try:
            results = await self._read_frames(loads)
        except Exception as e:
            error = DiskError(f"reading failed in an unforeseen way: {e!r}")
            results = [Loaded(load, memoryview(b""), error) for load in loads]
        for loaded in results:
            corrupt = loaded.error if isinstance(loaded.error, FrameError) else None
            if isinstance(loaded.error, DeviceHangs):
                promotion.abandon(loaded.load)
            else:
                promotion.finish(loaded.load, corrupt, loaded.error is not None)
        return results

    async def _read_frames(self, loads: Sequence[Load]) -> list[Loaded]:
        frames = _frames_for(loads)
        if loads[0].source is not None:
            assert self._hbm is not None
            return (await self._hbm.read(loads, frames))[0]
        assert self._ssd is not None
        work = partial(read_loads, self._ssd, loads, frames)
        return (await self._driver.workers.run(Lane.READ, work))[0]

    def _count(
        self, tier: Tier, key: bytes, number: int, stored_bytes: int, error: Exception | None
    ) -> None:
        self._frames[tier] += 1
        if error is None:
            payload_bytes = self._driver.core.namespaces.payload_bytes()[number]
            self._payload[tier] += payload_bytes or stored_bytes
        elif isinstance(error, FrameError):
            self._corrupt[key] = None


def _verify_all(work: Sequence["partial[FrameError | None]"]) -> list[FrameError | None]:
    return [check() for check in work]


def _frames_for(loads: Sequence[Load]) -> list[memoryview]:
    buffer = aligned_buffer(sum(load.length for load in loads))
    frames, at = [], 0
    for load in loads:
        frames.append(buffer[at : at + load.length])
        at += load.length
    return frames
