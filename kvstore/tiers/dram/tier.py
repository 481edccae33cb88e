"""One arena of anonymous shared memory, cut into page-aligned slots.

The arena is a memfd, so that another process of the same owner can map it. Behind the pages lies
one u64 per page: the generation of the slot that starts there. A reader that kept (page,
generation) reads the number again after its copy; where it differs, the slot had been freed.
"""

import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore.tiers.base import PAGE_BYTES, Slot, StaleSlot
from kvstore.tiers.dram.extents import ExtentAllocator
from kvstore.tiers.dram.huge_pages import HugePages, map_aligned

_GENERATION_BYTES = 8


class DramTier:
    """`SlotTier` in memory. `budget_bytes` is rounded down to whole pages; the generation table
    (8 B per page, 0.2 %) comes on top. Memory is taken from the system as slots are handed out,
    2 MiB at a time where the system has huge pages, and then up to a 64th of the arena ahead.
    """

    def __init__(self, budget_bytes: int) -> None:
        pages = budget_bytes // PAGE_BYTES
        if pages < 1:
            raise ValueError(f"an arena of {budget_bytes} B holds no page of {PAGE_BYTES} B")
        self._extents = ExtentAllocator(pages)
        size = pages * (PAGE_BYTES + _GENERATION_BYTES)
        self._fd = os.memfd_create("kvstore-dram", os.MFD_CLOEXEC)
        try:
            arena = map_aligned(self._fd, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages for shared memory
                    arena.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = memoryview(arena)
        except BaseException:
            os.close(self._fd)
            raise
        self._generations = self._bytes[pages * PAGE_BYTES : size].cast("Q")
        self._huge_pages = HugePages(self._bytes[: pages * PAGE_BYTES])

    @property
    def fd(self) -> int:
        """The memfd; valid until `close`."""
        return self._fd

    @property
    def memory(self) -> memoryview:
        """All the memory that slots are made of, to be pinned for a device."""
        return self._bytes[: self.budget_bytes]

    @property
    def generations_offset(self) -> int:
        """Where in the memfd the table of generations starts, in bytes."""
        return self._extents.pages * PAGE_BYTES

    @property
    def budget_bytes(self) -> int:
        return self._extents.pages * PAGE_BYTES

    @property
    def slot_bytes_max(self) -> int:
        return self.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._extents.used_pages * PAGE_BYTES

    @property
    def slots(self) -> int:
        """How many slots are handed out."""
        return len(self._extents)

    def alloc(self, frame_bytes: int) -> Slot | None:
        if frame_bytes < 1:
            raise ValueError(f"a slot has at least one byte, not {frame_bytes}")
        pages = -(-frame_bytes // PAGE_BYTES)
        start = self._extents.alloc(pages)
        if start is None:
            return None
        self._huge_pages.used(start * PAGE_BYTES, pages * PAGE_BYTES)
        return Slot(start, pages * PAGE_BYTES, self._generations[start])

    def slot_at(self, page: int) -> Slot:
        pages = self._extents.length(page)
        if not pages:
            raise StaleSlot(f"no slot starts at page {page}")
        return Slot(page, pages * PAGE_BYTES, self._generations[page])

    def generations_of(self, pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        generations: npt.NDArray[np.uint64] = np.frombuffer(self._generations, np.uint64)[pages]
        return generations

    def free(self, slot: Slot) -> None:
        self._check(slot)
        self._generations[slot.page] += 1
        self._extents.free(slot.page)

    def view(self, slot: Slot) -> memoryview:
        self._check(slot)
        return self._bytes[slot.offset : slot.offset + slot.length]

    def _check(self, slot: Slot) -> None:
        if (
            self._extents.length(slot.page) * PAGE_BYTES != slot.length
            or self._generations[slot.page] != slot.generation
        ):
            raise StaleSlot(f"{slot} was freed")

    def check_integrity(self) -> None:
        self._extents.check_integrity()

    def close(self) -> None:
        """The memfd is closed; the memory goes when the last view into it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._huge_pages.close()
            self._generations.release()
            self._bytes = memoryview(b"")
            self._generations = memoryview(b"")
