"""The memory of the window pool: one private mapping of fixed size, cut into ranges of pages."""

import mmap
from contextlib import suppress
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.dram.extents import ExtentAllocator


class Extent(NamedTuple):
    """A range of whole pages, in pages from the arena's start."""

    start: int
    pages: int


class WindowArena:
    """`budget_bytes` is rounded down to whole pages. The system's memory is taken as ranges are
    first written, and goes back to it when they are freed: the process never holds more than
    `used_bytes` says. Raises `ConfigError` where the mapping can't be had."""

    def __init__(self, budget_bytes: int) -> None:
        self.pages = budget_bytes // PAGE_BYTES
        self._extents = ExtentAllocator(self.pages) if self.pages else None
        self._memory = _mapping(max(self.pages, 1) * PAGE_BYTES)
        with suppress(OSError):  # a kernel that has no huge pages never gives one
            # one would be taken whole for a few bytes in it
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = memoryview(self._memory)

    @property
    def budget_bytes(self) -> int:
        """What all ranges together may take."""
        return self.pages * PAGE_BYTES

    @property
    def used_pages(self) -> int:
        """Pages of the ranges handed out."""
        return self._extents.used_pages if self._extents is not None else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the ranges handed out, whole pages."""
        return self.used_pages * PAGE_BYTES

    @staticmethod
    def pages_for(payload_bytes: int) -> int:
        """Pages that a payload takes; at least one."""
        return max(1, -(-payload_bytes // PAGE_BYTES))

    def alloc(self, payload_bytes: int) -> Extent | None:
        """A range for so many bytes, or None where no hole is large enough."""
        pages = self.pages_for(payload_bytes)
        start = self._extents.alloc(pages) if self._extents is not None else None
        return None if start is None else Extent(start, pages)

    def free(self, extent: Extent) -> None:
        """Give a range back, to others and to the system. No view of it may be read any more."""
        assert self._extents is not None
        self._extents.free(extent.start)
        self._memory.madvise(
            mmap.MADV_DONTNEED, extent.start * PAGE_BYTES, extent.pages * PAGE_BYTES
        )

    def view(self, extent: Extent, size: int) -> memoryview:
        """The first `size` bytes of a range, writable."""
        return self._bytes[extent.start * PAGE_BYTES :][:size]

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the books of ranges disagree."""
        if self._extents is not None:
            self._extents.check_integrity()


def _mapping(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as e:
        raise ConfigError(
            f"{size} B of memory for windows can't be had ({e}); lower windows.budget_bytes"
        ) from e
