"""The daemon's DRAM arena as a client on the same host sees it: read-only, without a copy.

A block is found by its frame's offset and its slot's generation. The daemon changes the generation
before it gives the slot to anybody else, so bytes that were read are the block's if the generation
is still the same *afterwards*. The frame's header says whose bytes they are and has their
checksums.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.port_stream import PortStream
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.frame import CHECKSUM_BYTES, KEY_OFFSET, checksum_offset, frame_bytes

if TYPE_CHECKING:
    from kvstore.client.shared_hbm import SharedHbmView

NOT_IN_ARENA = (1 << 64) - 1
_digest = xxhash.xxh3_128_digest
_copy = np.copyto


def places_by_key(keys: Sequence[bytes], packed: bytes) -> dict[bytes, tuple[int, int]]:
    """Offset and generation of the leading keys that have a place, from a reply's `slots`."""
    places = np.frombuffer(packed, "<u8").reshape(-1, 2).tolist()
    return {
        key: (offset, generation)
        for key, (offset, generation) in zip(keys, places, strict=False)
        if offset != NOT_IN_ARENA
    }


class Copied(Enum):
    """What a copy out of the arena gave."""

    GOOD = 0
    GONE = 1
    """The slot is another block's by now."""
    CORRUPT = 2


@dataclass(frozen=True, slots=True)
class Pieces:
    """Which bytes of a frame make the sections asked for.

    `runs`: (offset in the frame, offset in the result, length), neighbours in one. `spans`: where
    each section lies in the result, and `slices` the same. `checksums`: where each one's digest
    lies in the frame. `stride`: bytes of the result. `head_bytes`, `end`: of the frame.
    """

    runs: list[tuple[int, int, int]]
    spans: list[tuple[int, int]]
    checksums: list[int]
    slices: list[slice]
    stride: int
    head_bytes: int
    end: int

    def in_frame(self) -> list[tuple[int, int]]:
        """Where each section asked for lies in the frame: offset and length."""
        places = []
        for a, b in self.spans:
            for first, to, length in self.runs:
                if to <= a < to + length:
                    places.append((first + a - to, b - a))
        return places

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, section_bytes: tuple[int, ...], wanted: tuple[int, ...]) -> "Pieces":
        """Of a layout's sections, and the indices asked for."""
        starts = [frame_bytes(section_bytes).payload_offset]
        for size in section_bytes:
            starts.append(starts[-1] + size)
        runs: list[tuple[int, int, int]] = []
        spans, at = [], 0
        for i in wanted:
            size = section_bytes[i]
            spans.append((at, at + size))
            if runs and runs[-1][0] + runs[-1][2] == starts[i]:
                first, to, length = runs.pop()
                runs.append((first, to, length + size))
            else:
                runs.append((starts[i], at, size))
            at += size
        checksums = [checksum_offset(i) for i in wanted]
        head = frame_bytes(section_bytes).payload_offset
        slices = [slice(*span) for span in spans]
        return cls(runs, spans, checksums, slices, at, head, starts[-1])


@dataclass(slots=True)
class LocatedLease:
    """Where the blocks of a lease lie. `places`: offset and generation per key, as acquired.
    `shown`: those that a caller was given to use in place. `hbm`, `in_hbm`, `shown_in_hbm`: the
    same of HBM, where it is open."""

    arena: "SharedArenaView"
    keys: Sequence[bytes]
    places: npt.NDArray[np.uint64]
    section_bytes: Sequence[int]
    expires_s: float
    shown: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    hbm: "SharedHbmView | None" = None
    in_hbm: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    shown_in_hbm: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    _at: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    @property
    def known(self) -> dict[bytes, tuple[int, int]]:
        """Offset and generation of what is known to lie in the arena."""
        if not self._at:
            self._at = places_by_key(self.keys, self.places.tobytes())
        return self._at

    def intact(self, keys: Sequence[bytes]) -> bool:
        """Whether what was shown of these blocks still is theirs; False for one never shown."""
        in_hbm = [place for key in keys if (place := self.shown_in_hbm.get(key))]
        in_arena = [place for key in keys if (place := self.shown.get(key))]
        if not self.arena.alive or any(
            key not in self.shown and key not in self.shown_in_hbm for key in keys
        ):
            return False
        if in_hbm and (self.hbm is None or not self.hbm.intact(in_hbm)):
            return False
        return not in_arena or self.arena.intact(in_arena)

    def learn(self, keys: Sequence[bytes], places: npt.NDArray[np.uint64]) -> None:
        """The daemon has told newer places."""
        known = self.known
        for key, (offset, generation) in zip(keys, places.tolist(), strict=True):
            if offset == NOT_IN_ARENA:
                known.pop(key, None)
            else:
                known[key] = (offset, generation)


class SharedArenaView:
    """The mapping. `stream`: the connection that brought it; when that ends, the daemon may be
    gone."""

    def __init__(self, stream: PortStream, fd: int) -> None:
        opened = stream.opened
        size, table = opened.arena_bytes, opened.generations_offset
        if os.fstat(fd).st_size < size or not 0 < table <= size or table % PAGE_BYTES:
            raise ValueError(f"an arena of {size} B with generations at {table}")
        self.instance_id: bytes = opened.instance_id
        self.opened = opened
        self._stream = stream
        self.view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        self._bytes = np.frombuffer(self.view, np.uint8)
        self._slots_end = table
        self._generations = np.frombuffer(self.view[table : table + table // PAGE_BYTES * 8], "<u8")

    @property
    def alive(self) -> bool:
        """Whether the daemon that owns it is still there."""
        return self._stream.alive

    def holds(self, offset: int, generation: int) -> bool:
        """Whether the slot is still the same block's."""
        return bool(self._generations[offset // PAGE_BYTES] == generation)

    def intact(self, places: Sequence[tuple[int, int]]) -> bool:
        """`holds`, for all."""
        table = np.array(places, np.uint64).reshape(-1, 2)
        return bool((self._generations[table[:, 0] // PAGE_BYTES] == table[:, 1]).all())

    def frame(self, offset: int, frame_bytes: int) -> memoryview | None:
        """The frame's bytes; None where no frame can lie there."""
        if offset % PAGE_BYTES or offset + frame_bytes > self._slots_end:
            return None
        return self.view[offset : offset + frame_bytes]

    def copy(
        self,
        keys: Sequence[bytes],
        places: Sequence[tuple[int, int]],
        pieces: Pieces,
        into: memoryview,
        starts: Sequence[int],
        verify: bool,
    ) -> list[Copied]:
        """Copy blocks out, each to its start in `into`, and look whether they were still there;
        with `verify` also whether they are what their checksums say."""
        if not keys:
            return []
        table = np.array(places, np.uint64)
        if int(table[:, 0].max()) + pieces.end > self._slots_end:
            raise ValueError("a place outside the arena")
        wrong: set[int] = set()
        # Hundreds of blocks a millisecond pass here: what can be is done before the loop.
        source, target = self._bytes, np.frombuffer(into, np.uint8)
        for i, ((offset, _), start) in enumerate(zip(places, starts, strict=True)):
            for first, to, length in pieces.runs:
                at, to = offset + first, start + to
                # NumPy copies without the GIL, a memoryview does not
                _copy(target[to : to + length], source[at : at + length])
            if verify and not self._right(keys[i], offset, pieces, into, start):
                wrong.add(i)
        held = (self._generations[table[:, 0] // PAGE_BYTES] == table[:, 1]).tolist()
        if not wrong and all(held):
            return [Copied.GOOD] * len(held)
        return [
            (Copied.CORRUPT if i in wrong else Copied.GOOD) if there else Copied.GONE
            for i, there in enumerate(held)
        ]

    def _right(self, key: bytes, offset: int, pieces: Pieces, into: memoryview, start: int) -> bool:
        head = bytes(self.view[offset : offset + pieces.head_bytes])
        return head[KEY_OFFSET : KEY_OFFSET + len(key)] == key and [
            head[c : c + CHECKSUM_BYTES] for c in pieces.checksums
        ] == list(map(_digest, map(into[start : start + pieces.stride].__getitem__, pieces.slices)))
