"""The store's HBM tier as a client on the same host reads it: out of the opened pools.

As with the arena (`kvstore.client.shared_arena`), a block is a frame's offset and its slot's
generation, and bytes are the block's if the generation is still the same *afterwards*. What is
copied to the host is verified there against the frame's checksums; what is used in place on a
device is not, since nothing of it passes the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvstore.block import HbmBlock
from kvstore.client.shared_arena import Copied, Pieces
from kvstore.client.transport import BulkRead
from kvstore.tiers.frame import CHECKSUM_BYTES, KEY_OFFSET
from kvstore.tiers.hbm.device import DeviceError, PoolHandle
from kvstore.tiers.hbm.opened import OpenedHbm

Place = tuple[int, int]
"""Offset over all pools, and generation."""
_digest = xxhash.xxh3_128_digest


class SharedHbmView:
    """Blocks of a lease in the pools."""

    def __init__(self, hbm: OpenedHbm) -> None:
        self._hbm = hbm

    @property
    def kind(self) -> str:
        """`cuda` or `simulated`."""
        return self._hbm.kind

    def intact(self, places: Sequence[Place]) -> bool:
        """Whether all slots still are the same blocks'."""
        return self._hbm.intact(places)

    def copy(
        self,
        keys: Sequence[bytes],
        places: Sequence[Place],
        pieces: Pieces,
        into: memoryview,
        starts: Sequence[int],
        verify: bool,
    ) -> list[Copied]:
        """Copy blocks to the host, each to its start in `into`. See `SharedArenaView.copy`."""
        outcomes = []
        for key, place, start in zip(keys, places, starts, strict=True):
            room = into[start : start + pieces.stride]
            right = self._copy_one(key, place[0], pieces, room, verify)
            if not self._hbm.intact([place]):
                outcomes.append(Copied.GONE)
            else:
                outcomes.append(Copied.GOOD if right else Copied.CORRUPT)
        return outcomes

    def _copy_one(
        self, key: bytes, offset: int, pieces: Pieces, room: memoryview, verify: bool
    ) -> bool:
        found = self._hbm.place(offset, pieces.end)
        if found is None:
            return False
        pool, at = found
        for first, to, length in pieces.runs:
            pool.copy_out(room[to : to + length], at + first)
        if not verify:
            return True
        head = bytearray(pieces.head_bytes)
        pool.copy_out(memoryview(head), at)
        return head[KEY_OFFSET : KEY_OFFSET + len(key)] == key and all(
            head[c : c + CHECKSUM_BYTES] == _digest(room[part])
            for c, part in zip(pieces.checksums, pieces.slices, strict=True)
        )

    def block(self, key: bytes, place: Place, pieces: Pieces) -> HbmBlock | None:
        """The sections in place; None where the slot is another block's by now."""
        found = self._hbm.place(place[0], pieces.end)
        if found is None or not self._hbm.intact([place]):
            return None
        pool, at = found
        sections = tuple(pool.array(at + first, length) for first, length in pieces.in_frame())
        return HbmBlock(key, pool.handle.kind, pool.handle.device, sections)

    def close(self) -> None:
        """Let go of the pools; blocks shown MUST be gone."""
        self._hbm.close()


@dataclass(slots=True)
class HbmLease:
    """Where the blocks of a lease lay when it was acquired. `shown`: those that a caller was given
    to use in place. `expires_s`: of the monotonic clock."""

    view: SharedHbmView
    places: dict[bytes, Place]
    expires_s: float
    shown: dict[bytes, Place] = field(default_factory=dict)

    def blocks(self, read: BulkRead) -> list[HbmBlock | None]:
        """See `Transport.view_hbm`."""
        pieces = Pieces.of(tuple(read.section_bytes), tuple(read.sections))
        return [self._block(key, pieces) for key in read.keys]

    def _block(self, key: bytes, pieces: Pieces) -> HbmBlock | None:
        place = self.places.get(key)
        block = None if place is None else self.view.block(key, place, pieces)
        if block is not None and place is not None:
            self.shown[key] = place
        return block

    def intact(self, keys: Sequence[bytes]) -> bool:
        """Whether what was shown of these blocks still is theirs; False for one never shown."""
        if any(key not in self.shown for key in keys):
            return False
        return self.view.intact([self.shown[key] for key in keys])


def open_shared(opened: Any) -> SharedHbmView | None:
    """What the daemon's `PortOpenReply` shares, opened; None where it shares nothing. Raises
    `DeviceError` where a pool can't be opened."""
    if not len(opened.hbm_pools):
        return None
    try:
        pools = [PoolHandle(p.kind, p.device, p.size_bytes, p.handle) for p in opened.hbm_pools]
        return SharedHbmView(OpenedHbm.by_handles(pools, opened.hbm_generations))
    except ValueError as e:
        raise DeviceError(f"the daemon describes pools that can't be: {e}") from e
