"""The arena: the contract of slots, and what is particular to shared memory."""

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path
from random import Random

import pytest

from kvstore.testing.tiers import SlotTierContract
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.dram import DramTier
from kvstore.tiers.dram.huge_pages import HUGE_PAGE_BYTES, map_aligned


class TestDramTier(SlotTierContract):
    def make(self, budget_bytes: int) -> DramTier:
        return DramTier(budget_bytes)


def test_another_mapping_sees_bytes_and_generations() -> None:
    tier = DramTier(8 * PAGE_BYTES)
    tier.alloc(PAGE_BYTES)
    slot = tier.alloc(PAGE_BYTES)
    assert slot is not None
    tier.view(slot)[:5] = b"hello"
    size = os.fstat(tier.fd).st_size
    with mmap.mmap(tier.fd, size, prot=mmap.PROT_READ) as other:
        assert other[slot.offset : slot.offset + 5] == b"hello"
        at = tier.generations_offset + 8 * slot.page
        assert int.from_bytes(other[at : at + 8], "little") == slot.generation
        tier.free(slot)
        assert int.from_bytes(other[at : at + 8], "little") != slot.generation
    tier.close()


def test_memory_is_taken_as_it_is_used() -> None:
    tier = DramTier(64 << 20)
    assert os.fstat(tier.fd).st_blocks * 512 <= PAGE_BYTES
    slot = tier.alloc(1 << 20)
    assert slot is not None
    tier.view(slot)[:] = bytes(slot.length)
    # a page of generations, and a whole huge page where the system has them
    taken = os.fstat(tier.fd).st_blocks * 512
    assert 1 << 20 <= taken <= HUGE_PAGE_BYTES + 2 * PAGE_BYTES
    tier.close()


def test_a_view_outlives_the_tier() -> None:
    tier = DramTier(PAGE_BYTES)
    slot = tier.alloc(1)
    assert slot is not None
    view = tier.view(slot)
    view[:2] = b"ok"
    tier.close()
    assert view[:2] == b"ok"


def test_budgets_below_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no page"):
        DramTier(PAGE_BYTES - 1)


def test_the_integrity_check_finds_a_book_that_is_off() -> None:
    tier = DramTier(4 * PAGE_BYTES)
    tier.alloc(1)
    tier._extents._taken[1] = 2
    with pytest.raises(AssertionError):
        tier.check_integrity()


def collapsed_bytes(tier: DramTier) -> int:
    """Of the arena's mapping, under huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(tier.memory))
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            start, end = (int(n, 16) for n in first.split("-"))
            found = start <= address < end
        elif found and first == "ShmemPmdMapped:":
            return int(line.split()[1]) * 1024
    return 0


def can_collapse() -> bool:
    """Whether this kernel makes huge pages of shared memory when asked to."""
    fd = os.memfd_create("collapse")
    memory = map_aligned(fd, 16 << 20)
    memory[0] = 1
    at = ctypes.c_char.from_buffer(memory)
    pointer, length = ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(HUGE_PAGE_BYTES)
    worked = ctypes.CDLL(None).madvise(pointer, length, 25) == 0
    del at
    os.close(fd)
    return worked


def test_a_large_arena_gets_huge_pages_where_it_is_used_and_keeps_its_bytes() -> None:
    if not can_collapse():
        pytest.skip("this kernel has no MADV_COLLAPSE for shared memory")
    tier = DramTier(64 << 20)
    slot = tier.alloc(5 * HUGE_PAGE_BYTES)
    assert slot is not None
    view = tier.view(slot)
    data = Random(0).randbytes(len(view))
    view[:] = data
    ends_s = time.monotonic() + 20.0
    while collapsed_bytes(tier) < 4 * HUGE_PAGE_BYTES and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert 4 * HUGE_PAGE_BYTES <= collapsed_bytes(tier) <= 6 * HUGE_PAGE_BYTES
    assert view == data
    assert os.fstat(tier.fd).st_blocks * 512 <= 7 * HUGE_PAGE_BYTES
    tier.close()


def test_of_a_large_arena_a_64th_is_made_before_it_is_used() -> None:
    if not can_collapse():
        pytest.skip("this kernel has no MADV_COLLAPSE for shared memory")
    tier = DramTier(64 * 3 * HUGE_PAGE_BYTES)
    for used in (1, 2):
        assert tier.alloc(HUGE_PAGE_BYTES) is not None
        ends_s = time.monotonic() + 20.0
        while collapsed_bytes(tier) < (used + 3) * HUGE_PAGE_BYTES and time.monotonic() < ends_s:
            time.sleep(0.01)
        assert collapsed_bytes(tier) == (used + 3) * HUGE_PAGE_BYTES
    tier.close()


def test_the_arena_s_memory_goes_with_it() -> None:
    before = {t.name for t in threading.enumerate()}
    for _ in range(3):
        tier = DramTier(32 << 20)
        assert tier.alloc(HUGE_PAGE_BYTES) is not None
        tier.close()
    ends_s = time.monotonic() + 20.0
    while {t.name for t in threading.enumerate()} != before and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert {t.name for t in threading.enumerate()} == before
