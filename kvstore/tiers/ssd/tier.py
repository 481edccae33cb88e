"""The SSD tier: an append-only log of frames, and LMDB to find them again.

Durability. A batch is appended, each segment it touches is synced once, and then one LMDB commit
makes all its frames known. An entry therefore never names bytes that a crash could still take away;
frames without an entry are unfinished business that the next open adopts or cuts
(`kvstore.tiers.ssd.recovery`). Entries leave LMDB before their segment's file is deleted
(`drop_segment` insists). A segment is synced before the next one is begun, so only the log's last
segment can end torn.

Failure. A failed write or commit gives up every place of its batch and raises `DiskError`; the
segment whose sync failed takes no more frames, since the kernel may have dropped the pages and a
later sync would not say so. Whatever was indexed before stays readable.

Concurrency. `place`, `mark_dead` and the rest of the books belong to the core thread; one batch is
written at a time; reads run beside it, and a segment's file is not closed under a reader.

True size. `used_bytes` is `st_blocks` of everything in the directory. `place` promises room under
the budget for what is on its way as well, index growth included, and each batch looks at the free
space of the file system again before it writes.

References: Rosenblum and Ousterhout, "The Design and Implementation of a Log-Structured File
System" (segments, compaction); Rebello et al., "Can Applications Recover from fsync Failures?".
"""

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from kvstore.clock import Clock, SystemClock
from kvstore.config import SsdConfig
from kvstore.errors import DiskError, StoreFormatError
from kvstore.tiers.base import (
    Location,
    NamespaceRow,
    ReadItem,
    Recovered,
    WriteItem,
)
from kvstore.tiers.frame import FrameError, FrameHeader, WrongFrame, check_sections, decode_header
from kvstore.tiers.ssd import entry
from kvstore.tiers.ssd.directory import Directory, open_directory
from kvstore.tiers.ssd.files import FileSystem, OsFileSystem, disk_error
from kvstore.tiers.ssd.index import IndexBroken, IndexChange, IndexOpener, LmdbIndex
from kvstore.tiers.ssd.recovery import Opened, Recovery
from kvstore.tiers.ssd.segments import SegmentFiles
from kvstore.tiers.ssd.space import SegmentBook, Space

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_RUN_ITEMS_MAX = 256


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
        self._index = opened.index
        self._config = config
        self._clock = clock
        self._writer = threading.Lock()
        self._log_end = opened.log_end
        self._namespaces = {row.number: row for row in opened.recovered.namespaces}
        self._segments = SegmentFiles(files, directory.segments_path, directory.store_id, direct)
        self._space = Space(
            config.budget_bytes,
            config.segment_bytes,
            config.free_floor_bytes,
            opened.log_end.segment + 1,
        )
        self._entries: Counter[int] = Counter()
        self._take_stock(opened)

    @classmethod
    def open(
        cls,
        directory: Path,
        config: SsdConfig,
        clock: Clock | None = None,
        files: FileSystem | None = None,
        open_index: IndexOpener = LmdbIndex,
    ) -> tuple["SsdTier", Recovered]:
        """Open or make the store in `directory`, repairing what a crash left.

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
            recovery = Recovery(files, opened_dir, open_index, config.index_map_bytes_max)
            opened = recovery.run(config.sync)
            tier = cls(files, opened_dir, opened, config, clock, direct)
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

    def _take_stock(self, opened: Opened) -> None:
        last = opened.log_end.segment
        for number, found in opened.segments.items():
            end = opened.ends[number]
            sealed = number != last or not found.header or end >= self._config.segment_bytes
            disk_bytes = self._files.disk_bytes(found.path)
            self._entries[number], live_bytes = opened.contents.get(number, (0, 0))
            self._space.add(number, SegmentBook(end, live_bytes, 0, disk_bytes, sealed))
            self._segments.add(number, found.path)
        self._measure(())

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
        with self._writer:
            row = next(
                (r for r in self._namespaces.values() if r.namespace_id == namespace_id), None
            )
            if row is not None and row.descriptor == descriptor:
                return row.number
            number = row.number if row else 1 + max(self._namespaces, default=0)
            row = NamespaceRow(number, namespace_id, descriptor)
            self._commit(IndexChange(namespaces=(row,)))
            self._namespaces[number] = row
            return number

    def write_batch(
        self, items: Sequence[WriteItem], removes: Sequence[bytes] = ()
    ) -> list[FrameError | None]:
        with self._writer:
            verdicts: list[FrameError | None] = []
            good: list[tuple[WriteItem, FrameHeader]] = []
            for item in items:
                checked = self._check(item)
                verdicts.append(checked if isinstance(checked, FrameError) else None)
                if isinstance(checked, FrameHeader):
                    good.append((item, checked))
            bad = [i for i, verdict in zip(items, verdicts, strict=True) if verdict is not None]
            self._space.settle(_places(bad), written=False)
            if good or removes:
                self._write(good, removes)
            return verdicts

    def _check(self, item: WriteItem) -> FrameHeader | FrameError:
        try:
            header = decode_header(item.frame)
        except FrameError as e:
            return e
        row = self._namespaces.get(item.namespace_no)
        if header.key != item.key or row is None or header.namespace_id != row.namespace_id:
            return WrongFrame(f"the frame of {header.key.hex()}, not of {item.key.hex()}")
        if header.stored_length != len(item.frame):
            return WrongFrame(f"a frame of {header.stored_length} B in {len(item.frame)} B")
        return check_sections(header, item.frame) or header

    def _write(self, good: list[tuple[WriteItem, FrameHeader]], removes: Sequence[bytes]) -> None:
        items = sorted((item for item, _ in good), key=lambda i: i.location)
        puts = [
            (item.key, entry.encode_entry(header, item.namespace_no, item.location))
            for item, header in good
        ]
        end = self._log_end
        if items:
            last = items[-1]
            end = max(end, Location(last.location.segment, last.location.offset + len(last.frame)))
        try:
            if items:
                self._keep_floor(sum(len(i.frame) for i in items))
                for segment, group in groupby(items, key=lambda i: i.location.segment):
                    self._append(segment, list(group))
            self._commit(IndexChange(puts, removes, end if end != self._log_end else None))
        except DiskError:
            self._settle(items, written=False)
            raise
        self._log_end = end
        self._entries.update(item.location.segment for item in items)
        self._settle(items, written=True)

    def _settle(self, items: Sequence[WriteItem], written: bool) -> None:
        # Measure first: a settled place no longer counts on top of what the disk holds.
        try:
            self._measure({item.location.segment for item in items})
        except DiskError as e:
            _log.warning("sizes on disk are not up to date: %s", e)
        self._space.settle(_places(items), written)

    def _keep_floor(self, write_bytes: int) -> None:
        path = self._directory.path
        free = self._attempt("looking at", path, lambda: self._files.free_bytes(path))
        if not self._space.leaves_floor(write_bytes, free):
            self._measure(())
            raise disk_error(
                "writing to",
                path,
                OSError(
                    errno.ENOSPC,
                    f"{free} B are free, and {write_bytes} B more would pass the floor of "
                    f"{self._space.free_floor_bytes} B (ssd.free_floor_bytes)",
                ),
            )

    def _append(self, segment: int, items: list[WriteItem]) -> None:
        path = self._segments.path(segment)
        if segment not in self._segments:
            created = self._clock.wall_s()
            self._attempt("making", path, lambda: self._segments.create(segment, created))
        try:
            with self._segments.use(segment) as handle:
                for run in _runs(items, lambda i: (i.location, len(i.frame))):
                    frames = [item.frame for item in run]
                    self._files.pwrite(handle, frames, run[0].location.offset)
                if self._config.sync:
                    self._sync(segment, handle)
        except OSError as e:
            raise disk_error("writing to", path, e) from e

    def _sync(self, segment: int, handle: int) -> None:
        try:
            self._files.fdatasync(handle)
        except OSError:
            self._space.seal(segment)
            raise

    def _commit(self, change: IndexChange) -> None:
        path = self._directory.index_path
        displaced = self._attempt("writing to", path, lambda: self._index.commit(change))
        self._entries.subtract(entry.entry_segment(value) for value in displaced)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.write_batch((), keys)

    def drop_segment(self, segment: int) -> None:
        with self._writer:
            self._space.may_drop(segment)
            if self._entries[segment]:
                raise ValueError(
                    f"segment {segment} still has {self._entries[segment]} index entries; "
                    "remove or overwrite them first"
                )
            path = self._segments.path(segment)
            self._attempt("deleting", path, lambda: self._segments.drop(segment))
            self._space.dropped(segment)
            del self._entries[segment]
            self._measure(())

    def refresh(self) -> None:
        with self._writer:
            self._measure(self._space.numbers)

    def _measure(self, segments: Iterable[int]) -> None:
        root = self._directory.path

        def look() -> None:
            sizes = {
                n: self._files.disk_bytes(self._segments.path(n))
                for n in segments
                if n in self._segments
            }
            other = self._files.disk_bytes(root, deep=False)
            for name in self._files.listdir(root):
                other += self._files.disk_bytes(root / name, deep=name != "segments")
            index = self._files.disk_bytes(self._directory.index_path)
            self._space.measured(sizes, other, index, self._files.free_bytes(root))

        self._attempt("looking at", root, look)

    @staticmethod
    def _attempt(doing: str, path: Path, action: Callable[[], _Item]) -> _Item:
        try:
            return action()
        except OSError as e:
            raise disk_error(doing, path, e) from e

    # Reading: any number of workers

    def read(self, location: Location, into: memoryview) -> None:
        (error,) = self.read_batch([ReadItem(location, into)])
        if error is not None:
            raise error

    def read_batch(self, items: Sequence[ReadItem]) -> list[Exception | None]:
        errors: dict[int, Exception] = {}
        order = sorted(range(len(items)), key=lambda i: items[i].location)
        for run in _runs(order, lambda i: (items[i].location, len(items[i].into))):
            errors.update(self._read_run(run, items))
        return [errors.get(i) for i in range(len(items))]

    def _read_run(self, run: list[int], items: Sequence[ReadItem]) -> dict[int, Exception]:
        first = items[run[0]].location
        path = self._segments.path(first.segment)
        try:
            with self._segments.use(first.segment) as handle:
                buffers = [items[i].into for i in run]
                got = self._files.preadv(handle, buffers, first.offset)
        except OSError as e:
            error = disk_error("reading", path, e)
            return dict.fromkeys(run, error)
        short = OSError(errno.EIO, f"the file ends at {first.offset + got}")
        errors: dict[int, Exception] = {}
        for i in run:
            got -= len(items[i].into)
            if got < 0:
                errors[i] = disk_error("reading", path, short)
        return errors

    # The end

    def check_integrity(self) -> None:
        self._space.check_integrity()
        for number in self._space.numbers:
            assert self._entries[number] >= 0, f"segment {number} has entries below zero"
        stray = [n for n, entries in self._entries.items() if entries and n not in self._segments]
        assert not stray, f"entries point into segments that are not there: {stray}"

    def close(self) -> None:
        with self._writer:
            try:
                self._attempt(
                    "closing", self._directory.index_path, lambda: self._index.close(clean=True)
                )
            finally:
                self._segments.close()
                self._files.close(self._directory.lock)


def _places(items: Iterable[WriteItem]) -> list[tuple[Location, int]]:
    return [(item.location, len(item.frame)) for item in items]


def _runs(
    items: Sequence[_Item], where: Callable[[_Item], tuple[Location, int]]
) -> Iterator[list[_Item]]:
    """Split sorted items into runs that lie one behind the other in one segment."""
    run: list[_Item] = []
    expected: Location | None = None
    for item in items:
        location, length = where(item)
        if run and (location != expected or len(run) == _RUN_ITEMS_MAX):
            yield run
            run = []
        run.append(item)
        expected = Location(location.segment, location.offset + length)
    if run:
        yield run
