"""Packed frames: byte for byte, back to the very same frame, and every kind of damage is told."""

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash
import zstandard

from kvstore.config import SsdConfig
from kvstore.testing.disk import SimDisk
from kvstore.testing.tiers_frames import (
    NAMESPACE_ID,
    Stored,
    key_of,
    load,
    make_frame,
    rows,
    store,
)
from kvstore.tiers.base import PAGE_BYTES, WriteItem
from kvstore.tiers.frame import (
    Codec,
    FrameError,
    HeaderCorrupt,
    SectionCorrupt,
    UnknownFrameVersion,
    decode_header,
    seal_frame,
    verify_frame,
)
from kvstore.tiers.ssd import SsdTier, entry
from kvstore.tiers.ssd.files import aligned_buffer
from kvstore.tiers.ssd.packed import (
    Packer,
    check_stored,
    decode_any,
    decode_packed,
    is_packed,
    unpack_frame,
)

LENGTHS = (9000, 700, 30_000)
CONFIG = SsdConfig(
    budget_bytes=4 << 20, segment_bytes=256 << 10, free_floor_bytes=0, compression="zstd"
)
OFF = CONFIG.model_copy(update={"compression": "off"})


def mixed_frame() -> memoryview:
    """The first section packs, the second is too random to, the third packs."""
    frame = make_frame(key_of(1), LENGTHS, packable=True)
    header = decode_header(frame)
    section = header.sections[1]
    noise = Random(5).randbytes(section.length)
    frame[section.offset : section.offset + section.length] = noise
    sections = list(header.sections)
    sections[1] = section._replace(checksum=xxhash.xxh3_128_digest(noise))
    seal_frame(frame, header._replace(sections=tuple(sections)))
    return frame


def room_for(packed: memoryview, raw: memoryview) -> memoryview:
    """What a read of the packed frame's whole place gives."""
    room = aligned_buffer(len(raw))
    room[: len(packed)] = packed
    return room


def packed_of(frame: memoryview) -> memoryview:
    packed = Packer(1).pack(frame)
    assert packed is not None
    return packed


def test_the_packed_frame_byte_for_byte() -> None:
    """Written out from docs/format.md, not from the code."""
    frame = mixed_frame()
    raw = decode_header(frame)
    contents = [bytes(frame[s.offset : s.offset + s.length]) for s in raw.sections]
    zstd = zstandard.ZstdCompressor(level=1, write_checksum=False)
    stored = [zstd.compress(contents[0]), contents[1], zstd.compress(contents[2])]
    expected = b"DS41FRM\0" + struct.pack("<HBBHH", 2, 1, 1, 3, 512)
    expected += struct.pack("<III", len(frame), sum(LENGTHS), 0) + bytes(4)
    expected += struct.pack("<d", 1000.0) + key_of(1) + NAMESPACE_ID + NAMESPACE_ID
    expected += xxhash.xxh3_128_digest(b"".join(stored)) + bytes(8)
    at = 512
    for content, part, codec in zip(contents, stored, (1, 0, 1), strict=True):
        expected += struct.pack("<IIIB3x", at, len(content), len(part), codec)
        expected += xxhash.xxh3_128_digest(content)
        at += len(content)
    expected += bytes(512 - 16 - len(expected))
    expected += xxhash.xxh3_128_digest(expected)
    expected += b"".join(stored)
    packed = packed_of(frame)
    assert bytes(packed[: len(expected)]) == expected
    assert len(packed) == -(-len(expected) // PAGE_BYTES) * PAGE_BYTES
    assert not any(packed[len(expected) :])


@pytest.mark.parametrize("level", [-5, 1, 6])
@pytest.mark.parametrize("lengths", [(50_000,), LENGTHS, (4000,) * 64])
def test_unpacking_gives_the_very_same_frame(lengths: tuple[int, ...], level: int) -> None:
    frame = make_frame(key_of(2), lengths, packable=True)
    packed = Packer(level).pack(frame)
    assert packed is not None
    assert len(packed) < len(frame)
    assert decode_any(packed) == decode_header(frame)._replace(codec=Codec.ZSTD)
    assert check_stored(decode_any(packed), packed) is None
    room = room_for(packed, frame)
    room[len(packed) :] = b"x" * (len(room) - len(packed))
    unpack_frame(room)
    assert room == frame


def test_what_does_not_shrink_by_a_page_stays_as_it_is() -> None:
    assert Packer(1).pack(make_frame(key_of(3), (50_000,))) is None
    assert Packer(1).pack(make_frame(key_of(3), (1000,), packable=True)) is None
    frame = make_frame(key_of(3), (50_000,))
    before = bytes(frame)
    unpack_frame(frame)
    assert frame == before


def test_a_packed_frame_is_no_raw_one() -> None:
    frame = mixed_frame()
    packed = packed_of(frame)
    assert is_packed(packed)
    assert not is_packed(frame)
    assert isinstance(verify_frame(packed), UnknownFrameVersion)
    assert isinstance(verify_frame(packed, key_of(1), NAMESPACE_ID), UnknownFrameVersion)


def test_every_flipped_bit_before_the_padding_is_found() -> None:
    frame = mixed_frame()
    packed = packed_of(frame)
    end = decode_packed(packed).end
    random = Random(0)
    header = [(at, 1 << random.randrange(8)) for at in range(512)]
    payload = [(random.randrange(512, end), 1 << random.randrange(8)) for _ in range(400)]
    for at, bit in header + payload:
        room = room_for(packed, frame)
        room[at] ^= bit
        unpack_frame(room)
        error = verify_frame(room, key_of(1), NAMESPACE_ID)
        assert isinstance(error, FrameError), f"bit {bit} of byte {at}"
        assert isinstance(error, SectionCorrupt) == (at >= 512)
        room = room_for(packed, frame)
        room[at] ^= bit
        assert refusal(room) is not None


def test_a_torn_packed_frame_is_found() -> None:
    frame = mixed_frame()
    packed = packed_of(frame)
    for sector in range(0, decode_packed(packed).end, 512):
        room = room_for(packed, frame)
        room[sector : sector + 512] = bytes(512)
        if room[: len(packed)] == packed:
            continue
        unpack_frame(room)
        assert verify_frame(room, key_of(1), NAMESPACE_ID) is not None


def refusal(packed: memoryview) -> FrameError | None:
    try:
        return check_stored(decode_any(packed), packed)
    except FrameError as e:
        return e


@pytest.mark.parametrize("size", [0, 9, 100, 4096])
def test_a_short_packed_frame_is_refused(size: int) -> None:
    packed = packed_of(mixed_frame())
    assert refusal(packed) is None
    assert refusal(packed[:size]) is not None


def resealed(packed: memoryview, at: int, value: bytes) -> memoryview:
    """With other bytes in the header, and a checksum that says they are right."""
    room = aligned_buffer(len(packed))
    room[:] = packed
    room[at : at + len(value)] = value
    room[496:512] = xxhash.xxh3_128_digest(room[:496])
    return room


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (168, b"\xff\xff\xff\x7f"),  # a stored size beyond the frame
        (172, b"\x07"),  # a codec that nobody knows
        (12, b"\xff\x00"),  # more sections than there is room for
        (164, b"\x01\x00\x00\x00"),  # a size that no longer adds up
        (14, b"\x00\x00"),  # no header at all
    ],
)
def test_a_header_that_says_what_can_not_be_is_refused(at: int, value: bytes) -> None:
    packed = resealed(packed_of(mixed_frame()), at, value)
    with pytest.raises(FrameError):
        decode_packed(packed)


def test_a_header_that_lies_about_sizes_gives_no_wrong_byte() -> None:
    frame = mixed_frame()
    packed = packed_of(frame)
    for at, value in ((168, struct.pack("<I", 5)), (172, b"\x00"), (236, b"\x00")):
        room = room_for(resealed(packed, at, value), frame)
        unpack_frame(room)
        assert verify_frame(room, key_of(1), NAMESPACE_ID) is not None


# In the log


def some_frames() -> list[memoryview]:
    return [make_frame(key_of(i), (20_000, 9_000), packable=i % 2 == 0) for i in range(12)]


def check(tier: SsdTier, stored: list[Stored]) -> None:
    for s in stored:
        into = load(tier, s.location, s.length)
        assert verify_frame(into, s.key, NAMESPACE_ID) is None
        assert into == s.frame


def test_both_kinds_are_read_whatever_the_setting_says(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path / "s", OFF)
    stored = store(tier, some_frames()[:6])
    tier.close()
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    check(tier, stored)
    stored += store(tier, some_frames()[6:])
    check(tier, stored)
    tier.close()
    tier, recovered = SsdTier.open(tmp_path / "s", OFF)
    assert recovered.notes == []
    assert rows(recovered) == {s.key: (s.location, s.length) for s in stored}
    check(tier, stored)
    tier.close()


def codecs_in(path: Path) -> set[int]:
    """Of the frames in a store's segments, read from the files."""
    found = set()
    for file in sorted((path / "segments").iterdir()):
        data = np.fromfile(file, np.uint8)
        for page in range(PAGE_BYTES, len(data), PAGE_BYTES):
            if data[page : page + 8].tobytes() == b"DS41FRM\0":
                found.add(int(data[page + 11]))
    return found


def test_packed_frames_take_fewer_blocks_of_the_disk(tmp_path: Path) -> None:
    used = {}
    for config in (OFF, CONFIG):
        directory = tmp_path / config.compression
        tier, _ = SsdTier.open(directory, config)
        store(tier, [make_frame(key_of(i), (40_000,), packable=True) for i in range(20)])
        tier.refresh()
        used[config.compression] = tier.used_bytes
        tier.close()
    assert used["zstd"] < 0.6 * used["off"]
    assert codecs_in(tmp_path / "off") == {0}
    assert codecs_in(tmp_path / "zstd") == {1}


def test_a_lost_index_is_rebuilt_from_packed_frames_too() -> None:
    disk = SimDisk()
    tier, _ = SsdTier.open(Path("/s"), CONFIG, files=disk, open_index=disk.open_index)
    stored = store(tier, some_frames())
    tier.close()
    (index,) = (content for content in disk.state.contents.values() if hasattr(content, "blocks"))
    before = {key: bytes(value) for key, value in index.blocks.items()}
    codecs = entry.decode_entries(b"".join(before.values()))["codec"].tolist()
    assert sorted(set(codecs)) == [0, 1]
    disk.unlink(Path("/s/index.lmdb/data.mdb"))
    tier, recovered = SsdTier.open(Path("/s"), CONFIG, files=disk, open_index=disk.open_index)
    assert recovered.rebuilt
    assert rows(recovered) == {s.key: (s.location, s.length) for s in stored}
    check(tier, stored)
    contents = [c for c in disk.state.contents.values() if hasattr(c, "blocks")]
    assert contents[-1].blocks == before, "the entries are those of the first life"
    tier.close()


def test_a_wrong_frame_is_refused_and_not_packed() -> None:
    disk = SimDisk()
    tier, _ = SsdTier.open(Path("/s"), CONFIG, files=disk, open_index=disk.open_index)
    (good,) = store(tier, [make_frame(key_of(0), (20_000,), packable=True)])
    bad = make_frame(key_of(1), (20_000,), packable=True)
    bad[600] ^= 1
    worse = make_frame(key_of(2), (20_000,), packable=True)
    worse[40] ^= 1
    items = []
    for key, frame in ((key_of(1), bad), (key_of(2), worse)):
        location = tier.place(len(frame))
        assert location is not None
        items.append(WriteItem(location, key, 1, frame))
    first, second = tier.write_batch(items)
    assert isinstance(first, SectionCorrupt)
    assert isinstance(second, HeaderCorrupt)
    check(tier, [good])
    tier.close()
