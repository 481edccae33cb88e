"""The arena: the contract of slots, and what is particular to shared memory."""

import mmap
import os

import pytest

from kvstore.testing.tiers import SlotTierContract
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.dram import DramTier


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
    assert 1 << 20 <= os.fstat(tier.fd).st_blocks * 512 <= (1 << 20) + PAGE_BYTES
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
