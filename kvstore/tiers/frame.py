"""The frame: one object's checksummed record, the same bytes in DRAM and on SSD.

`[header | section | section | … | zero padding to 4 KiB]`. The header is a multiple of 512 B and
ends with its own xxh3-128; it holds each section's. A changed byte anywhere but in the padding is
therefore found, and so is a whole frame that lies where another is expected, since the header
names its key. `docs/format.md` has the layout byte for byte.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import xxhash

FRAME_MAGIC = b"DS41FRM\0"
FRAME_VERSION = 1
FRAME_ALIGN_BYTES = 4096
HEADER_ALIGN_BYTES = 512
CHECKSUM_BYTES = 16
FRAME_SECTIONS_MAX = 64
_FIXED = struct.Struct("<8sHBBHHIII4xd32s32s32s24x")
_START = struct.Struct("<8sHBBHHII")
_SECTION = struct.Struct("<II8x16s")
_ZERO_KEY = bytes(32)
KEY_OFFSET = struct.calcsize("<8sHBBHHIII4xd")
"""Where the key lies in a header, for a reader that looks at nothing else of it."""


class Kind(IntEnum):
    """What a frame holds."""

    BLOCK = 1


class Codec(IntEnum):
    """How sections are stored. All but `RAW` are for packed frames (`kvstore.tiers.ssd.packed`)."""

    RAW = 0
    ZSTD = 1


class FrameError(Exception):
    """The bytes are not the frame they should be. The object is lost, and a miss."""


class NotAFrame(FrameError):
    """No frame starts here (wrong magic)."""


class UnknownFrameVersion(FrameError):
    """A frame of a version, kind or codec that this program does not know."""


class FrameTruncated(FrameError):
    """Fewer bytes than the header needs or says."""


class HeaderCorrupt(FrameError):
    """The header does not match its checksum, or says what can't be."""


class SectionCorrupt(FrameError):
    """A section does not match its checksum. `index`: which one."""

    def __init__(self, index: int) -> None:
        super().__init__(f"section {index} does not match its checksum")
        self.index = index


class WrongFrame(FrameError):
    """A whole frame, but another object's."""


class Section(NamedTuple):
    """A section in a frame. `offset`: bytes from the frame's start. `checksum`: xxh3-128, 16 B."""

    offset: int
    length: int
    checksum: bytes


class FrameHeader(NamedTuple):
    """A frame's header. `created_wall_s`: seconds since the epoch. Keys and ids have 32 bytes."""

    kind: Kind
    key: bytes
    namespace_id: bytes
    parent: bytes
    depth: int
    created_wall_s: float
    codec: Codec
    sections: tuple[Section, ...]

    @property
    def payload_length(self) -> int:
        """Bytes of all sections."""
        return sum(s.length for s in self.sections)

    @property
    def stored_length(self) -> int:
        """Bytes of the whole frame, padding included."""
        last = self.sections[-1]
        return _round_up(last.offset + last.length, FRAME_ALIGN_BYTES)


class BlockName(NamedTuple):
    """What a block's frame says of the block beside its sections; see `FrameHeader`."""

    key: bytes
    namespace_id: bytes
    parent: bytes
    depth: int
    created_wall_s: float


class FrameShape(NamedTuple):
    """Sizes of a frame, in bytes: the header, where the payload starts (the same), and the whole,
    rounded up to 4 KiB."""

    header_bytes: int
    payload_offset: int
    total: int


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@lru_cache(maxsize=FRAME_SECTIONS_MAX)
def header_bytes(sections: int) -> int:
    """Size of the header of a frame with so many sections."""
    return _round_up(_FIXED.size + sections * _SECTION.size + CHECKSUM_BYTES, HEADER_ALIGN_BYTES)


def frame_bytes(section_lengths: Sequence[int]) -> FrameShape:
    """How large the frame of these sections is. A block of the released layout: 512 B of header,
    227,840 B of payload, 229,376 B in all."""
    head = header_bytes(len(section_lengths))
    return FrameShape(head, head, _round_up(head + sum(section_lengths), FRAME_ALIGN_BYTES))


def layout_sections(
    section_lengths: Sequence[int], checksums: Sequence[bytes]
) -> tuple[Section, ...]:
    """Where the sections lie in the frame: one behind the other, the first behind the header."""
    lengths = tuple(section_lengths)
    places = zip(_offsets(lengths), lengths, checksums, strict=True)
    return tuple([Section(*place) for place in places])


@lru_cache(maxsize=256)
def _offsets(section_lengths: tuple[int, ...]) -> tuple[int, ...]:
    ends = accumulate(section_lengths, initial=header_bytes(len(section_lengths)))
    return tuple(ends)[:-1]


@lru_cache(maxsize=FRAME_SECTIONS_MAX)
def _table(sections: int) -> struct.Struct:
    return struct.Struct("<" + "II8x16s" * sections)


def encode_header(header: FrameHeader) -> bytes:
    """The header's bytes. Raises `ValueError` for what no header can say: keys of other than 32
    bytes, checksums of other than 16, sections that do not lie one behind the other."""
    sections = header.sections
    if not 1 <= len(sections) <= FRAME_SECTIONS_MAX:
        raise ValueError(f"a frame has 1 to {FRAME_SECTIONS_MAX} sections, not {len(sections)}")
    if not len(header.key) == len(header.namespace_id) == len(header.parent) == 32:
        raise ValueError("key, namespace id and parent have 32 bytes each")
    offsets, lengths, checksums = zip(*sections, strict=True)
    if _offsets(lengths) != offsets:
        raise ValueError(f"sections do not lie one behind the other: {sections}")
    if set(map(len, checksums)) != {CHECKSUM_BYTES}:
        raise ValueError(f"a checksum has {CHECKSUM_BYTES} bytes")
    shape = frame_bytes(lengths)
    fixed = _FIXED.pack(
        FRAME_MAGIC,
        FRAME_VERSION,
        header.kind,
        header.codec,
        len(sections),
        shape.header_bytes,
        shape.total,
        sum(lengths),
        header.depth,
        header.created_wall_s,
        header.key,
        header.namespace_id,
        header.parent,
    )
    table = _table(len(sections)).pack(*chain.from_iterable(sections))
    body = (fixed + table).ljust(shape.header_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def seal_frame(frame: memoryview, header: FrameHeader) -> None:
    """Write the header in front of sections that already lie in `frame`, and zero the padding."""
    head = encode_header(header)
    last = header.sections[-1]
    frame[: len(head)] = head
    end = last.offset + last.length
    total = header.stored_length
    frame[end:total] = bytes(total - end)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the raw frames of one layout's blocks have in common. `spans`: where each section starts
    and ends. Made by `of`."""

    spans: tuple[tuple[int, int], ...]
    shape: FrameShape
    _header: struct.Struct
    _start: tuple[object, ...]
    _table: tuple[object, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, section_bytes: tuple[int, ...]) -> "BlockShape":
        """Of sections of these lengths."""
        offsets, count = _offsets(section_bytes), len(section_bytes)
        shape = frame_bytes(section_bytes)
        start = (FRAME_MAGIC, FRAME_VERSION, Kind.BLOCK, Codec.RAW, count, shape.header_bytes)
        pad = shape.header_bytes - CHECKSUM_BYTES - _FIXED.size - count * _SECTION.size
        entries = zip(offsets, section_bytes, [b""] * count, strict=True)
        return cls(
            tuple((at, at + size) for at, size in zip(offsets, section_bytes, strict=True)),
            shape,
            struct.Struct(_FIXED.format + "II8x16s" * count + f"{pad}x"),
            (*start, shape.total, sum(section_bytes)),
            tuple(chain.from_iterable(entries)),
        )

    def seal(self, frame: memoryview, name: BlockName, checksums: Sequence[bytes]) -> None:
        """`seal_frame` for a block of this layout, in a few microseconds: it is on the way of every
        put. The caller guarantees the lengths of keys and checksums."""
        table = list(self._table)
        table[2::3] = checksums
        key, namespace_id, parent, depth, created = name
        body = self._header.pack(*self._start, depth, created, key, namespace_id, parent, *table)
        frame[: self.shape.header_bytes] = body + xxhash.xxh3_128_digest(body)
        end = self.spans[-1][1]
        frame[end : self.shape.total] = bytes(self.shape.total - end)


def _header_length(buf: memoryview) -> int:
    if len(buf) < HEADER_ALIGN_BYTES:
        raise FrameTruncated(f"{len(buf)} B hold no frame header")
    if buf[:8] != FRAME_MAGIC:
        raise NotAFrame(f"no frame starts here: {bytes(buf[:8])!r}")
    size = int.from_bytes(buf[14:16], "little")
    most = header_bytes(FRAME_SECTIONS_MAX)
    if not HEADER_ALIGN_BYTES <= size <= most or size % HEADER_ALIGN_BYTES:
        raise HeaderCorrupt(f"a header of {size} B")
    if len(buf) < size:
        raise FrameTruncated(f"{len(buf)} B of a header of {size} B")
    return size


def decode_header(buf: bytes | bytearray | memoryview) -> FrameHeader:
    """The header at the start of `buf`, which may be longer. Raises a `FrameError` saying what is
    wrong; sections are not looked at."""
    view = memoryview(buf).cast("B")
    size = _header_length(view)
    body = view[: size - CHECKSUM_BYTES]
    if xxhash.xxh3_128_digest(body) != view[size - CHECKSUM_BYTES : size]:
        raise HeaderCorrupt("the header does not match its checksum")
    (_, version, kind, codec, count, _, total, payload, depth, created, key, ns, parent) = (
        _FIXED.unpack_from(view)
    )
    if version != FRAME_VERSION:
        raise UnknownFrameVersion(f"frame version {version}; known is {FRAME_VERSION}")
    try:
        kind, codec = Kind(kind), Codec(codec)
    except ValueError as e:
        raise UnknownFrameVersion(str(e)) from e
    if codec is not Codec.RAW:
        raise UnknownFrameVersion(f"codec {codec} in a frame of version {version}")
    if not 1 <= count <= FRAME_SECTIONS_MAX or header_bytes(count) != size:
        raise HeaderCorrupt(f"{count} sections in a header of {size} B")
    table = view[_FIXED.size : _FIXED.size + count * _SECTION.size]
    sections = tuple(map(Section._make, _SECTION.iter_unpack(table)))
    end = size
    for offset, length, _ in sections:
        if offset != end:
            raise HeaderCorrupt(f"a section at {offset}, where the one before it ends at {end}")
        end += length
    if end - size != payload or _round_up(end, FRAME_ALIGN_BYTES) != total:
        raise HeaderCorrupt(f"a frame of {total} B with {payload} B of payload, to {end}")
    return FrameHeader(kind, key, ns, parent, depth, created, codec, sections)


class FixedFields(NamedTuple):
    """What a header says of its frame as a whole: as `FrameHeader`, without the sections."""

    kind: Kind
    codec: Codec
    stored_length: int
    payload_length: int
    depth: int
    created_wall_s: float
    key: bytes
    namespace_id: bytes
    parent: bytes


def fixed_fields(frame: bytes | bytearray | memoryview) -> FixedFields:
    """Of the raw frame that starts here; trusts a verified header."""
    _, _, kind, codec, _, _, *rest = _FIXED.unpack_from(frame)
    return FixedFields(kind, codec, *rest)


def header_checksum(frame: bytes | bytearray | memoryview) -> bytes:
    """The 16 bytes that end the header of a frame; trusts a verified header."""
    size = int.from_bytes(frame[14:16], "little")
    return bytes(frame[size - CHECKSUM_BYTES : size])


def check_sections(header: FrameHeader, frame: memoryview) -> FrameError | None:
    """Whether the sections that `header` names are what lies in `frame`."""
    if len(frame) < header.stored_length:
        return FrameTruncated(f"{len(frame)} B of a frame of {header.stored_length} B")
    digest = xxhash.xxh3_128_digest
    for i, s in enumerate(header.sections):
        if digest(frame[s.offset : s.offset + s.length]) != s.checksum:
            return SectionCorrupt(i)
    return None


def verify_frame(
    buf: bytes | bytearray | memoryview,
    key: bytes | None = None,
    namespace_id: bytes | None = None,
) -> FrameError | None:
    """What is wrong with the frame at the start of `buf`: None, or the error (not raised).

    Header, every section and, where given, that it is `key`'s frame of `namespace_id`.
    """
    view = memoryview(buf).cast("B")
    if key is not None and namespace_id is not None and _is_sound(view, key + namespace_id):
        return None
    try:
        header = decode_header(view)
    except FrameError as e:
        return e
    if key is not None and header.key != key:
        return WrongFrame(f"the frame of {header.key.hex()}, not of {key.hex()}")
    if namespace_id is not None and header.namespace_id != namespace_id:
        return WrongFrame(f"a frame of namespace {header.namespace_id.hex()}")
    return check_sections(header, view)


def _is_sound(view: memoryview, identity: bytes) -> bool:
    """A quick `verify_frame` of a raw frame; False says nothing. `identity`: key ‖ namespace id."""
    head = bytes(view[:HEADER_ALIGN_BYTES])
    if head[KEY_OFFSET : KEY_OFFSET + len(identity)] != identity:
        return False
    count, size = head[12], head[14] | head[15] << 8
    if size != HEADER_ALIGN_BYTES:
        head = bytes(view[:size])
    if not 1 <= count <= FRAME_SECTIONS_MAX or len(head) != header_bytes(count):
        return False
    digest = xxhash.xxh3_128_digest
    if digest(head[:-CHECKSUM_BYTES]) != head[-CHECKSUM_BYTES:]:
        return False
    flat = _table(count).unpack_from(head, _FIXED.size)
    start, offsets, total = _start(flat[1::3])
    if head[: len(start)] != start or flat[::3] != offsets or len(view) < total:
        return False
    for i, offset in enumerate(offsets):
        length, checksum = flat[3 * i + 1 : 3 * i + 3]
        if digest(view[offset : offset + length]) != checksum:
            return False
    return True


@lru_cache(maxsize=256)
def _start(section_lengths: tuple[int, ...]) -> tuple[bytes, tuple[int, ...], int]:
    """How the header of a raw block with these sections begins, where they lie, and the bytes of
    the whole frame."""
    shape = frame_bytes(section_lengths)
    start = _START.pack(
        FRAME_MAGIC,
        FRAME_VERSION,
        Kind.BLOCK,
        Codec.RAW,
        len(section_lengths),
        shape.header_bytes,
        shape.total,
        sum(section_lengths),
    )
    return start, _offsets(section_lengths), shape.total


def peek_checksums(
    frame: memoryview, key: bytes, section_bytes: tuple[int, ...]
) -> tuple[bytes, ...] | None:
    """The checksums of `key`'s sections, from a header that is whole and says that the frame is
    the key's and has sections of these sizes; None where it does not. A quick `decode_header`."""
    head = bytes(frame[: header_bytes(len(section_bytes))])
    if xxhash.xxh3_128_digest(head[:-CHECKSUM_BYTES]) != head[-CHECKSUM_BYTES:]:
        return None
    flat = _table(len(section_bytes)).unpack_from(head, _FIXED.size)
    if head[KEY_OFFSET : KEY_OFFSET + len(key)] != key or flat[1::3] != section_bytes:
        return None
    checksums: tuple[bytes, ...] = flat[2::3]
    return checksums


@lru_cache(maxsize=256)
def slices_of(section_bytes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[slice, ...]:
    """Where in a frame each of the sections asked for lies."""
    offsets = _offsets(section_bytes)
    return tuple([slice(offsets[i], offsets[i] + section_bytes[i]) for i in wanted])


def runs_of(section_bytes: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Where in a frame the sections asked for start and end, those that touch in one piece."""
    offsets = _offsets(tuple(section_bytes))
    runs: list[tuple[int, int]] = []
    for i in wanted:
        first = offsets[i]
        if runs and runs[-1][1] == first:
            first, _ = runs.pop()
        runs.append((first, offsets[i] + section_bytes[i]))
    return runs


def checksum_offset(index: int) -> int:
    """Where the checksum of one section lies, in bytes from the frame's start."""
    return _FIXED.size + index * _SECTION.size + _SECTION.size - CHECKSUM_BYTES


def section_view(buf: memoryview, index: int) -> memoryview:
    """The bytes of one section of the frame at the start of `buf`; trusts a verified header."""
    offset, length, _ = _SECTION.unpack_from(buf, _FIXED.size + index * _SECTION.size)
    return buf[offset : offset + length]
