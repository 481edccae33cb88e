"""The read path: lease, frames from the fastest tier, checksums, and what comes of a wrong one."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from kvstore.block import Outcome, Tier
from kvstore.errors import InvalidRequest, MessageTooLarge
from kvstore.index import READY
from kvstore.migration.workers import Lane, check_frame
from kvstore.namespace import Layout
from kvstore.store.driver import Driver
from kvstore.store.loads import Frame, Loads, Waiter
from kvstore.store.read_ahead import ReadAhead
from kvstore.store.types import BlockFrames, Gathered
from kvstore.tiers.frame import FrameError, peek_checksums, runs_of, slices_of

_DRAM = int(Tier.DRAM)
_READ_FROM = {tier: f"read_{str(tier.name).lower()}_blocks" for tier in Tier}
_AT_ONCE_BLOCKS = 128
"""Headers of more are not looked at on the event loop's own time."""
Checked = tuple[bytes, ...] | FrameError


class Reads:
    """See the module."""

    def __init__(self, driver: Driver, loads: Loads) -> None:
        self._driver, self._loads = driver, loads
        self._ahead = ReadAhead(driver, loads)

    async def read(
        self, lease_id: int, keys: Sequence[bytes], sections: Sequence[int] | None, verify: bool
    ) -> list[BlockFrames]:
        """See `Engine.read`."""
        core = self._driver.core
        number, rows = core.rows_to_read(lease_id, keys, self._driver.now_s())
        layout = core.namespaces.layout(number)
        wanted = self._wanted(layout, sections)
        self._check_size(layout, wanted, len(keys))
        pinned = [row for row in rows if row is not None]
        self._driver.pin(pinned)
        try:
            frames = await self._fetch(lease_id, rows)
            try:
                checked = await self._check(keys, frames, layout, wanted, verify)
            except BaseException:
                _release(frames)
                raise
            places = slices_of(layout.section_bytes, tuple(wanted))
            return [
                self._result(*each, places)
                for each in zip(keys, rows, frames, checked, strict=True)
            ]
        finally:
            self._driver.unpin(pinned)
            self._driver.pump()

    def gather(
        self, lease_id: int, keys: Sequence[bytes], sections: Sequence[int] | None
    ) -> Gathered | None:
        """See `Engine.gather`."""
        core = self._driver.core
        number, rows = core.rows_to_read(lease_id, keys, self._driver.now_s())
        index, r = core.index, core.residency
        if not all(row is None or index.tiers[row] & _DRAM for row in rows):
            return None
        layout = core.namespaces.layout(number)
        wanted = self._wanted(layout, sections)
        self._check_size(layout, wanted, len(keys))
        if self._loads.came_ahead([index.slot[row] for row in rows if row is not None]):
            return None
        runs, body, checksums, pages = runs_of(layout.section_bytes, wanted), [], [], []
        for key, row in zip(keys, rows, strict=True):
            if row is None:
                continue
            view = r.dram.view(r.slot_of(row))
            found = peek_checksums(view, key, layout.section_bytes)
            if found is None:
                return None  # the long way knows what to do about it
            pages.append(index.slot[row])
            checksums += [found[i] for i in wanted]
            body += [view[first:end] for first, end in runs]
        r.use_all(pages)
        core.metrics.add("read_dram_blocks", len(pages))
        core.metrics.add("read_miss_blocks", len(keys) - len(pages))
        core.metrics.add("read_payload_bytes", sum(map(len, body)))
        outcomes = [Outcome.MISS if row is None else Outcome.HIT for row in rows]
        return Gathered(
            outcomes,
            [layout.section_bytes[i] for i in wanted],
            b"".join(checksums),
            body,
            partial(self._end_use, pages),
        )

    def _end_use(self, pages: list[int]) -> None:
        self._driver.core.residency.end_use_all(pages)
        pages.clear()
        self._driver.pump()

    def _wanted(self, layout: Layout, sections: Sequence[int] | None) -> list[int]:
        most = len(layout.sections)
        wanted = list(range(most)) if sections is None else list(sections)
        wrong = [i for i in wanted if not 0 <= i < most]
        if wrong:
            raise InvalidRequest(f"section {wrong[0]} is none of the layout's {most} sections")
        return wanted

    def _check_size(self, layout: Layout, wanted: Sequence[int], blocks: int) -> None:
        size = blocks * sum([layout.section_bytes[i] for i in wanted])
        limit = self._driver.config.limits.read_bytes_max
        if size > limit:
            raise MessageTooLarge(
                f"{blocks} blocks have {size} B, and one read gives {limit} B "
                "(limits.read_bytes_max); read in parts"
            )

    # frames

    async def _fetch(self, lease_id: int, rows: Sequence[int | None]) -> list[Frame | None]:
        """A frame per row, in use for this reader; None for a miss."""
        core = self._driver.core
        frames: list[Frame | None] = [None] * len(rows)
        to_load: list[int] = []
        for i, row in enumerate(rows):
            if row is None:
                continue
            if core.index.tiers[row] & _DRAM:
                frames[i] = self._loads.in_slot(core.residency.slot_of(row))
            else:
                to_load.append(i)
        on_the_way = [row for i in to_load if (row := rows[i]) is not None]
        begun_before = any(map(core.promotion.is_loading, on_the_way))
        waiters = self._loads.request(on_the_way)
        self._ahead.follow(lease_id, rows)
        if waiters:
            began = time.perf_counter()
            try:
                loaded = await self._wait(waiters)
            except BaseException:
                _release(frames)
                raise
            if not begun_before:
                self._observe(loaded, time.perf_counter() - began)
            for i, frame in zip(to_load, loaded, strict=True):
                frames[i] = frame
        return frames

    def _observe(self, loaded: Sequence[Frame | None], seconds: float) -> None:
        """What a reader waited for the SSD, however many reads that were at a time."""
        from_ssd = [frame for frame in loaded if frame is not None and frame.tier is Tier.SSD]
        if from_ssd and len(from_ssd) == len(loaded):
            self._driver.observe(Tier.SSD, sum(len(frame.view) for frame in from_ssd), seconds)

    async def _wait(self, waiters: list[Waiter]) -> list[Frame | None]:
        try:
            await asyncio.wait(waiters, timeout=self._driver.config.limits.disk_wait_s_max)
        except BaseException:
            _give_up(waiters)
            raise
        failed = [w for w in waiters if w.done() and w.exception() is not None]
        if failed:
            _give_up(waiters)
            raise failed[0].exception() or AssertionError
        late = [not waiter.done() and waiter.cancel() for waiter in waiters]
        return [
            None if lost else waiter.result() for lost, waiter in zip(late, waiters, strict=True)
        ]

    # checksums

    async def _check(
        self,
        keys: Sequence[bytes],
        frames: Sequence[Frame | None],
        layout: Layout,
        wanted: Sequence[int],
        verify: bool,
    ) -> list[Checked | None]:
        tasks = [
            partial(
                check_frame,
                frame.view,
                key,
                layout.section_bytes,
                tuple(wanted),
                verify and not frame.verified,
            )
            for key, frame in zip(keys, frames, strict=True)
            if frame is not None
        ]
        if not tasks:
            return [None] * len(frames)
        unchecked = sum(frame is not None and not frame.verified for frame in frames)
        if len(tasks) <= _AT_ONCE_BLOCKS and not (verify and unchecked):
            return self._in_place(frames, _run_all(tasks))
        parts = self._driver.config.migration.verify_workers
        step = -(-len(tasks) // parts)
        began = time.perf_counter()
        results = await asyncio.gather(
            *(
                self._driver.workers.run(Lane.BYTES, partial(_run_all, tasks[at : at + step]))
                for at in range(0, len(tasks), step)
            )
        )
        if verify and unchecked:
            size = unchecked * sum(layout.section_bytes[i] for i in wanted)
            self._driver.observe(Tier.DRAM, size, time.perf_counter() - began)
        return self._in_place(frames, [result for part in results for result in part])

    @staticmethod
    def _in_place(
        frames: Sequence[Frame | None], results: Sequence[Checked | None]
    ) -> list[Checked | None]:
        checked = iter(results)
        return [None if frame is None else next(checked) for frame in frames]

    def _result(
        self,
        key: bytes,
        row: int | None,
        frame: Frame | None,
        checked: Checked | None,
        places: tuple[slice, ...],
    ) -> BlockFrames:
        metrics = self._driver.core.metrics
        if frame is None or checked is None:
            metrics.add("read_miss_blocks")
            return BlockFrames(key, Outcome.MISS)
        if isinstance(checked, FrameError):
            frame.release()
            if row is not None:
                self.quarantine(row, frame, checked)
            metrics.add("read_miss_blocks")
            return BlockFrames(key, Outcome.MISS)
        metrics.add(_READ_FROM[frame.tier])
        view = frame.view.toreadonly()
        sections = tuple(map(view.__getitem__, places))
        metrics.add("read_payload_bytes", sum(map(len, sections)))
        return BlockFrames(
            key=key,
            outcome=Outcome.HIT,
            tier=frame.tier,
            sections=sections,
            checksums=checked,
            _release=frame.release,
        )

    def quarantine(self, row: int, frame: Frame, why: FrameError) -> None:
        """What lies in `frame` is wrong: the copies that it is of go, as far as they are still the
        row's. The row is pinned."""
        r, index = self._driver.core.residency, self._driver.core.index
        if index.state[row] != READY:
            return
        if index.tiers[row] & _DRAM and r.slot_of(row) == frame.slot:
            r.quarantine(row, Tier.DRAM, why)
        if frame.tier is not Tier.DRAM and index.tiers[row] & frame.tier:
            r.quarantine(row, frame.tier, why)


def _run_all(tasks: Sequence["partial[tuple[bytes, ...] | FrameError]"]) -> list[Checked]:
    return [task() for task in tasks]


def _release(frames: Sequence[Frame | None]) -> None:
    for frame in frames:
        if frame is not None:
            frame.release()


def _give_up(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.cancel() and not waiter.cancelled() and waiter.exception() is None:
            _release([waiter.result()])
