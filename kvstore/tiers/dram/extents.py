"""Which pages of an arena are taken: best fit over page ranges, neighbours joined on release.

Objects of one layout have one size, so a hole left by one fits the next exactly; best fit keeps
such holes from being cut up by smaller objects of another layout.
"""

from bisect import bisect_left, insort


class ExtentAllocator:
    """Hands out ranges of `pages` consecutive pages. Pure bookkeeping: O(log of the number of
    different hole sizes) per call, plus the insertion into that short list."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"an arena has at least one page, not {pages}")
        self.pages = pages
        self.used_pages = 0
        self._taken: dict[int, int] = {}
        self._hole_at: dict[int, int] = {}
        self._hole_ends: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._add_hole(0, pages)

    def alloc(self, pages: int) -> int | None:
        """First page of a range of so many, from the smallest hole that holds it; or None."""
        if pages < 1:
            raise ValueError(f"a range has at least one page, not {pages}")
        i = bisect_left(self._sizes, pages)
        if i == len(self._sizes):
            return None
        size = self._sizes[i]
        start = next(reversed(self._by_size[size]))
        self._take_hole(start)
        if size > pages:
            self._add_hole(start + pages, size - pages)
        self._taken[start] = pages
        self.used_pages += pages
        return start

    def free(self, start: int) -> None:
        """Give back the range that starts at `start`; `KeyError` where none does."""
        pages = self._taken.pop(start)
        self.used_pages -= pages
        end = start + pages
        if end in self._hole_at:
            pages += self._take_hole(end)
        before = self._hole_ends.get(start)
        if before is not None:
            pages += self._take_hole(before)
            start = before
        self._add_hole(start, pages)

    def length(self, start: int) -> int:
        """Pages of the range that starts at `start`; 0 where none does."""
        return self._taken.get(start, 0)

    def __len__(self) -> int:
        return len(self._taken)

    def _add_hole(self, start: int, pages: int) -> None:
        self._hole_at[start] = pages
        self._hole_ends[start + pages] = start
        of_size = self._by_size.get(pages)
        if of_size is None:
            of_size = self._by_size[pages] = {}
            insort(self._sizes, pages)
        of_size[start] = None

    def _take_hole(self, start: int) -> int:
        pages = self._hole_at.pop(start)
        del self._hole_ends[start + pages]
        of_size = self._by_size[pages]
        del of_size[start]
        if not of_size:
            del self._by_size[pages]
            del self._sizes[bisect_left(self._sizes, pages)]
        return pages

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless ranges and holes tile the arena, no two holes touch, and
        every book names the same holes."""
        at, last_was_hole = 0, False
        for start, pages, hole in sorted(
            [(s, n, False) for s, n in self._taken.items()]
            + [(s, n, True) for s, n in self._hole_at.items()]
        ):
            assert start == at, f"pages {at} to {start} are neither taken nor free, or both"
            assert not (hole and last_was_hole), f"two holes touch at page {start}"
            at, last_was_hole = start + pages, hole
        assert at == self.pages, f"the books end at page {at} of {self.pages}"
        assert self.used_pages == sum(self._taken.values()), "used_pages is off"
        assert self._hole_ends == {s + n: s for s, n in self._hole_at.items()}, "hole ends differ"
        assert self._sizes == sorted(self._by_size), "the list of sizes differs"
        by_size = {(s, n) for n, starts in self._by_size.items() for s in starts}
        assert by_size == set(self._hole_at.items()), "holes by size differ"
