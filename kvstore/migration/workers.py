"""What runs off the core thread: transfers, checksums, copies. No function here touches the core.

Lanes with threads of their own, so that a slow disk does not keep checksums waiting: `LOG` (one
thread: the log is written by one hand), `READ` (reads from SSD), `BYTES` (memory only) and `DEVICE`
(copies to and from HBM).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash

from kvstore.block import Buffer
from kvstore.config import MigrationConfig
from kvstore.errors import DiskError, Unavailable
from kvstore.migration.log_lane import Append, LogJob, LogResult
from kvstore.migration.promotion import Load
from kvstore.tiers.base import LogTier, ReadItem, SlotTier, WriteItem
from kvstore.tiers.frame import (
    FRAME_ALIGN_BYTES,
    BlockName,
    BlockShape,
    FrameError,
    HeaderCorrupt,
    SectionCorrupt,
    WrongFrame,
    decode_header,
    peek_checksums,
    slices_of,
    verify_frame,
)
from kvstore.tiers.ssd.files import aligned_buffer

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Lane(Enum):
    """Which threads a piece of work may use."""

    LOG = "log"
    READ = "read"
    BYTES = "bytes"
    DEVICE = "device"


class Workers(Protocol):
    """Runs blocking functions beside the event loop."""

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        """The function's result, or its exception; `Unavailable` after `close`."""
        ...

    def close(self) -> None:
        """Take nothing more. What has begun ends by itself."""
        ...


class ThreadWorkers:
    """`Workers` on threads, which start when there is something to do."""

    def __init__(self, config: MigrationConfig, device_threads: int = 1) -> None:
        self._closed = False
        self._pools = {
            lane: ThreadPoolExecutor(threads, thread_name_prefix=f"kvstore-{lane.value}")
            for lane, threads in (
                (Lane.LOG, 1),
                (Lane.READ, config.read_workers),
                (Lane.BYTES, config.verify_workers),
                (Lane.DEVICE, device_threads),
            )
        }

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        if self._closed:
            raise Unavailable("the store is closing")
        return await asyncio.get_running_loop().run_in_executor(self._pools[lane], work)

    def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class LogWriter:
    """Executes the jobs of a `LogLane`, one at a time. `numbers`: the tier's number of every
    namespace that it knew at open; others come with a job before their first frame."""

    def __init__(self, ssd: LogTier, dram: SlotTier, numbers: dict[bytes, int]) -> None:
        self._ssd, self._dram, self._numbers = ssd, dram, numbers

    def run(self, job: LogJob) -> LogResult:
        """Blocks. Errors come back in the result: what was not foreseen must not stop the log."""
        result = LogResult([None] * len(job.appends))
        try:
            for namespace_id, descriptor in job.namespaces.items():
                self._numbers[namespace_id] = self._ssd.put_namespace(namespace_id, descriptor)
            frames = self._frames(job, result)
            self._append(job, frames, result)
            if job.drop is not None:
                self._ssd.drop_segment(job.drop)
            if job.refresh:
                self._ssd.refresh()
        except DiskError as e:
            result.failure = e
        except Exception as e:
            _log.exception("a job of the log failed")
            result.failure = DiskError(f"the log's writer failed: {e!r}")
        return result

    def _frames(self, job: LogJob, result: LogResult) -> list[memoryview]:
        """Every append's frame; what DRAM does not hold is read into a buffer."""
        size = sum(item.length for item in job.appends if item.slot is None)
        buffer = aligned_buffer(size) if size else memoryview(b"")
        frames, reads, at = [], [], 0
        for i, item in enumerate(job.appends):
            if item.slot is not None:
                frames.append(self._dram.view(item.slot))
                continue
            assert item.source is not None
            frames.append(buffer[at : at + item.length])
            reads.append((i, ReadItem(item.source, frames[-1])))
            at += item.length
        outcomes = self._ssd.read_batch([read for _, read in reads]) if reads else []
        for (i, read), error in zip(reads, outcomes, strict=True):
            if error is not None:
                result.errors[i] = error
                # refused as no frame when it is written, which settles its place
                read.into[:FRAME_ALIGN_BYTES] = bytes(FRAME_ALIGN_BYTES)
        return frames

    def _append(self, job: LogJob, frames: Sequence[memoryview], result: LogResult) -> None:
        items = [self._write_item(*each) for each in zip(job.appends, frames, strict=True)]
        for i, error in enumerate(self._ssd.write_batch(items, job.removes)):
            result.errors[i] = result.errors[i] or error

    def _write_item(self, item: Append, frame: memoryview) -> WriteItem:
        return WriteItem(item.location, item.key, self._numbers[item.namespace_id], frame)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a read of one frame gave: `error` is None, a `FrameError` or a `DiskError`."""

    load: Load
    frame: memoryview
    error: Exception | None


def read_loads(
    ssd: LogTier, loads: Sequence[Load], frames: Sequence[memoryview]
) -> tuple[list[Loaded], float]:
    """Read frames that lie on SSD, each into its memory, and verify each while others are on their
    way. Also the seconds that took."""
    began = time.perf_counter()
    wrong: list[Exception | None] = [None] * len(loads)

    def verify(i: int) -> None:
        wrong[i] = verify_frame(frames[i], loads[i].key, loads[i].namespace_id)

    places = [load.location for load in loads if load.location is not None]
    items = [ReadItem(place, frame) for place, frame in zip(places, frames, strict=True)]
    errors = ssd.read_batch(items, verify)
    seconds = time.perf_counter() - began
    return [
        Loaded(load, frame, error or bad)
        for load, frame, error, bad in zip(loads, frames, errors, wrong, strict=True)
    ], seconds


class Filling(NamedTuple):
    """One block's way into its slot. `sections`: a buffer each, or one buffer with all of them, one
    behind the other. `checksums`: of the sections, packed; empty where the caller has none."""

    frame: memoryview
    name: BlockName
    shape: BlockShape
    sections: Sequence[Buffer]
    checksums: bytes


def fill_frame(filling: Filling) -> bool:
    """Copy the sections into the frame, checksum what lies there, and write the header. Whether
    that is what the caller's checksums promise; if not, the frame is of no use."""
    frame, name, shape, sections, checksums = filling
    target, spans = np.frombuffer(frame, np.uint8), shape.spans
    # NumPy copies without the GIL, a memoryview does not
    if len(sections) == 1:
        np.copyto(target[spans[0][0] : spans[-1][1]], as_bytes(sections[0]))
    else:
        for (start, end), source in zip(spans, sections, strict=True):
            np.copyto(target[start:end], as_bytes(source))
    digest = xxhash.xxh3_128_digest
    digests = [digest(frame[start:end]) for start, end in spans]
    if checksums and b"".join(digests) != checksums:
        return False
    shape.seal(frame, name, digests)
    return True


def as_bytes(buffer: Buffer) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """A section as its bytes. Raises `ValueError` where it is not contiguous."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("a section must be contiguous in memory")
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def check_frame(
    frame: memoryview,
    key: bytes,
    section_bytes: tuple[int, ...],
    wanted: tuple[int, ...],
    verify: bool,
) -> tuple[bytes, ...] | FrameError:
    """The wanted sections' checksums in the frame's header, which must be `key`'s and have sections
    of `section_bytes`; with `verify` their bytes are checked too. Or what is wrong."""
    known = peek_checksums(frame, key, section_bytes)
    if known is None:
        return _wrong_header(frame, key)
    checksums = tuple(map(known.__getitem__, wanted))
    if verify:
        places = slices_of(section_bytes, wanted)
        for i, place, checksum in zip(wanted, places, checksums, strict=True):
            if xxhash.xxh3_128_digest(frame[place]) != checksum:
                return SectionCorrupt(i)
    return checksums


def _wrong_header(frame: memoryview, key: bytes) -> FrameError:
    """Why a header is not that of `key`'s frame with the sections of its layout."""
    try:
        header = decode_header(frame)
    except FrameError as e:
        return e
    if header.key != key:
        return WrongFrame(f"the frame of {header.key.hex()}, not of {key.hex()}")
    return HeaderCorrupt("the sections are not those of the namespace's layout")
