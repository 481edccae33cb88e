"""The SSD tier: an append-only log of frames, and LMDB to find them again.

Durability. A batch is appended while its checksums are verified, and each segment it touches is
synced once. Then it is durable: an LMDB commit makes all its sound frames known, beside the batches
that follow where the batch only adds (`kvstore.tiers.ssd.committer`), since the next open adopts
whole frames behind the index's mark of the log's end, and cuts what is torn
(`kvstore.tiers.ssd.recovery`). An entry therefore never names bytes that a crash could still take
away. What takes entries away is committed before it returns; entries leave LMDB before their
segment's file is deleted (`drop_segment` insists). A segment is synced before the next one is
begun, so only the log's last segment can end torn.

Failure. A failed write or commit gives up every place of its batch and raises `DiskError`. A commit
that fails after its batch was acknowledged is tried again with the next batch, which fails if it
fails again. The segment whose sync failed takes no more frames, since the kernel may have dropped
the pages and a later sync would not say so. Whatever was indexed before stays readable.

Concurrency. `place`, `mark_dead` and the rest of the books belong to the core thread; one batch is
written at a time; reads run beside it, many at a time from one thread (`kvstore.tiers.ssd.aio`),
and a segment's file is not closed under a reader.

True size. `used_bytes` is `st_blocks` of everything in the directory. `place` promises room under
the budget for what is on its way as well, index growth included, and each batch looks at the free
space of the file system again before it writes.

References: Rosenblum and Ousterhout, "The Design and Implementation of a Log-Structured File
System" (segments, compaction); Rebello et al., "Can Applications Recover from fsync Failures?".
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from kvstore.clock import Clock, SystemClock
from kvstore.config import SsdConfig
from kvstore.errors import StoreFormatError
from kvstore.tiers.base import Location, ReadItem, Recovered, WriteItem
from kvstore.tiers.frame import FrameError
from kvstore.tiers.ssd.directory import Directory, open_directory
from kvstore.tiers.ssd.files import FileSystem, OsFileSystem, disk_error
from kvstore.tiers.ssd.index import IndexBroken, IndexOpener, LmdbIndex
from kvstore.tiers.ssd.reader import LogReader
from kvstore.tiers.ssd.recovery import Opened, Recovery
from kvstore.tiers.ssd.segments import SegmentFiles
from kvstore.tiers.ssd.space import SegmentBook, Space
from kvstore.tiers.ssd.writer import LogWriter

_log = logging.getLogger(__name__)


class SsdTier:
    """`LogTier` over a directory. Made by `open`."""

    def __init__(
        self,
        files: FileSystem,
        directory: Directory,
        opened: Opened,
        config: SsdConfig,
        clock: Clock,
        direct: bool,
    ) -> None:
        self._files = files
        self._directory = directory
        self._segments = SegmentFiles(files, directory.segments_path, directory.store_id, direct)
        # A file may have been renamed: no new segment may take its name.
        taken = (opened.log_end.segment, *(s.name_number for s in opened.segments.values()))
        self._space = Space(
            config.budget_bytes, config.segment_bytes, config.free_floor_bytes, 1 + max(taken)
        )
        for number, found in opened.segments.items():
            self._segments.add(number, found.path)
            self._space.add(number, self._book(number, opened, config))
        self._reader = LogReader(files, self._segments, config.queue_depth_max)
        self._writer = LogWriter(
            files, directory, opened, self._segments, self._space, config, clock
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        config: SsdConfig,
        clock: Clock | None = None,
        files: FileSystem | None = None,
        open_index: IndexOpener = LmdbIndex,
        stop: Event | None = None,
    ) -> tuple["SsdTier", Recovered]:
        """Open or make the store in `directory`, repairing what a crash left. Looking for every
        frame where the index is lost takes its time; `stop`, set on another thread, ends it with
        `Unavailable`.

        Raises `StoreLocked`, `StoreFormatError`, and `DiskError` where the directory can't be made,
        read or written. What had to be repaired is logged and in `Recovered.notes`.
        """
        files, clock = files or OsFileSystem(), clock or SystemClock()
        directory = Path(directory)
        try:
            opened_dir = open_directory(files, directory, clock.wall_s())
        except OSError as e:
            raise disk_error("opening the store in", directory, e) from e
        try:
            direct = config.direct_io == "auto" and files.direct_works(opened_dir.path)
            recovery = Recovery(files, opened_dir, open_index, config.index_map_bytes_max, stop)
            opened = recovery.run(config.sync)
            try:
                tier = cls(files, opened_dir, opened, config, clock, direct)
            except BaseException:
                opened.index.close(clean=False)
                raise
        except OSError as e:
            files.close(opened_dir.lock)
            raise disk_error("opening the store in", directory, e) from e
        except IndexBroken as e:
            files.close(opened_dir.lock)
            raise StoreFormatError(f"the index of {directory} broke while it was built: {e}") from e
        except BaseException:
            files.close(opened_dir.lock)
            raise
        for note in opened.recovered.notes:
            _log.warning("%s", note)
        return tier, opened.recovered

    def _book(self, number: int, opened: Opened, config: SsdConfig) -> SegmentBook:
        found, end = opened.segments[number], opened.ends[number]
        _, live_bytes = opened.contents.get(number, (0, 0))
        goes_on = number == opened.log_end.segment and number not in opened.sealed
        goes_on = goes_on and end < config.segment_bytes
        return SegmentBook(end, live_bytes, 0, self._files.disk_bytes(found.path), not goes_on)

    # Books: the core thread

    @property
    def budget_bytes(self) -> int:
        return self._space.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    @property
    def live_bytes(self) -> int:
        return self._space.live_bytes

    @property
    def tenant_secret(self) -> bytes:
        return self._directory.tenant_secret

    def place(self, stored_bytes: int, compaction: bool = False) -> Location | None:
        return self._space.place(stored_bytes, compaction)

    def mark_dead(self, location: Location, length: int) -> None:
        self._space.mark_dead(location, length)

    def victim_segment(self) -> int | None:
        return self._space.victim()

    def live_in(self, segment: int) -> int:
        return self._space.live_in(segment)

    # Writing: one worker at a time

    def put_namespace(self, namespace_id: bytes, descriptor: bytes) -> int:
        return self._writer.put_namespace(namespace_id, descriptor)

    def write_batch(
        self, items: Sequence[WriteItem], removes: Sequence[bytes] = ()
    ) -> list[FrameError | None]:
        return self._writer.write_batch(items, removes)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._writer.write_batch((), keys)

    def drop_segment(self, segment: int) -> None:
        self._writer.drop_segment(segment)

    def refresh(self) -> None:
        self._writer.refresh()

    # Reading: any number of workers

    def read(self, location: Location, into: memoryview) -> None:
        (error,) = self.read_batch([ReadItem(location, into)])
        if error is not None:
            raise error

    def read_batch(
        self, items: Sequence[ReadItem], arrived: Callable[[int], None] | None = None
    ) -> list[Exception | None]:
        return self._reader.read_batch(items, arrived)

    # The end

    def check_integrity(self) -> None:
        self._space.check_integrity()
        self._writer.check_integrity()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._segments.close()
            self._files.close(self._directory.lock)
