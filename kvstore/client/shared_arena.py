"""The daemon's DRAM arena as a client on the same host sees it: read-only, without a copy.

A block is found by its frame's offset and its slot's generation. The daemon changes the generation
before it gives the slot to anybody else, so bytes that were read are the block's if the generation
is still the same *afterwards*. The frame's header says whose bytes they are and has their
checksums.
"""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.port_stream import PortStream
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.frame import CHECKSUM_BYTES, KEY_OFFSET, checksum_offset, frame_bytes

NOT_IN_ARENA = (1 << 64) - 1
SPLIT_BYTES_MIN = 2 << 20
"""From so many bytes on a second thread helps to copy."""
_digest = xxhash.xxh3_128_digest


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
    each section lies in the result. `checksums`: where each one's digest lies in the frame.
    `stride`: bytes of the result. `end`: of the frame.
    """

    runs: list[tuple[int, int, int]]
    spans: list[tuple[int, int]]
    checksums: list[int]
    stride: int
    end: int

    @classmethod
    def of(cls, section_bytes: Sequence[int], wanted: Sequence[int]) -> "Pieces":
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
        return cls(runs, spans, [checksum_offset(i) for i in wanted], at, starts[-1])


@dataclass(slots=True)
class LocatedLease:
    """Where the blocks of a lease lie. `places`: offset and generation per key, as acquired.
    `shown`: those that a caller was given to use in place."""

    arena: "SharedArenaView"
    keys: Sequence[bytes]
    places: npt.NDArray[np.uint64]
    section_bytes: Sequence[int]
    expires_s: float
    shown: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    _at: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def place(self, key: bytes) -> tuple[int, int] | None:
        """Offset and generation, or None where it is not known to lie in the arena."""
        if not self._at:
            there = self.places[:, 0] != NOT_IN_ARENA
            self._at = {
                key: (offset, generation)
                for key, ok, (offset, generation) in zip(
                    self.keys, there.tolist(), self.places.tolist(), strict=False
                )
                if ok
            }
        return self._at.get(key)

    def learn(self, keys: Sequence[bytes], places: npt.NDArray[np.uint64]) -> None:
        """The daemon has told newer places."""
        if keys:
            self.place(keys[0])
        for key, (offset, generation) in zip(keys, places.tolist(), strict=True):
            if offset == NOT_IN_ARENA:
                self._at.pop(key, None)
            else:
                self._at[key] = (offset, generation)


class SharedArenaView:
    """The mapping. `stream`: the connection that brought it; when that ends, the daemon may be
    gone."""

    def __init__(self, stream: PortStream, fd: int) -> None:
        opened = stream.opened
        size, table = opened.arena_bytes, opened.generations_offset
        if os.fstat(fd).st_size < size or not 0 < table <= size or table % PAGE_BYTES:
            raise ValueError(f"an arena of {size} B with generations at {table}")
        self.instance_id: bytes = opened.instance_id
        self._stream = stream
        self.view = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        self._bytes = np.frombuffer(self.view, np.uint8)
        self._slots_end = table
        self._generations = np.frombuffer(self.view[table : table + table // PAGE_BYTES * 8], "<u8")
        self._helper = ThreadPoolExecutor(1, "kvstore-copy") if (os.cpu_count() or 1) > 1 else None

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
        into: Sequence[memoryview],
    ) -> list[Copied]:
        """Copy blocks out and verify them, each into its own `pieces.stride` bytes."""
        n = len(keys)
        if self._helper is None or n < 2 or n * pieces.stride < SPLIT_BYTES_MIN:
            return self._copy_some(keys, places, pieces, into)
        half = n // 2
        other = self._helper.submit(
            self._copy_some, keys[half:], places[half:], pieces, into[half:]
        )
        return self._copy_some(keys[:half], places[:half], pieces, into[:half]) + other.result()

    def _copy_some(
        self,
        keys: Sequence[bytes],
        places: Sequence[tuple[int, int]],
        pieces: Pieces,
        into: Sequence[memoryview],
    ) -> list[Copied]:
        return [
            self._copy_one(key, offset, generation, pieces, target)
            for key, (offset, generation), target in zip(keys, places, into, strict=True)
        ]

    def _copy_one(
        self, key: bytes, offset: int, generation: int, pieces: Pieces, into: memoryview
    ) -> Copied:
        if offset + pieces.end > self._slots_end:
            return Copied.GONE
        source, view = self._bytes, self.view
        target = np.frombuffer(into, np.uint8)
        for first, to, length in pieces.runs:
            at = offset + first
            # NumPy copies without the GIL, a memoryview does not
            np.copyto(target[to : to + length], source[at : at + length])
        expected = [bytes(view[offset + c : offset + c + CHECKSUM_BYTES]) for c in pieces.checksums]
        owner = view[offset + KEY_OFFSET : offset + KEY_OFFSET + len(key)]
        right = owner == key and [_digest(into[a:b]) for a, b in pieces.spans] == expected
        if self._generations[offset // PAGE_BYTES] != generation:
            return Copied.GONE
        return Copied.GOOD if right else Copied.CORRUPT

    def close(self) -> None:
        """The mapping goes with the last view into it."""
        if self._helper is not None:
            self._helper.shutdown(wait=False)
