"""The frame format: byte for byte, and every kind of damage is told."""

import struct
from random import Random

import pytest
import xxhash

from kvstore.namespace import DS41F_LAYOUT
from kvstore.testing.tiers_frames import NAMESPACE_ID, key_of, make_frame
from kvstore.tiers.frame import (
    BlockName,
    BlockShape,
    Codec,
    FrameError,
    FrameHeader,
    FrameTruncated,
    HeaderCorrupt,
    Kind,
    NotAFrame,
    Section,
    SectionCorrupt,
    UnknownFrameVersion,
    WrongFrame,
    decode_header,
    encode_header,
    frame_bytes,
    header_bytes,
    layout_sections,
    seal_frame,
    section_view,
    verify_frame,
)

LENGTHS = (700, 1, 300)


def test_a_block_of_the_released_layout_costs_what_the_page_says() -> None:
    shape = frame_bytes(DS41F_LAYOUT.section_bytes)
    assert shape == (512, 512, 229_376)
    assert DS41F_LAYOUT.block_bytes == 227_840


def test_the_header_byte_for_byte() -> None:
    """Written out from docs/format.md, not from the code."""
    sections = layout_sections((5, 6), (b"a" * 16, b"b" * 16))
    header = FrameHeader(Kind.BLOCK, b"k" * 32, b"n" * 32, b"p" * 32, 7, 12.5, Codec.RAW, sections)
    expected = b"DS41FRM\0" + struct.pack("<HBBHHIII", 1, 1, 0, 2, 512, 4096, 11, 7) + bytes(4)
    expected += struct.pack("<d", 12.5) + b"k" * 32 + b"n" * 32 + b"p" * 32 + bytes(24)
    expected += struct.pack("<II", 512, 5) + bytes(8) + b"a" * 16
    expected += struct.pack("<II", 517, 6) + bytes(8) + b"b" * 16
    expected += bytes(512 - 16 - len(expected))
    expected += xxhash.xxh3_128_digest(expected)
    assert encode_header(header) == expected
    assert decode_header(expected) == header


@pytest.mark.parametrize("count", [1, 8, 10, 11, 64])
def test_headers_of_any_section_count_round_trip(count: int) -> None:
    sections = layout_sections([i * 37 for i in range(1, count + 1)], [bytes([count]) * 16] * count)
    header = FrameHeader(
        Kind.BLOCK, key_of(1), NAMESPACE_ID, key_of(2), 2**32 - 1, 1e9, Codec.RAW, sections
    )
    encoded = encode_header(header)
    assert len(encoded) == header_bytes(count)
    assert len(encoded) % 512 == 0
    assert decode_header(encoded + b"more") == header


@pytest.mark.parametrize("lengths", [(1,), (5, 6), LENGTHS, (4096,) * 64])
def test_a_block_is_sealed_as_any_frame_is(lengths: tuple[int, ...]) -> None:
    checksums = [bytes([i]) * 16 for i in range(len(lengths))]
    name = BlockName(key_of(1), NAMESPACE_ID, key_of(2), 9, 1e9 + 0.5)
    one, other = (bytearray(b"?" * frame_bytes(lengths).total) for _ in range(2))
    BlockShape.of(lengths).seal(memoryview(one), name, checksums)
    sections = layout_sections(lengths, checksums)
    seal_frame(memoryview(other), FrameHeader(Kind.BLOCK, *name, Codec.RAW, sections))
    assert one == other
    assert decode_header(one).sections == sections


def test_sections_lie_where_the_header_says() -> None:
    frame = make_frame(key_of(1), LENGTHS)
    header = decode_header(frame)
    at = header_bytes(3)
    for i, length in enumerate(LENGTHS):
        view = section_view(frame, i)
        assert view == frame[at : at + length]
        assert xxhash.xxh3_128_digest(view) == header.sections[i].checksum
        at += length
    assert header.stored_length == len(frame) == 4096
    assert header.payload_length == sum(LENGTHS)
    assert not any(frame[at:])


def test_a_whole_frame_verifies_and_only_under_its_own_name() -> None:
    frame = make_frame(key_of(1), LENGTHS)
    assert verify_frame(frame) is None
    assert verify_frame(frame, key_of(1), NAMESPACE_ID) is None
    assert isinstance(verify_frame(frame, key_of(2)), WrongFrame)
    assert isinstance(verify_frame(frame, key_of(1), key_of(2)), WrongFrame)


def test_every_flipped_bit_before_the_padding_is_found() -> None:
    frame = make_frame(key_of(1), LENGTHS)
    end = header_bytes(3) + sum(LENGTHS)
    for at in range(end):
        frame[at] ^= 1 << (at % 8)
        assert verify_frame(frame, key_of(1)) is not None, f"byte {at}"
        frame[at] ^= 1 << (at % 8)
    frame[end] ^= 1
    assert verify_frame(frame, key_of(1)) is None


def test_what_is_wrong_is_said() -> None:
    frame = make_frame(key_of(1), LENGTHS)

    def with_byte(at: int, value: int) -> FrameError | None:
        copy = bytearray(frame)
        copy[at] = value
        return verify_frame(copy)

    assert isinstance(with_byte(0, 0), NotAFrame)
    assert isinstance(with_byte(40, frame[40] ^ 1), HeaderCorrupt)
    assert isinstance(with_byte(15, 0xFF), HeaderCorrupt)
    damaged = with_byte(512 + 700, frame[512 + 700] ^ 1)
    assert isinstance(damaged, SectionCorrupt)
    assert damaged.index == 1
    assert isinstance(verify_frame(frame[:100]), FrameTruncated)
    assert isinstance(verify_frame(frame[:1024]), FrameTruncated)


@pytest.mark.parametrize(("at", "value"), [(8, 2), (10, 99), (11, 1)])
def test_an_unknown_version_kind_or_codec_is_said_to_be_unknown(at: int, value: int) -> None:
    head = bytearray(encode_header(decode_header(make_frame(key_of(1)))))
    head[at] = value
    head[-16:] = xxhash.xxh3_128_digest(head[:-16])
    with pytest.raises(UnknownFrameVersion):
        decode_header(head)


def test_a_section_table_that_contradicts_itself_is_refused() -> None:
    head = bytearray(encode_header(decode_header(make_frame(key_of(1)))))
    head[160:164] = (513).to_bytes(4, "little")
    head[-16:] = xxhash.xxh3_128_digest(head[:-16])
    with pytest.raises(HeaderCorrupt):
        decode_header(head)


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"sections": ()},
        {"sections": (Section(512, 5, b"short"),)},
        {"sections": (Section(512, 5, bytes(16)), Section(600, 5, bytes(16)))},
    ],
)
def test_what_no_header_can_say_is_refused(change: dict[str, object]) -> None:
    header = decode_header(make_frame(key_of(1)))
    with pytest.raises(ValueError, match=r"32 bytes|sections|checksum"):
        encode_header(header._replace(**change))


def test_random_bytes_are_never_a_frame_and_never_crash() -> None:
    random = Random(3)
    frame = bytes(make_frame(key_of(1), LENGTHS))
    for _ in range(2000):
        junk = bytearray(frame)
        at = random.randrange(0, 1500)
        junk[at : at + 8] = random.randbytes(8)
        del junk[random.randrange(len(junk)) :]
        assert verify_frame(junk) is not None


def test_the_quick_check_under_a_name_finds_every_flipped_bit_too() -> None:
    """Named frames are verified on a shorter way, which must see all that the long one sees."""
    frame = make_frame(key_of(1), LENGTHS)
    end = header_bytes(3) + sum(LENGTHS)
    random = Random(1)
    for at in range(end):
        bit = 1 << random.randrange(8)
        frame[at] ^= bit
        named = verify_frame(frame, key_of(1), NAMESPACE_ID)
        assert named is not None, f"bit {bit} of byte {at}"
        assert type(named) is type(verify_frame(frame))
        frame[at] ^= bit
    assert verify_frame(frame, key_of(1), NAMESPACE_ID) is None
    assert verify_frame(frame[:-1], key_of(1), NAMESPACE_ID) is not None
