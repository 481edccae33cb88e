"""The writing side of the log: batches, namespaces, dropped segments, real sizes.

One call at a time, whole (a lock); the tier's essay (`kvstore.tiers.ssd.tier`) has the order of
steps and why.
"""

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvstore.clock import Clock
from kvstore.config import SsdConfig
from kvstore.errors import DiskError
from kvstore.tiers.base import Location, NamespaceRow, WriteItem
from kvstore.tiers.frame import (
    Codec,
    FrameError,
    WrongFrame,
    fixed_fields,
    header_checksum,
    verify_frame,
)
from kvstore.tiers.ssd import entry
from kvstore.tiers.ssd.committer import Committer
from kvstore.tiers.ssd.directory import Directory
from kvstore.tiers.ssd.files import FileSystem, attempt, disk_error
from kvstore.tiers.ssd.index import IndexChange
from kvstore.tiers.ssd.packed import Packer
from kvstore.tiers.ssd.recovery import Opened
from kvstore.tiers.ssd.segments import SegmentFiles
from kvstore.tiers.ssd.space import Space

_log = logging.getLogger(__name__)
_RUN_ITEMS_MAX = 256


class LogWriter:
    """Everything that changes the directory of an opened log."""

    def __init__(
        self,
        files: FileSystem,
        directory: Directory,
        opened: Opened,
        segments: SegmentFiles,
        space: Space,
        config: SsdConfig,
        clock: Clock,
    ) -> None:
        self._files = files
        self._directory = directory
        self._segments = segments
        self._space = space
        self._sync = config.sync
        packs = config.compression == "zstd"
        self._packer = Packer(config.compression_level) if packs else None
        self._clock = clock
        self._index = opened.index
        self._log_end = opened.log_end
        self._given_up = opened.log_end
        self._unsure: dict[bytes, bytes] = {}
        self._namespaces = {row.number: row for row in opened.recovered.namespaces}
        self._entries = Counter({n: entries for n, (entries, _) in opened.contents.items()})
        self._lock = threading.Lock()
        self._measuring = threading.Lock()
        self._committer = Committer(files, self._commit, self._displaced, space.unindexed)
        self._measure(())

    def put_namespace(self, namespace_id: bytes, descriptor: bytes) -> int:
        """See `LogTier`."""
        with self._lock:
            rows = self._namespaces.values()
            row = next((r for r in rows if r.namespace_id == namespace_id), None)
            if row is not None and row.descriptor == descriptor:
                return row.number
            number = row.number if row else 1 + max(self._namespaces, default=0)
            row = NamespaceRow(number, namespace_id, descriptor)
            self._committer.now(IndexChange(namespaces=(row,)))
            self._namespaces[number] = row
            return number

    def write_batch(
        self, items: Sequence[WriteItem], removes: Sequence[bytes]
    ) -> list[FrameError | None]:
        """See `LogTier`."""
        with self._lock:
            if not items and not removes:
                return []
            try:
                checked = self._append_and_check(items)
                pairs = list(zip(items, checked, strict=True))
                good = [(i, c) for i, c in pairs if isinstance(c, bytes)]
                self._make_known(good, removes, max([self._log_end, *map(_end, items)]))
            except DiskError:
                # Whole frames may lie there: the mark passes them, so that no start adopts them. A
                # segment that was not made has none, and the mark must not say that it is there.
                made = [item for item in items if item.location.segment in self._segments]
                self._given_up = max([self._given_up, *map(_end, made)])
                self._settle(items, written=False)
                raise
            self._settle([i for i, _ in good], written=True)
            self._settle([i for i, c in pairs if isinstance(c, FrameError)], written=False)
            return [c if isinstance(c, FrameError) else None for c in checked]

    def _make_known(
        self, good: Sequence[tuple[WriteItem, bytes]], removes: Sequence[bytes], end: Location
    ) -> None:
        """Commit a batch that is durable: beside the next one where it takes nothing away."""
        puts = [(item.key, value) for item, value in good]
        end = max(end, self._given_up)
        change = IndexChange(puts, removes, end if end != self._log_end else None)
        # what lies before the index's mark is not looked for by the next open
        in_order = all(item.location >= self._log_end for item, _ in good)
        if removes or not in_order or not self._sync:
            self._committer.now(change)
        else:
            self._committer.later(change)
        self._log_end = end
        self._entries.update(item.location.segment for item, _ in good)

    def _append_and_check(self, items: Sequence[WriteItem]) -> list[bytes | FrameError]:
        """Append the frames, and check them meanwhile: what matters is that nothing unchecked is
        committed. Per item its index record, or what is wrong with it."""
        if not items:
            return []
        self._keep_floor(sum(len(i.frame) for i in items))
        writes = [_Write(item.location, self._packed(item.frame), item) for item in items]
        checked = self._files.beside(lambda: [self._check(write) for write in writes])
        try:
            self._append(writes)
        finally:
            results = checked()
        return results

    def _packed(self, frame: memoryview) -> memoryview:
        if self._packer is None:
            return frame
        try:
            packed = self._packer.pack(frame)
        except FrameError:
            # the check will say so
            return frame
        return frame if packed is None else packed

    def _check(self, write: "_Write") -> bytes | FrameError:
        item = write.item
        row = self._namespaces.get(item.namespace_no)
        error = verify_frame(item.frame, item.key, row.namespace_id if row else None)
        if error is not None:
            return error
        if row is None:
            return WrongFrame(f"a frame of namespace number {item.namespace_no}, which has none")
        fields = fixed_fields(item.frame)
        if fields.stored_length != len(item.frame):
            return WrongFrame(f"a frame of {fields.stored_length} B in {len(item.frame)} B")
        if write.data is not item.frame:
            fields = fields._replace(codec=Codec.ZSTD)
        checksum = header_checksum(item.frame)
        return entry.encode_entry(fields, checksum, item.namespace_no, item.location)

    def _settle(self, items: Sequence[WriteItem], written: bool) -> None:
        if not items:
            return
        # Measure first: a settled place no longer counts on top of what the disk holds. All else in
        # the directory changes with a commit, and is looked at then.
        self._measure_logged({i.location.segment for i in items}, others=False)
        self._space.settle([(i.location, len(i.frame)) for i in items], written)

    def _measure_logged(self, segments: Iterable[int], others: bool = True) -> None:
        try:
            self._measure(segments, others)
        except DiskError as e:
            _log.warning("sizes on disk are not up to date: %s", e)

    def _keep_floor(self, write_bytes: int) -> None:
        path = self._directory.path
        free = attempt("looking at", path, lambda: self._files.free_bytes(path))
        if not self._space.leaves_floor(write_bytes, free):
            self._measure(())
            reason = (
                f"{free} B are free, and {write_bytes} B more would pass the floor of "
                f"{self._space.free_floor_bytes} B (ssd.free_floor_bytes)"
            )
            raise disk_error("writing to", path, OSError(errno.ENOSPC, reason))

    def _append(self, writes: Sequence["_Write"]) -> None:
        """One segment after the other, each synced before the next is begun."""
        writes = sorted(writes, key=lambda w: w.location)
        for segment, group in groupby(writes, key=lambda w: w.location.segment):
            path = self._segments.path(segment)
            try:
                if segment not in self._segments:
                    self._segments.create(segment, self._clock.wall_s())
                self._append_to(segment, list(group))
            except OSError as e:
                raise disk_error("writing to", path, e) from e

    def _append_to(self, segment: int, writes: list["_Write"]) -> None:
        with self._segments.use(segment) as handle:
            for run in _runs(writes):
                data = [write.data for write in run]
                self._files.pwrite(handle, data, run[0].location.offset)
            end = _end(writes[-1].item).offset
            if len(writes[-1].data) < len(writes[-1].item.frame) and self._files.size(handle) < end:
                # the place of a packed frame is whole, though no blocks lie behind it
                self._files.truncate(handle, end)
            try:
                if self._sync:
                    self._files.fdatasync(handle)
                # a file that was deleted takes bytes as long as it is open, and keeps none
                if not self._files.exists(self._segments.path(segment)):
                    raise FileNotFoundError(errno.ENOENT, "deleted while the store has it open")
            except OSError:
                self._space.seal(segment)
                raise

    def _commit(self, change: IndexChange) -> list[bytes]:
        """One commit; the entries it displaced by others. Runs on any thread."""
        path = self._directory.index_path
        try:
            displaced = attempt("writing to", path, lambda: self._index.commit(change))
        except DiskError:
            self._unsure.update(change.puts)
            raise
        self._measure_logged(())
        # a commit that was said to fail may not have: what it put was never counted
        own = {value for _, value in change.puts} | set(self._unsure.values())
        for key in (*change.removes, *(key for key, _ in change.puts)):
            self._unsure.pop(key, None)
        return [value for value in displaced if value not in own]

    def _displaced(self, displaced: Sequence[bytes]) -> None:
        self._entries.subtract(entry.entry_segment(value) for value in displaced)

    def drop_segment(self, segment: int) -> None:
        """See `LogTier`."""
        with self._lock:
            self._committer.now()
            self._space.may_drop(segment)
            if self._entries[segment]:
                raise ValueError(
                    f"segment {segment} still has {self._entries[segment]} index entries; "
                    "remove or overwrite them first"
                )
            path = self._segments.path(segment)
            attempt("deleting", path, lambda: self._segments.drop(segment))
            self._space.dropped(segment)
            del self._entries[segment]
            self._measure(())

    def refresh(self) -> None:
        """See `LogTier`."""
        with self._lock:
            self._committer.now(self._mark())
            self._measure(self._space.numbers)

    def _mark(self) -> IndexChange | None:
        """What lets the index's mark pass frames that were given up, if there are any behind it."""
        if self._given_up <= self._log_end:
            return None
        self._log_end = self._given_up
        return IndexChange(log_end=self._log_end)

    def _measure(self, segments: Iterable[int], others: bool = True) -> None:
        """Real sizes of these segments, of the free space, and, with `others`, of all else."""
        root, files = self._directory.path, self._files

        def look() -> None:
            paths = {n: self._segments.path(n) for n in segments if n in self._segments}
            # others may delete a file: then it takes no space
            sizes = {n: files.disk_bytes(p) if files.exists(p) else 0 for n, p in paths.items()}
            if others:
                other = files.disk_bytes(root, deep=False)
                for name in files.listdir(root):
                    other += files.disk_bytes(root / name, deep=name != "segments")
                index = files.disk_bytes(self._directory.index_path)
                self._space.measured_others(other, index)
            self._space.measured(sizes, files.free_bytes(root))

        with self._measuring:
            attempt("looking at", root, look)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where entries are counted that can't be."""
        for number, entries in self._entries.items():
            assert entries >= 0, f"segment {number} has {entries} entries"
            assert not entries or number in self._segments, f"{entries} entries in lost {number}"

    def close(self) -> None:
        """Wait for the call under way, and leave the index as after a clean stop."""
        with self._lock:
            path = self._directory.index_path
            try:
                self._committer.now(self._mark())
            except DiskError as e:
                _log.warning("the index lags the log, which the next start makes good: %s", e)
                self._index.close(clean=False)
                return
            attempt("closing", path, lambda: self._index.close(clean=True))


@dataclass(frozen=True, slots=True)
class _Write:
    """An item, and what is written of it: its frame or that packed."""

    location: Location
    data: memoryview
    item: WriteItem


def _runs(writes: Sequence[_Write]) -> Iterator[list[_Write]]:
    """Split sorted writes into runs that lie one behind the other in one segment."""
    run: list[_Write] = []
    expected: Location | None = None
    for write in writes:
        if run and (write.location != expected or len(run) == _RUN_ITEMS_MAX):
            yield run
            run = []
        run.append(write)
        segment, offset = write.location
        expected = Location(segment, offset + len(write.data))
    if run:
        yield run


def _end(item: WriteItem) -> Location:
    return item.location._replace(offset=item.location.offset + len(item.frame))
