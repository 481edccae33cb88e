"""Packed frames: a frame whose sections are compressed where that pays, for a medium alone.

A packed frame takes the same room in a log as the raw one, `FrameHeader.stored_length`; the pages
behind what is packed are never written, and a file system gives them no blocks. Its header says
all that the raw one's says, so that unpacking gives back the very same bytes, header included.
`docs/format.md` has the layout byte for byte.
"""

import struct
from itertools import accumulate, pairwise
from typing import NamedTuple

import xxhash
import zstandard

from kvstore.tiers.frame import (
    CHECKSUM_BYTES,
    FRAME_ALIGN_BYTES,
    FRAME_MAGIC,
    Codec,
    FrameError,
    FrameHeader,
    FrameTruncated,
    HeaderCorrupt,
    Section,
    SectionCorrupt,
    check_sections,
    decode_header,
    encode_header,
    header_bytes,
    seal_frame,
)
from kvstore.tiers.ssd.files import aligned_buffer

PACKED_VERSION = 2
SECTION_GAIN_MIN = 0.05
"""A section that shrinks by less is stored as it is."""
_START = FRAME_MAGIC + PACKED_VERSION.to_bytes(2, "little")
_RAW_START = FRAME_MAGIC + (1).to_bytes(2, "little")
_CODEC_AT, _PAYLOAD_CHECKSUM_AT, _TABLE_AT = 11, 136, 160
_ENTRY_BYTES, _SPARE_AT = 32, 8
_PACKED = struct.Struct("<IB3x")


class Stored(NamedTuple):
    """A section as a packed frame holds it: bytes, and whether they are compressed."""

    length: int
    codec: Codec


class PackedHeader(NamedTuple):
    """`raw`: the header of the frame that unpacking gives, but for its codec. `stored`: a value per
    section. `checksum`: xxh3-128 of all stored sections."""

    raw: FrameHeader
    stored: tuple[Stored, ...]
    checksum: bytes

    @property
    def end(self) -> int:
        """Bytes from the frame's start to the end of the last stored section."""
        return header_bytes(len(self.stored)) + sum(s.length for s in self.stored)


def is_packed(buf: memoryview) -> bool:
    """Whether what starts here poses as a packed frame."""
    # the version alone tells nearly all raw frames apart, for less than a comparison costs
    return len(buf) > 8 and buf[8] == PACKED_VERSION and buf[: len(_START)] == _START


def _sealed(body: bytearray) -> bytes:
    return bytes(body) + xxhash.xxh3_128_digest(body)


def encode_packed(header: PackedHeader) -> bytes:
    """The header's bytes."""
    body = bytearray(encode_header(header.raw._replace(codec=Codec.RAW))[:-CHECKSUM_BYTES])
    body[: len(_START)] = _START
    body[_CODEC_AT] = Codec.ZSTD
    body[_PAYLOAD_CHECKSUM_AT : _PAYLOAD_CHECKSUM_AT + CHECKSUM_BYTES] = header.checksum
    for i, stored in enumerate(header.stored):
        _PACKED.pack_into(body, _TABLE_AT + i * _ENTRY_BYTES + _SPARE_AT, *stored)
    return _sealed(body)


def decode_packed(buf: memoryview) -> PackedHeader:
    """The header at the start of `buf`, which may be longer. Raises a `FrameError`."""
    if not is_packed(buf):
        raise HeaderCorrupt("no packed frame")
    size = int.from_bytes(buf[14:16], "little")
    body = bytearray(buf[: max(0, size - CHECKSUM_BYTES)])
    if len(body) < _TABLE_AT or buf[len(body) : size] != xxhash.xxh3_128_digest(body):
        raise HeaderCorrupt("the header of a packed frame does not match its checksum")
    checksum = bytes(body[_PAYLOAD_CHECKSUM_AT : _PAYLOAD_CHECKSUM_AT + CHECKSUM_BYTES])
    body[: len(_RAW_START)] = _RAW_START
    body[_CODEC_AT] = Codec.RAW
    body[_PAYLOAD_CHECKSUM_AT : _PAYLOAD_CHECKSUM_AT + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
    stored = []
    for i in range(int.from_bytes(body[12:14], "little")):
        at = _TABLE_AT + i * _ENTRY_BYTES + _SPARE_AT
        if at + _PACKED.size > len(body):
            raise HeaderCorrupt("more sections than the header of a packed frame has room for")
        length, codec = _PACKED.unpack_from(body, at)
        if codec not in (Codec.RAW, Codec.ZSTD):
            raise HeaderCorrupt(f"a section of codec {codec}")
        body[at : at + _PACKED.size] = bytes(_PACKED.size)
        stored.append(Stored(length, Codec(codec)))
    raw = decode_header(_sealed(body))
    header = PackedHeader(raw._replace(codec=Codec.ZSTD), tuple(stored), checksum)
    if header.end > raw.stored_length:
        raise HeaderCorrupt("a packed frame that is larger than its raw one")
    return header


def decode_any(buf: memoryview) -> FrameHeader:
    """The header of the raw or packed frame at the start of `buf`; a packed one's with its codec,
    and with the sections that unpacking gives. Raises a `FrameError`."""
    return decode_packed(buf).raw if is_packed(buf) else decode_header(buf)


def check_stored(header: FrameHeader, frame: memoryview) -> FrameError | None:
    """Whether the sections of the raw or packed frame `frame`, whose `header` is `decode_any`'s,
    are what was stored."""
    if header.codec is Codec.RAW:
        return check_sections(header, frame)
    packed = decode_packed(frame)
    if len(frame) < packed.end:
        return FrameTruncated(f"{len(frame)} B of a packed frame of {packed.end} B")
    stored = frame[header_bytes(len(packed.stored)) : packed.end]
    if xxhash.xxh3_128_digest(stored) != packed.checksum:
        return SectionCorrupt(0)
    return None


class Packer:
    """Packs frames at one level of zstd. One thread at a time."""

    def __init__(self, level: int) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level, write_checksum=False)

    def pack(self, frame: memoryview) -> memoryview | None:
        """The frame packed, whole pages in aligned memory of its own; None where that saves no
        page. The sections MUST be what the header says. Raises a `FrameError`."""
        header = decode_header(frame)
        stored, parts = [], []
        for section in header.sections:
            raw = frame[section.offset : section.offset + section.length]
            part = self._zstd.compress(raw)
            good = len(part) <= len(raw) * (1 - SECTION_GAIN_MIN)
            stored.append(Stored(len(part), Codec.ZSTD) if good else Stored(len(raw), Codec.RAW))
            parts.append(part if good else raw)
        payload = b"".join(parts)
        packed = PackedHeader(header, tuple(stored), xxhash.xxh3_128_digest(payload))
        size = -(-packed.end // FRAME_ALIGN_BYTES) * FRAME_ALIGN_BYTES
        if size >= header.stored_length:
            return None
        out = aligned_buffer(size)
        head = encode_packed(packed)
        out[: len(head)] = head
        out[len(head) : packed.end] = payload
        return out


def unpack_frame(frame: memoryview) -> None:
    """Turn a packed frame into the raw one, in place: `frame` has room for it. Anything else stays
    as it is; of what is damaged comes a frame that `verify_frame` refuses."""
    if not is_packed(frame):
        return
    try:
        packed = decode_packed(frame)
    except FrameError:
        return
    if len(frame) < packed.raw.stored_length:
        return
    start = header_bytes(len(packed.stored))
    data = bytes(frame[start : packed.end])
    ends = list(accumulate((s.length for s in packed.stored), initial=0))
    sound = xxhash.xxh3_128_digest(data) == packed.checksum
    for section, stored, (a, b) in zip(
        packed.raw.sections, packed.stored, pairwise(ends), strict=True
    ):
        content = _content(data[a:b], stored, section) if sound else None
        # zeros match the section's checksum only where zeros are what was stored
        content = bytes(section.length) if content is None else content
        frame[section.offset : section.offset + section.length] = content
    seal_frame(frame, packed.raw._replace(codec=Codec.RAW))


def _content(data: bytes, stored: Stored, section: Section) -> bytes | None:
    if stored.codec is Codec.RAW:
        return data if len(data) == section.length else None
    try:
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=section.length)
    except zstandard.ZstdError:
        return None
    return content if len(content) == section.length else None
