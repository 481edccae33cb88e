"""Where the next frame goes, which bytes are still wanted, and what the disk really holds.

Pure bookkeeping. The core thread places and marks dead, workers settle what became of a place and
report real sizes; one lock, held for a few instructions, keeps the books together.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.tiers.base import PAGE_BYTES, Location
from kvstore.tiers.ssd.segments import SEGMENT_HEADER_BYTES, SEGMENTS_MAX

_INDEX_GROWTH_BYTES = 2 * PAGE_BYTES
"""What one more entry may add to the index file before the file is looked at again: LMDB copies the
leaf page, and may split it."""
_INDEX_RESERVE_SHIFT = 7
_INDEX_RESERVE_BYTES_MIN = 128 << 10


@dataclass(slots=True)
class SegmentBook:
    """One segment. `end`: where the next frame would go. `live_bytes`: frames still wanted.
    `unsettled_bytes`: placed, and not yet written or given up. `disk_bytes`: real, as last seen."""

    end: int = SEGMENT_HEADER_BYTES
    live_bytes: int = 0
    unsettled_bytes: int = 0
    disk_bytes: int = 0
    sealed: bool = True

    @property
    def dead_bytes(self) -> int:
        return self.end - SEGMENT_HEADER_BYTES - self.live_bytes


class Space:
    """Books over all segments and the budget.

    Below the budget two things are kept free: one segment, for compaction; and room for the index
    file to grow in the course of changes that free space elsewhere, at most by its own size, since
    LMDB copies the pages that a commit touches: 1/128 of the budget, 128 KiB, or as much as the
    index takes, whichever is most.
    """

    def __init__(
        self, budget_bytes: int, segment_bytes: int, free_floor_bytes: int, next_number: int
    ) -> None:
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes
        self.free_floor_bytes = free_floor_bytes
        self._index_reserve = max(_INDEX_RESERVE_BYTES_MIN, budget_bytes >> _INDEX_RESERVE_SHIFT)
        self._next_number = next_number
        self._segments: dict[int, SegmentBook] = {}
        self._current: int | None = None
        self._unsettled_bytes = 0
        self._unsettled_frames = 0
        self._unindexed_frames = 0
        self._disk_bytes = 0
        self._other_bytes = 0
        self._index_bytes = 0
        self._free_bytes = 0
        self._live_bytes = 0
        self._victim: int | None = None
        self._victim_is_known = False
        self._lock = threading.Lock()

    def add(self, number: int, book: SegmentBook) -> None:
        """A segment found at open; the one that is not sealed is written on."""
        self._segments[number] = book
        self._victim_is_known = False
        self._live_bytes += book.live_bytes
        self._disk_bytes += book.disk_bytes
        self._next_number = max(self._next_number, number + 1)
        if not book.sealed:
            self._current = number

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._disk_bytes + self._other_bytes

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    @property
    def numbers(self) -> list[int]:
        """All segments, placed-in ones without a file included."""
        with self._lock:
            return list(self._segments)

    def place(self, stored_bytes: int, compaction: bool) -> Location | None:
        if stored_bytes < 1 or stored_bytes % PAGE_BYTES:
            raise ValueError(f"a frame of {stored_bytes} B is no whole number of pages")
        if stored_bytes > self.segment_bytes - SEGMENT_HEADER_BYTES:
            raise ValueError(
                f"a frame of {stored_bytes} B does not fit a segment of {self.segment_bytes} B; "
                "raise ssd.segment_bytes"
            )
        with self._lock:
            current = self._current
            fits = current is not None and (
                self._segments[current].end + stored_bytes <= self.segment_bytes
            )
            need = stored_bytes + (0 if fits else SEGMENT_HEADER_BYTES)
            if not self._room(need, compaction):
                return None
            number = current if current is not None and fits else self._open_new()
            book = self._segments[number]
            location = Location(number, book.end)
            self._victim_is_known = False
            book.end += stored_bytes
            book.live_bytes += stored_bytes
            book.unsettled_bytes += stored_bytes
            self._live_bytes += stored_bytes
            self._unsettled_bytes += stored_bytes
            self._unsettled_frames += 1
            return location

    def _room(self, need: int, compaction: bool) -> bool:
        need += self._unsettled_bytes
        limit = self.budget_bytes - max(self._index_reserve, self._index_bytes)
        if not compaction:
            need += (self._unsettled_frames + self._unindexed_frames + 1) * _INDEX_GROWTH_BYTES
            limit -= self.segment_bytes
        return (
            self._disk_bytes + self._other_bytes + need <= limit
            and self._free_bytes - need >= self.free_floor_bytes
        )

    def _open_new(self) -> int:
        if self._next_number > SEGMENTS_MAX:
            raise ValueError("segment numbers are used up; move the store to a new directory")
        if self._current is not None:
            self._segments[self._current].sealed = True
        number = self._current = self._next_number
        self._next_number += 1
        self._segments[number] = SegmentBook(sealed=False)
        return number

    def mark_dead(self, location: Location, length: int) -> None:
        with self._lock:
            self._die(self._segments[location.segment], length)

    def _die(self, book: SegmentBook, length: int) -> None:
        if length > book.live_bytes:
            raise ValueError(f"{length} B marked dead where {book.live_bytes} B live")
        book.live_bytes -= length
        self._live_bytes -= length
        self._victim_is_known = False

    def settle(self, places: Iterable[tuple[Location, int]], written: bool) -> None:
        """What became of places: written, or given up and therefore dead."""
        with self._lock:
            self._victim_is_known = False
            for location, length in places:
                book = self._segments[location.segment]
                book.unsettled_bytes -= length
                self._unsettled_bytes -= length
                self._unsettled_frames -= 1
                if not written:
                    self._die(book, length)

    def unindexed(self, frames: int) -> None:
        """So many frames are written whose entries the index file does not hold yet."""
        with self._lock:
            self._unindexed_frames = frames

    def seal(self, number: int) -> None:
        """No more places in this segment: its file failed, or it is full."""
        with self._lock:
            self._segments[number].sealed = True
            self._victim_is_known = False
            if self._current == number:
                self._current = None

    def victim(self) -> int | None:
        with self._lock:
            # asked after every call, and a large store has thousands of segments
            if not self._victim_is_known:
                self._victim, self._victim_is_known = self._find_victim(), True
            return self._victim

    def _find_victim(self) -> int | None:
        dead, number = max(
            (
                (book.dead_bytes, -number)
                for number, book in self._segments.items()
                if book.sealed and not book.unsettled_bytes
            ),
            default=(0, 0),
        )
        return -number if dead > 0 else None

    def live_in(self, number: int) -> int:
        with self._lock:
            book = self._segments.get(number)
            return book.live_bytes if book else 0

    def may_drop(self, number: int) -> SegmentBook:
        """The book of a segment that nothing keeps; `ValueError` saying what does."""
        with self._lock:
            book = self._segments.get(number)
            if book is None:
                raise ValueError(f"there is no segment {number}")
            if not book.sealed or book.live_bytes or book.unsettled_bytes:
                raise ValueError(
                    f"segment {number} is not to be dropped: sealed {book.sealed}, "
                    f"{book.live_bytes} B live, {book.unsettled_bytes} B on their way"
                )
            return book

    def dropped(self, number: int) -> None:
        """The segment's file is gone."""
        with self._lock:
            self._disk_bytes -= self._segments.pop(number).disk_bytes
            self._victim_is_known = False

    def measured(self, segments: dict[int, int], free_bytes: int) -> None:
        """Real sizes of some segments, and free space."""
        with self._lock:
            for number, disk_bytes in segments.items():
                book = self._segments.get(number)
                if book is not None:
                    self._disk_bytes += disk_bytes - book.disk_bytes
                    book.disk_bytes = disk_bytes
            self._free_bytes = free_bytes

    def measured_others(self, other_bytes: int, index_bytes: int) -> None:
        """Real sizes of everything in the directory but segments, and of the index among that."""
        with self._lock:
            self._other_bytes = other_bytes
            self._index_bytes = index_bytes

    def leaves_floor(self, write_bytes: int, free_bytes: int) -> bool:
        """Whether the free floor holds after writing so much."""
        return free_bytes - write_bytes >= self.free_floor_bytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` saying which sums or bounds disagree."""
        with self._lock:
            books = self._segments.values()
            assert self._live_bytes == sum(b.live_bytes for b in books), "live bytes"
            assert self._disk_bytes == sum(b.disk_bytes for b in books), "bytes on disk"
            assert self._unsettled_bytes == sum(b.unsettled_bytes for b in books), "unsettled"
            assert (self._unsettled_bytes == 0) == (self._unsettled_frames == 0), "unsettled frames"
            for number, b in self._segments.items():
                assert 0 <= b.live_bytes <= b.end - SEGMENT_HEADER_BYTES, f"{number}: {b}"
                assert b.unsettled_bytes >= 0, f"{number}: {b}"
                assert b.sealed or number == self._current, f"{number} is open, not current"
            known = not self._victim_is_known or self._victim == self._find_victim()
            assert known, f"segment {self._victim} is remembered as the victim, and is not"
            assert self._current is None or self._current in self._segments, "current segment"
