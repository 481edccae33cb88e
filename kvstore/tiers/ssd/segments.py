"""Segments: append-only files of frames behind one page of header.

A segment is what its header says it is, whatever the file is called; only where the header is
damaged does the name decide. `docs/format.md` has the header byte for byte.
"""

import errno
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore.errors import StoreFormatError
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.frame import FRAME_MAGIC, FrameError, FrameHeader, UnknownFrameVersion
from kvstore.tiers.ssd.files import FileSystem, aligned_buffer
from kvstore.tiers.ssd.packed import decode_any

SEGMENT_MAGIC = b"DS41SEG\0"
SEGMENT_VERSION = 1
SEGMENT_HEADER_BYTES = PAGE_BYTES
SEGMENTS_MAX = 0xFFFF_FFFF
_HEADER = struct.Struct("<8sHHI16sd")
_NAME = re.compile(r"(\d{8,10})\.seg")
_WINDOW_BYTES = 1 << 20
_IDLE_MAX = 128


def encode_segment_header(number: int, store_id: bytes, created_wall_s: float) -> bytes:
    """The first page of a segment."""
    fixed = _HEADER.pack(SEGMENT_MAGIC, SEGMENT_VERSION, 0, number, store_id, created_wall_s)
    body = fixed.ljust(SEGMENT_HEADER_BYTES - 16, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def decode_segment_header(page: bytes | memoryview) -> tuple[int, bytes] | None:
    """Number and store id, or None where the page is no whole header. Raises `StoreFormatError`
    for a version that this program does not know."""
    page = bytes(page[:SEGMENT_HEADER_BYTES])
    body = page[:-16]
    if len(page) < SEGMENT_HEADER_BYTES or xxhash.xxh3_128_digest(body) != page[-16:]:
        return None
    magic, version, _, number, store_id, _ = _HEADER.unpack_from(body)
    if magic != SEGMENT_MAGIC:
        return None
    if version != SEGMENT_VERSION:
        raise StoreFormatError(
            f"a segment of format version {version}; this program knows {SEGMENT_VERSION}: "
            "open the store with the release that wrote it"
        )
    return number, store_id


def segment_name(number: int) -> str:
    """The file that a new segment gets."""
    return f"{number:08d}.seg"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file as found. `number`: from its header, or from its name where `header` is False
    because the header is damaged. `store_id`: empty then."""

    number: int
    path: Path
    size: int
    header: bool
    store_id: bytes

    @property
    def name_number(self) -> int:
        """The number that the file's name says."""
        return int(self.path.stem)


def find_segments(files: FileSystem, directory: Path) -> list[FoundSegment]:
    """Every segment file of a directory, in order of file name; others are not looked at."""
    found = []
    for name in files.listdir(directory):
        match = _NAME.fullmatch(name)
        if not match:
            continue
        path = directory / name
        handle = files.open(path)
        try:
            size = files.size(handle)
            header = _read_header(files, handle)
        finally:
            files.close(handle)
        if header is None:
            found.append(FoundSegment(int(match[1]), path, size, False, b""))
        else:
            found.append(FoundSegment(header[0], path, size, True, header[1]))
    return found


def _read_header(files: FileSystem, handle: int) -> tuple[int, bytes] | None:
    page = aligned_buffer(SEGMENT_HEADER_BYTES)
    try:
        return decode_segment_header(page[: files.preadv(handle, [page], 0)])
    except OSError:
        # One bad sector is no reason not to open the store.
        return None


def scan_frames(
    files: FileSystem,
    handle: int,
    start: int,
    size: int,
    unknown: Callable[[int, UnknownFrameVersion], None],
) -> Iterator[tuple[int, FrameHeader]]:
    """Offset and header of every frame whose header is whole, from `start` to `size`.

    Only headers are looked at; what can't be read raises `OSError`. Where a frame's header is
    whole, the next is sought behind that frame, never inside it, so that bytes a client stored
    can't pose as a frame. `unknown` is told of frames (or of what looks like them, inside a frame
    that lost its header) of a version that this program does not know.
    """
    page, window = aligned_buffer(PAGE_BYTES), aligned_buffer(_WINDOW_BYTES)
    at = start
    while at + PAGE_BYTES <= size:
        if files.preadv(handle, [page], at) < PAGE_BYTES:
            return
        try:
            header = decode_any(page)
        except FrameError as e:
            if isinstance(e, UnknownFrameVersion):
                unknown(at, e)
            at = _next_magic(files, handle, at + PAGE_BYTES, size, window)
            continue
        yield at, header
        at += header.stored_length


def _next_magic(files: FileSystem, handle: int, at: int, size: int, window: memoryview) -> int:
    while at < size:
        n = files.preadv(handle, [window], at)
        if n == 0:
            break
        for page in range(0, n, PAGE_BYTES):
            if window[page : page + len(FRAME_MAGIC)] == FRAME_MAGIC:
                return at + page
        at += -(-n // PAGE_BYTES) * PAGE_BYTES
    return size


class _Handle:
    __slots__ = ("dropped", "handle", "users")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.users = 0
        self.dropped = False


class SegmentFiles:
    """Open handles of segments, at most `_IDLE_MAX` of them idle, safe from any thread.

    A handle is never closed while someone uses it, so that a read can't end up in another file
    that got the same number from the kernel.
    """

    def __init__(self, files: FileSystem, directory: Path, store_id: bytes, direct: bool) -> None:
        self._files = files
        self._directory = directory
        self._store_id = store_id
        self._direct = direct
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._open: OrderedDict[int, _Handle] = OrderedDict()

    def add(self, number: int, path: Path) -> None:
        """A segment that is there already."""
        self._paths[number] = path

    def __contains__(self, number: int) -> bool:
        return number in self._paths

    def path(self, number: int) -> Path:
        """The segment's file, also where it is not made yet."""
        return self._paths.get(number, self._directory / segment_name(number))

    @contextmanager
    def use(self, number: int) -> Iterator[int]:
        """The segment's handle. `FileNotFoundError` where there is no such segment."""
        with self._lock:
            entry = self._open.get(number)
            if entry is None:
                path = self._paths.get(number)
                if path is None:
                    raise FileNotFoundError(errno.ENOENT, f"there is no segment {number}")
                entry = _Handle(self._files.open(path, direct=self._direct))
                self._open[number] = entry
            entry.users += 1
            self._open.move_to_end(number)
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1
                if entry.dropped and not entry.users:
                    self._files.close(entry.handle)
                self._close_idle()

    def create(self, number: int, created_wall_s: float) -> None:
        """Make a segment's file, its header and name durable; a half-made file is made anew."""
        path = self._directory / segment_name(number)
        page = aligned_buffer(SEGMENT_HEADER_BYTES)
        page[:] = encode_segment_header(number, self._store_id, created_wall_s)
        handle = self._files.open(path, create=True, direct=self._direct)
        try:
            self._files.truncate(handle, 0)
            self._files.pwrite(handle, [page], 0)
            self._files.fdatasync(handle)
        finally:
            self._files.close(handle)
        self._files.fsync_dir(self._directory)
        self._paths[number] = path

    def drop(self, number: int) -> None:
        """Delete a segment's file; whoever reads it now finishes. Nothing where it was not made, or
        somebody else has deleted it."""
        path = self._paths.get(number)
        if path is None:
            return
        if self._files.exists(path):
            self._files.unlink(path)
        with self._lock:
            del self._paths[number]
            entry = self._open.pop(number, None)
            if entry is not None:
                entry.dropped = True
                if not entry.users:
                    self._files.close(entry.handle)

    def _close_idle(self) -> None:
        idle = [n for n, e in self._open.items() if not e.users]
        for n in idle[: max(0, len(idle) - _IDLE_MAX)]:
            self._files.close(self._open.pop(n).handle)

    def close(self) -> None:
        """Close every handle; no one may use any."""
        for entry in self._open.values():
            self._files.close(entry.handle)
        self._open.clear()
