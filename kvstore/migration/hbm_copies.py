"""Copies between DRAM and HBM: queued on a device's streams, and waited for.

These functions block, and run in workers. What the host sends is verified on its way out, and what
comes back is verified on arrival; what happens to bytes inside a device is seen no earlier than
that.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.migration.promotion import Load
from kvstore.migration.workers import Loaded
from kvstore.tiers.base import Slot, SlotTier
from kvstore.tiers.frame import FrameError, verify_frame
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.device import DeviceError, DeviceHangs, Event, Stream


@dataclass(frozen=True, slots=True)
class CopyIn:
    """One frame on its way into HBM: from `source` in DRAM to `target`."""

    row: int
    key: bytes
    namespace_id: bytes
    source: Slot
    target: Slot


@dataclass(slots=True)
class HbmJob:
    """Copies that are made at the same time: `loads` back to DRAM, each into its slot, and
    `copies` in."""

    loads: list[Load] = field(default_factory=list)
    copies: list[CopyIn] = field(default_factory=list)
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.copies)


@dataclass(slots=True)
class HbmResult:
    """What became of a job: per load, and per copy None, a `FrameError` of what DRAM held, or a
    `DeviceError`."""

    loaded: list[Loaded]
    errors: list[Exception | None]


@dataclass(slots=True)
class _Queued:
    """Work on one device's stream, and the event behind it."""

    items: list[int] = field(default_factory=list)
    event: Event | None = None
    error: DeviceError | None = None


class HbmCopies:
    """See the module. `copy_s_max`: until a device is taken to hang. `verify_threads`: that check
    frames on their way in; one alone is slower than a GPU's bus."""

    def __init__(
        self, hbm: HbmTier, dram: SlotTier, copy_s_max: float, verify_threads: int = 1
    ) -> None:
        self._hbm, self._dram, self._copy_s_max = hbm, dram, copy_s_max
        self._verifiers: ThreadPoolExecutor | None = None
        if verify_threads > 1:
            self._verifiers = ThreadPoolExecutor(verify_threads, "kvstore-device-verify")
        self._idle = threading.Condition()
        self._under_way = 0
        self._kept: list[memoryview] = []
        """Memory that a hanging device may still touch."""

    def run(self, job: HbmJob) -> HbmResult:
        """Both directions at once, each on its own stream."""
        targets = [self._dram.view(load.slot) for load in job.loads if load.slot is not None]
        sources = [self._dram.view(copy.source) for copy in job.copies]
        errors: list[Exception | None] = [None] * len(job.copies)
        with self._counted():
            back = self._queue_loads(job.loads, targets)
            into = self._queue_copies(job.copies, sources, errors)
            for i, error in self._settle(into, sources).items():
                errors[i] = error if isinstance(error, DeviceHangs) else errors[i] or error
            loaded = _verified(job.loads, targets, self._settle(back, targets))
        return HbmResult(loaded, errors)

    def read(
        self, loads: Sequence[Load], frames: Sequence[memoryview]
    ) -> tuple[list[Loaded], float]:
        """Frames to the host, each into its memory, and verified. Also the seconds that the copies
        took, verification excluded."""
        with self._counted():
            began = time.perf_counter()
            errors = self._settle(self._queue_loads(loads, frames), frames)
            seconds = time.perf_counter() - began
        return _verified(loads, frames, errors), seconds

    def close(self, timeout_s: float) -> bool:
        """Wait for copies under way. Whether nothing is left, so that the pools may be closed."""
        if self._verifiers is not None:
            self._verifiers.shutdown(wait=False)
        with self._idle:
            done = self._idle.wait_for(lambda: not self._under_way, timeout_s)
        return done and not self._kept

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, n: int) -> None:
        with self._idle:
            self._under_way += n
            self._idle.notify_all()

    # queueing

    def _queue(
        self, slots: Iterable[Slot], enqueue: Callable[[Stream, int, int], None]
    ) -> list[_Queued]:
        """`enqueue(stream, which, offset)` for each slot, and an event per device behind it."""
        by_device: dict[int, list[tuple[int, int]]] = {}
        for i, slot in enumerate(slots):
            device, offset = self._hbm.place(slot)
            by_device.setdefault(device, []).append((i, offset))
        return [self._queue_on(device, items, enqueue) for device, items in by_device.items()]

    def _queue_on(
        self,
        device: int,
        items: Sequence[tuple[int, int]],
        enqueue: Callable[[Stream, int, int], None],
    ) -> _Queued:
        queued = _Queued([i for i, _ in items])
        try:
            with self._hbm.stream(device) as stream:
                try:
                    for i, offset in items:
                        enqueue(stream, i, offset)
                except DeviceError as e:
                    queued.error = e
                # also where one was refused: those before it are on their way
                queued.event = stream.record()
        except DeviceError as e:
            queued.error = DeviceHangs(f"nobody can tell when queued copies are done: {e}")
        return queued

    def _queue_loads(self, loads: Sequence[Load], frames: Sequence[memoryview]) -> list[_Queued]:
        slots = [load.source for load in loads if load.source is not None]
        return self._queue(slots, lambda stream, i, offset: stream.copy_out(frames[i], offset))

    def _queue_copies(
        self,
        copies: Sequence[CopyIn],
        frames: Sequence[memoryview],
        errors: list[Exception | None],
    ) -> list[_Queued]:
        """Each frame is verified before it is queued, while those before it are on their way."""

        def verify(copy: CopyIn, frame: memoryview) -> FrameError | None:
            return verify_frame(frame, copy.key, copy.namespace_id)

        ahead = self._verifiers
        pairs = zip(copies, frames, strict=True)
        verdicts = [ahead.submit(verify, *pair) for pair in pairs] if ahead is not None else []

        def enqueue(stream: Stream, i: int, offset: int) -> None:
            errors[i] = verdicts[i].result() if verdicts else verify(copies[i], frames[i])
            if errors[i] is None:
                stream.copy_in(offset, frames[i])

        return self._queue([copy.target for copy in copies], enqueue)

    # waiting

    def _settle(
        self, queued: Sequence[_Queued], frames: Sequence[memoryview]
    ) -> dict[int, DeviceError]:
        """Wait for all; which failed, and why."""
        failed: dict[int, DeviceError] = {}
        deadline = time.monotonic() + self._copy_s_max
        for work in queued:
            error = self._outcome(work, deadline - time.monotonic())
            if error is not None:
                failed |= dict.fromkeys(work.items, error)
            if isinstance(error, DeviceHangs):
                self._kept += [frames[i] for i in work.items]
        return failed

    def _outcome(self, work: _Queued, timeout_s: float) -> DeviceError | None:
        if work.event is None:
            return work.error
        try:
            if work.event.wait(max(0.0, timeout_s)):
                return work.error
        except DeviceError as e:
            return e
        return DeviceHangs(f"a copy was not done after {self._copy_s_max:g} s (hbm.copy_s_max)")


def _verified(
    loads: Sequence[Load], frames: Sequence[memoryview], errors: dict[int, DeviceError]
) -> list[Loaded]:
    return [
        Loaded(load, frame, errors.get(i) or verify_frame(frame, load.key, load.namespace_id))
        for i, (load, frame) in enumerate(zip(loads, frames, strict=True))
    ]
