"""Frames to test logs with: whole, small, and the same every time; and a life with a log.

Everything depends on names and seeds only, so that another process knows what must be there.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from kvstore.tiers.base import Location, LogTier, Recovered, WriteItem
from kvstore.tiers.frame import (
    Codec,
    FrameHeader,
    Kind,
    decode_header,
    frame_bytes,
    layout_sections,
    seal_frame,
)
from kvstore.tiers.ssd.files import aligned_buffer

NAMESPACE_ID = hashlib.sha256(b"a namespace of tests").digest()
DESCRIPTOR = b'{"a namespace":"of tests"}'


def key_of(name: object) -> bytes:
    """A key that depends on `name` only."""
    return hashlib.sha256(repr(name).encode()).digest()


def make_frame(
    key: bytes,
    section_lengths: Sequence[int] = (700, 300),
    seed: int = 0,
    parent: bytes = NAMESPACE_ID,
    namespace_id: bytes = NAMESPACE_ID,
    depth: int = 0,
    created_wall_s: float = 1000.0,
    packable: bool = False,
) -> memoryview:
    """A whole frame in aligned memory, its sections random from key and seed; `packable`: of few
    different bytes, so that zstd makes them smaller."""
    random = Random(key + seed.to_bytes(8, "little"))
    payload = [random.randbytes(n) for n in section_lengths]
    if packable:
        payload = [p.translate(bytes(i & 3 for i in range(256))) for p in payload]
    checksums = [xxhash.xxh3_128_digest(p) for p in payload]
    sections = layout_sections(section_lengths, checksums)
    header = FrameHeader(
        Kind.BLOCK, key, namespace_id, parent, depth, created_wall_s, Codec.RAW, sections
    )
    frame = aligned_buffer(frame_bytes(section_lengths).total)
    for section, data in zip(sections, payload, strict=True):
        frame[section.offset : section.offset + section.length] = data
    seal_frame(frame, header)
    return frame


@dataclass(slots=True)
class Stored:
    """A frame in a log, and where."""

    key: bytes
    frame: memoryview
    location: Location

    @property
    def length(self) -> int:
        return len(self.frame)


def store(
    tier: LogTier, frames: Iterable[memoryview], removes: Sequence[bytes] = ()
) -> list[Stored]:
    """Place and write whole frames as one batch; all of them must find room and be taken."""
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    stored = []
    for frame in frames:
        location = tier.place(len(frame))
        assert location is not None, "no room"
        stored.append(Stored(decode_header(frame).key, frame, location))
    items = [WriteItem(s.location, s.key, number, s.frame) for s in stored]
    assert tier.write_batch(items, removes) == [None] * len(items)
    return stored


def load(tier: LogTier, location: Location, length: int) -> memoryview:
    """A frame's bytes, into fresh aligned memory."""
    into = aligned_buffer(length)[:length]
    tier.read(location, into)
    return into


def rows(recovered: Recovered) -> dict[bytes, tuple[Location, int]]:
    """Where each recovered object lies, and its frame's length."""
    places = zip(recovered.segment.tolist(), recovered.offset.tolist(), strict=True)
    lengths = recovered.stored_length.tolist()
    return {
        key: (Location(*place), length)
        for key, place, length in zip(recovered.keys, places, lengths, strict=True)
    }


def make_room(tier: LogTier, live: dict[bytes, Stored], count: int) -> list[bytes]:
    """Evict the `count` oldest of `live`, then move what lives in the segment with most dead bytes
    and drop it. `live` follows; the keys that went."""
    going = [live.pop(key) for key in list(live)[:count]]
    tier.remove([s.key for s in going])
    for s in going:
        tier.mark_dead(s.location, s.length)
    victim = tier.victim_segment()
    if victim is not None:
        moving = [s for s in live.values() if s.location.segment == victim]
        number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
        items = []
        for s in moving:
            location = tier.place(s.length, compaction=True)
            assert location is not None, "the segment kept for compaction was not there"
            items.append(WriteItem(location, s.key, number, s.frame))
        assert tier.write_batch(items) == [None] * len(items)
        for s, item in zip(moving, items, strict=True):
            tier.mark_dead(s.location, s.length)
            live[s.key] = Stored(s.key, s.frame, item.location)
        tier.drop_segment(victim)
    return [s.key for s in going]
