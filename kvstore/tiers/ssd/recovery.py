"""What a log holds at open: the index checked against the segments.

Frames become durable before the index knows them, and entries leave the index before their segment
goes. So after a crash there are only these differences, all behind the index's mark `log_end`:
frames that no commit told of. Whole ones are adopted, the rest is cut off. Everything else that is
found (entries that point at nothing, files of another store, an index that can't be trusted) is
damage, which costs the objects it hit and is noted.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable
from kvstore.tiers.base import Location, NamespaceRow, Recovered
from kvstore.tiers.frame import (
    CHECKSUM_BYTES,
    FRAME_ALIGN_BYTES,
    Codec,
    FrameHeader,
    UnknownFrameVersion,
    encode_header,
)
from kvstore.tiers.ssd import entry
from kvstore.tiers.ssd.directory import Directory
from kvstore.tiers.ssd.files import FileSystem, aligned_buffer
from kvstore.tiers.ssd.index import (
    Index,
    IndexBroken,
    IndexChange,
    IndexContent,
    IndexOpener,
)
from kvstore.tiers.ssd.packed import check_stored
from kvstore.tiers.ssd.segments import SEGMENT_HEADER_BYTES, FoundSegment, scan_frames

_COLUMNS = (
    "key",
    "parent",
    "kind",
    "namespace_no",
    "depth",
    "segment",
    "offset",
    "stored_length",
    "payload_length",
    "created_wall_s",
)
_PAGE_BITS = 36
"""More than enough for a page's number in its segment."""
_PART_ROWS = 1 << 13
_REBUILD_COMMIT_ENTRIES = 20_000
_SEGMENTS_AHEAD = 3
_TELL_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """The outcome: the index, what it holds, and the segments that stay. `ends[n]`: where segment
    n's known content ends. `contents[n]`: its index entries, and the bytes of their frames.
    `log_end`: where the log goes on, unless its segment is among the `sealed`."""

    index: Index
    recovered: Recovered
    segments: dict[int, FoundSegment]
    ends: dict[int, int]
    contents: dict[int, tuple[int, int]]
    sealed: set[int]
    log_end: Location


@dataclass(slots=True)
class _Finds:
    """Frames found without an index: their entries, and the namespaces they name."""

    namespaces: dict[bytes, NamespaceRow]
    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    new_namespaces: list[NamespaceRow] = field(default_factory=list)

    def add(self, header: FrameHeader, location: Location) -> None:
        row = self.namespaces.get(header.namespace_id)
        if row is None:
            number = 1 + max((r.number for r in self.namespaces.values()), default=0)
            row = NamespaceRow(number, header.namespace_id, b"")
            self.namespaces[row.namespace_id] = row
            self.new_namespaces.append(row)
        checksum = encode_header(header._replace(codec=Codec.RAW))[-CHECKSUM_BYTES:]
        self.puts.append((header.key, entry.encode_entry(header, checksum, row.number, location)))


class _Progress:
    """Says how far a rebuild is, now and then."""

    def __init__(self, segments: int) -> None:
        self._segments, self._done, self._frames = segments, 0, 0
        self._told_s = time.monotonic()
        _log.info("rebuilding the index from %d segments", segments)

    def segment(self, frames: int) -> None:
        """One more is done."""
        self._done += 1
        self._frames += frames
        now_s = time.monotonic()
        if self._done == self._segments or now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            _log.info(
                "rebuilding the index: %d of %d segments, %d frames",
                self._done,
                self._segments,
                self._frames,
            )


class Recovery:
    """One run over a directory. Raises `OSError`, `StoreFormatError`, and `Unavailable` once `stop`
    is set: what is unfinished then is begun anew by the next start."""

    def __init__(
        self,
        files: FileSystem,
        directory: Directory,
        open_index: IndexOpener,
        map_bytes: int,
        stop: Event | None = None,
    ) -> None:
        self._files = files
        self._directory = directory
        self._open_index = open_index
        self._map_bytes = map_bytes
        self._stop = stop or Event()
        self._segments: dict[int, FoundSegment] = {}
        self._unreadable: set[int] = set()

    def run(self, sync: bool) -> Opened:
        """Check, repair, and say what is there."""
        self._segments = self._own_segments()
        index, content, rebuilt = self._index(sync)
        try:
            return self._reconcile(index, content, rebuilt)
        except BaseException:
            index.close(clean=False)
            raise

    def _own_segments(self) -> dict[int, FoundSegment]:
        own: dict[int, FoundSegment] = {}
        store_id = self._directory.store_id
        for found in sorted(self._directory.segments, key=lambda s: not s.header):
            if found.header and found.store_id != store_id:
                why = f"it belongs to store {found.store_id.hex()}"
            elif found.number in own:
                why = f"{own[found.number].path} is segment {found.number} already"
            else:
                own[found.number] = found
                if not found.header and found.size > SEGMENT_HEADER_BYTES:
                    self._note(f"{found.path} has a damaged header; its frames are used")
                continue
            self._directory.set_aside(self._files, found.path, why)
        return own

    def _note(self, text: str) -> None:
        self._directory.notes.append(text)

    # The index

    def _index(self, sync: bool) -> tuple[Index, IndexContent, bool]:
        path = self._directory.index_path
        try:
            index = self._open(path, sync, create=not self._segments)
            try:
                return index, index.load(), False
            except BaseException:
                index.close(clean=False)
                raise
        except IndexBroken as e:
            if self._files.exists(path):
                self._directory.set_aside(self._files, path, f"{e}; rebuilt from the frames")
            else:
                self._note(f"{e}; rebuilt from the frames")
        self._rebuild()
        index = self._open(path, sync, create=False)
        return index, index.load(), True

    def _open(self, path: Path, sync: bool, create: bool) -> Index:
        if create:
            self._files.mkdir(path)
        index = self._open_index(path, self._directory.store_id, self._map_bytes, sync, create)
        if create:
            self._files.fsync_dir(path)
            self._files.fsync_dir(path.parent)
        return index

    def _rebuild(self) -> None:
        """A new index of every frame whose header is whole; the last segment's, which a crash may
        have torn, are checked to the last byte."""
        path = self._directory.path / "index.lmdb.new"
        if self._files.exists(path):
            self._files.remove_tree(path)
        index = self._open(path, sync=True, create=True)
        try:
            finds = _Finds({})
            end = Location(0, 0)
            progress = _Progress(len(self._segments))
            for number, frames in self._scanned():
                end = Location(number, SEGMENT_HEADER_BYTES)
                for at, header in frames:
                    finds.add(header, Location(number, at))
                    end = Location(number, at + header.stored_length)
                    if len(finds.puts) >= _REBUILD_COMMIT_ENTRIES:
                        self._commit(index, finds, end)
                progress.segment(len(frames))
            self._commit(index, finds, end)
        finally:
            index.close(clean=True)
        self._files.rename(path, self._directory.index_path)
        self._files.fsync_dir(self._directory.path)

    def _scanned(self) -> Iterator[tuple[int, list[tuple[int, FrameHeader]]]]:
        """Per segment, in order, its frames; a few are read ahead."""
        last = max(self._segments, default=0)
        ahead: deque[tuple[int, Callable[[], list[tuple[int, FrameHeader]]]]] = deque()
        try:
            for number in sorted(self._segments):
                frames = self._frames(number, SEGMENT_HEADER_BYTES, number == last)
                ahead.append((number, self._files.beside(partial(list, frames))))
                if len(ahead) == _SEGMENTS_AHEAD:
                    first, wait = ahead.popleft()
                    yield first, wait()
            while ahead:
                first, wait = ahead.popleft()
                yield first, wait()
        finally:
            for _, wait in ahead:
                with suppress(Exception):
                    wait()

    @staticmethod
    def _commit(index: Index, finds: _Finds, end: Location) -> None:
        index.commit(IndexChange(finds.puts, (), end, finds.new_namespaces))
        finds.puts, finds.new_namespaces = [], []

    def _frames(self, number: int, start: int, whole: bool) -> Iterator[tuple[int, FrameHeader]]:
        """Frames of a segment, from `start`; `whole`: only those whose sections are right too."""
        found = self._segments[number]
        handle = self._files.open(found.path)
        try:
            buffer = aligned_buffer(0)
            for at, header in scan_frames(
                self._files, handle, start, found.size, partial(self._unknown, found)
            ):
                if self._stop.is_set():
                    raise Unavailable("the start was broken off; the next one begins anew")
                length = header.stored_length
                if at + length > found.size:
                    continue
                if whole:
                    if len(buffer) < length:
                        buffer = aligned_buffer(length)
                    read = self._files.preadv(handle, [buffer[:length]], at)
                    if check_stored(header, buffer[:read]) is not None:
                        continue
                yield at, header
        except OSError as e:
            self._unreadable.add(number)
            self._note(f"{found.path} can't be read to its end and is left as it is: {e}")
        finally:
            self._files.close(handle)

    def _unknown(self, found: FoundSegment, at: int, why: UnknownFrameVersion) -> None:
        """Another release's frame, perhaps: the segment stays as it is."""
        if found.number not in self._unreadable:
            self._unreadable.add(found.number)
            self._note(
                f"{found.path} has a frame at {at} that this program does not know ({why}); it is "
                "left as it is: open the store with the release that wrote it"
            )

    # Index against segments

    def _reconcile(self, index: Index, content: IndexContent, rebuilt: bool) -> Opened:
        rows = content.rows
        keep = self._pointing_at_something(entry.decode_records(rows))
        dropped = entry.decode_records(rows)["key"][~keep].tolist()
        if dropped:
            self._note(f"{len(dropped)} index entries pointed at nothing and were dropped")
            rows = rows[keep]
        finds = _Finds({row.namespace_id: row for row in content.namespaces})
        log_end = max(content.log_end, _last_end(entry.decode_records(rows)))
        log_end = self._adopt(rows, log_end, finds)
        adopted = len(finds.puts)
        cut = self._cut(log_end)
        if dropped or adopted or log_end != content.log_end:
            index.commit(IndexChange(finds.puts, dropped, log_end, finds.new_namespaces))
        recovered = self._recovered(rows, finds.puts)
        contents = _contents(recovered)
        ends = self._ends(log_end)
        self._collect_garbage(contents, ends, log_end)
        recovered.namespaces = list(finds.namespaces.values())
        recovered.adopted, recovered.dropped = adopted, len(dropped)
        recovered.cut_bytes, recovered.rebuilt = cut, rebuilt
        recovered.notes = self._directory.notes
        damaged = {n for n, found in self._segments.items() if not found.header}
        sealed = damaged | self._unreadable
        return Opened(index, recovered, self._segments, ends, contents, sealed, log_end)

    def _pointing_at_something(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Per entry: does its segment exist and hold as many bytes as it says?"""
        known = sorted(self._segments)
        numbers = np.array([*known, -1], np.int64)
        sizes = np.array([*(self._segments[n].size for n in known), 0], np.uint64)
        segment = table["segment"].astype(np.int64)
        place = np.searchsorted(numbers[:-1], segment)
        size = np.where(numbers[place] == segment, sizes[place], np.uint64(0))
        offset, length = table["offset"].copy(), table["stored_length"].astype(np.uint64)
        fits = (offset <= size) & (length <= size) & (offset + length <= size)
        page = np.uint64(SEGMENT_HEADER_BYTES)
        result: npt.NDArray[np.bool_] = (
            fits & (offset >= page) & (offset % page == 0) & (length > 0) & (length % page == 0)
        )
        return result

    def _adopt(self, rows: npt.NDArray[np.uint8], log_end: Location, finds: _Finds) -> Location:
        """Whole frames behind the index's mark become entries; returns the new mark."""
        mark, found = log_end, {}
        for number in sorted(n for n in self._segments if n >= mark.segment):
            start = SEGMENT_HEADER_BYTES
            if number == mark.segment:
                start = max(start, mark.offset)
            found[number] = list(self._frames(number, start, whole=True))
        known = entry.known_of(rows, [h.key for frames in found.values() for _, h in frames])
        for number, frames in found.items():
            new = False
            for at, header in frames:
                if header.key not in known:
                    known.add(header.key)
                    log_end, new = Location(number, at + header.stored_length), True
                    finds.add(header, Location(number, at))
            if new:
                self._sync(number)
        return log_end

    def _sync(self, number: int) -> None:
        handle = self._files.open(self._segments[number].path)
        try:
            self._files.fdatasync(handle)
        finally:
            self._files.close(handle)
        self._files.fsync_dir(self._directory.segments_path)

    def _cut(self, log_end: Location) -> int:
        """Cut what lies behind the log's end off its last segment."""
        found = self._segments.get(log_end.segment)
        if found is None or found.size <= log_end.offset or found.number in self._unreadable:
            return 0
        handle = self._files.open(found.path)
        try:
            self._files.truncate(handle, log_end.offset)
            self._files.fdatasync(handle)
        finally:
            self._files.close(handle)
        return found.size - log_end.offset

    def _recovered(
        self, rows: npt.NDArray[np.uint8], adopted: Sequence[tuple[bytes, bytes]]
    ) -> Recovered:
        """Records (of `entry.decode_records`), and those of frames found behind them all, as
        columns in the order of the log; half of them on another thread, and a part at a time, so
        that it is in the processor's cache."""
        table, n = entry.decode_records(rows), len(rows)
        place = table["segment"].astype(np.uint64) << np.uint64(_PAGE_BITS)
        order = np.argsort(place | table["offset"] // FRAME_ALIGN_BYTES)
        columns = {name: np.empty(n + len(adopted), table.dtype[name]) for name in _COLUMNS}

        def fill(first: int, last: int) -> None:
            for start in range(first, last, _PART_ROWS):
                end = min(last, start + _PART_ROWS)
                part = entry.decode_records(rows[order[start:end]])
                for name, column in columns.items():
                    column[start:end] = part[name]

        rest = self._files.beside(partial(fill, n // 2, n))
        fill(0, n // 2)
        rest()
        more = np.frombuffer(b"".join(key + value for key, value in adopted), table.dtype)
        for name, column in columns.items():
            column[n:] = more[name]
        return Recovered(
            packed_keys=columns["key"],
            parents=columns["parent"],
            kind=columns["kind"],
            namespace_no=columns["namespace_no"],
            depth=columns["depth"],
            segment=columns["segment"],
            offset=columns["offset"],
            stored_length=columns["stored_length"],
            payload_length=columns["payload_length"],
            created_wall_s=columns["created_wall_s"],
        )

    def _ends(self, log_end: Location) -> dict[int, int]:
        ends = {n: max(s.size, SEGMENT_HEADER_BYTES) for n, s in self._segments.items()}
        if log_end.segment in ends and log_end.segment not in self._unreadable:
            ends[log_end.segment] = max(log_end.offset, SEGMENT_HEADER_BYTES)
        return ends

    def _collect_garbage(
        self, contents: dict[int, tuple[int, int]], ends: dict[int, int], log_end: Location
    ) -> None:
        """Segments that nothing points into go; those not known to be ours are set aside."""
        keep = {*contents, *self._unreadable, log_end.segment}
        for number in [n for n in self._segments if n not in keep]:
            found = self._segments.pop(number)
            del ends[number]
            if found.header or found.size <= SEGMENT_HEADER_BYTES:
                self._files.unlink(found.path)
            else:
                why = "its header is damaged and nothing in it is known"
                self._directory.set_aside(self._files, found.path, why)


def _last_end(table: npt.NDArray[np.void]) -> Location:
    """Behind the last of these frames: no mark of the log's end may lie before it."""
    if not len(table):
        return Location(0, 0)
    segment = table["segment"].max()
    inside = table[table["segment"] == segment]
    ends = inside["offset"] + inside["stored_length"].astype(np.uint64)
    return Location(int(segment), int(ends.max()))


def _contents(rows: Recovered) -> dict[int, tuple[int, int]]:
    """Per segment: how many entries, and how many bytes of frames."""
    starts = np.flatnonzero(np.diff(rows.segment, prepend=-1))
    entries = np.diff(starts, append=len(rows.segment))
    lengths = (
        np.add.reduceat(rows.stored_length.astype(np.int64), starts) if len(starts) else starts
    )
    pairs = zip(entries.tolist(), lengths.tolist(), strict=True)
    return dict(zip(rows.segment[starts].tolist(), pairs, strict=True))
