"""The contract of the tiers, and the values that cross it.

Two kinds of place: a `PoolTier` hands out ranges of fixed memory (HBM, and as a `SlotTier`, whose
bytes the host can touch, DRAM), a `LogTier` appends frames to segments (SSD). Both hold an object
as the same bytes, its frame (`kvstore.tiers.frame`), so that moving one is a single transfer and no
copy.

Threads. Methods marked *core* are called from one thread only, do no I/O and never block for long.
Methods marked *worker* block; any number of threads may call them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.tiers.frame import FrameError

PAGE_BYTES = 4096
"""Alignment of slots, frames and segments, in memory and on disk: what O_DIRECT asks for."""


class Slot(NamedTuple):
    """A range of an arena. `page`: its first 4 KiB page. `length`: bytes, whole pages.

    `generation`: a number that this page's next slot will not have; who kept a `Slot` past its
    `free` is told so instead of being given another object's bytes.
    """

    page: int
    length: int
    generation: int

    @property
    def offset(self) -> int:
        """Bytes from the start of the arena."""
        return self.page * PAGE_BYTES


class StaleSlot(Exception):
    """The slot was freed; its bytes may belong to another object by now."""


class PoolTier(Protocol):
    """Fixed memory that hands out page-aligned slots. All methods are *core*.

    The caller MUST free each slot once, and MUST keep it while a worker touches its bytes.
    """

    @property
    def budget_bytes(self) -> int:
        """All bytes that slots can take; never exceeded."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots handed out, padding included."""
        ...

    @property
    def slot_bytes_max(self) -> int:
        """The largest slot that an empty tier has."""
        ...

    def alloc(self, frame_bytes: int) -> Slot | None:
        """A slot of at least `frame_bytes` (rounded up to pages), its content undefined; None
        where no hole is large enough. Raises `ValueError` for a size < 1."""
        ...

    def slot_at(self, page: int) -> Slot:
        """The live slot that starts at `page`; `StaleSlot` where there is none. Lets an index keep
        a page number per row instead of a `Slot`."""
        ...

    def generations_of(self, pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Of the live slots that start at these pages; the caller knows that they are live."""
        ...

    def free(self, slot: Slot) -> None:
        """Give a slot back. `StaleSlot` where it was freed before."""
        ...

    def check_integrity(self) -> None:
        """Raise `AssertionError` saying what disagrees in the allocator's books."""
        ...

    def close(self) -> None:
        """Give the memory back. Views still held stay valid; the tier is not to be used again."""
        ...


class SlotTier(PoolTier, Protocol):
    """A `PoolTier` in the host's memory. `view` may be called by workers too."""

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable, `slot.length` long. `StaleSlot` after `free`."""
        ...


class Location(NamedTuple):
    """Where a frame lies in a log: the segment's number and the byte offset in its file."""

    segment: int
    offset: int


class WriteItem(NamedTuple):
    """One frame for `LogTier.write_batch`.

    `location`: as `place(len(frame))` gave it. `key`: what the frame's header must name.
    `namespace_no`: of the frame's namespace, from `put_namespace`. `frame`: the whole frame, a
    multiple of 4 KiB at a 4 KiB-aligned address; MUST stay unchanged until the call returns.
    """

    location: Location
    key: bytes
    namespace_no: int
    frame: memoryview


class ReadItem(NamedTuple):
    """One transfer for `LogTier.read_batch`: `len(into)` bytes from `location`, both multiples of
    4 KiB, into memory that is 4 KiB-aligned."""

    location: Location
    into: memoryview


class NamespaceRow(NamedTuple):
    """A namespace that a log knows. `descriptor`: canonical JSON, empty where the index was lost
    and only the frames still tell that the namespace exists; `put_namespace` fills it in."""

    number: int
    namespace_id: bytes
    descriptor: bytes


@dataclass(slots=True)
class Recovered:
    """What a log holds at open: one row per indexed object, columns of equal length.

    `packed_keys`, `parents`: dtype V32 (`.tolist()` gives bytes). `namespace_no`, `depth`,
    `segment`, `stored_length`, `payload_length`: uint32. `offset`: uint64. `created_wall_s`:
    float64. `kind`: uint8 (`frame.Kind`). Rows come in the order of the log; a row's parent may
    be missing, which is the caller's to judge. `notes`: what had to be repaired, one sentence
    each, empty after a clean stop.
    """

    packed_keys: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, "V32"))
    parents: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, "V32"))
    kind: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    namespace_no: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    depth: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    segment: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    offset: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    stored_length: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    payload_length: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    created_wall_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    namespaces: list[NamespaceRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    adopted: int = 0
    """Frames that had no index entry at open and were found whole: rows like the others."""
    dropped: int = 0
    """Index entries that pointed at nothing; they are gone from the index too."""
    cut_bytes: int = 0
    """Bytes of unfinished frames cut from the log's end."""
    rebuilt: bool = False
    """Whether the index was lost or broken and rebuilt from the frames."""

    @property
    def keys(self) -> list[bytes]:
        """`packed_keys` as bytes: an object each."""
        keys: list[bytes] = self.packed_keys.tolist()
        return keys


class LogTier(Protocol):
    """An append-only log of frames in segments, with a durable index.

    An object is live from `place` until `mark_dead` (or a failed `write_batch`). Its index entry is
    written by `write_batch` and taken away by `remove` (or `write_batch`'s `removes`). Space comes
    back a segment at a time: pick `victim_segment`, re-append what is still wanted (`place` with
    `compaction`, then `write_batch`, which overwrites the entry; then `mark_dead` the old place),
    and `drop_segment` once `live_in` is 0.
    """

    @property
    def budget_bytes(self) -> int:
        """Hard limit of real bytes on disk, everything in the directory counted."""
        ...

    @property
    def used_bytes(self) -> int:
        """Real bytes on disk (`st_blocks`) as of the last worker call."""
        ...

    @property
    def live_bytes(self) -> int:
        """Frame bytes of all live objects, padding included."""
        ...

    @property
    def tenant_secret(self) -> bytes:
        """32 random bytes made with the store, for `kvstore.namespace.namespace_id`."""
        ...

    def place(self, stored_bytes: int, compaction: bool = False) -> Location | None:
        """*core*. Room at the log's end for one frame of `stored_bytes` (a multiple of 4 KiB).

        None where real use plus everything placed would pass the budget less one segment, which
        only `compaction` may use, or the free floor: evict and drop segments, or call `refresh` if
        others' files are what fills the disk. Raises `ValueError` where no segment could hold it.
        """
        ...

    def mark_dead(self, location: Location, length: int) -> None:
        """*core*. The frame at `location` is no longer wanted."""
        ...

    def victim_segment(self) -> int | None:
        """*core*. The sealed segment with most dead bytes, all its places settled; None where no
        sealed segment has any."""
        ...

    def live_in(self, segment: int) -> int:
        """*core*. Live frame bytes in a segment; 0 for one that does not exist."""
        ...

    def put_namespace(self, namespace_id: bytes, descriptor: bytes) -> int:
        """*worker*, short. The namespace's number, durable on return; idempotent."""
        ...

    def write_batch(
        self, items: Sequence[WriteItem], removes: Sequence[bytes] = ()
    ) -> list[FrameError | None]:
        """*worker*. Verify, append and index frames, and take `removes` out of the index.

        Removes come before puts of the same key. On return every item is durable and indexed
        (None) or refused because its bytes are not what its header says (the error; its place is
        dead already). Calls are executed one after another, whole. Raises `DiskError` with path,
        errno and advice: then nothing of the batch holds, every place in it is dead already, and
        the removes have to be asked again.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """*worker*. Take keys out of the index, durable on return; unknown ones are skipped."""
        ...

    def drop_segment(self, segment: int) -> None:
        """*worker*. Delete a segment's file. MUST be sealed, without live bytes and without index
        entries (`ValueError`). Reads under way finish."""
        ...

    def read(self, location: Location, into: memoryview) -> None:
        """*worker*. `read_batch` of one; raises its error. The bytes are NOT verified: the
        caller runs `verify_frame` on them, naming the key."""
        ...

    def read_batch(
        self, items: Sequence[ReadItem], arrived: Callable[[int], None] | None = None
    ) -> list[Exception | None]:
        """*worker*. Transfers, adjacent ones coalesced; per item None, its `DiskError` (it may be
        there another time), or `FrameTruncated` (file truncated or gone). `arrived` is told the
        position of each item whose bytes are there, on this thread, while others are still on
        their way; it MUST not raise."""
        ...

    def refresh(self) -> None:
        """*worker*. Look again at real use and free space. Frames of batches that failed are
        forgotten for good: a crash after this does not bring them back."""
        ...

    def check_integrity(self) -> None:
        """*core*, with no worker call under way. Raise `AssertionError` saying what disagrees."""
        ...

    def close(self) -> None:
        """*worker*, once, last. Waits for calls under way and releases the directory."""
        ...
