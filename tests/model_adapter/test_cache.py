"""A sequence's cache: blocks in and out, growth, windows, going back."""

import numpy as np
import pytest
import torch
from golden_model import config

from model_adapter.cache import SequenceCache
from model_adapter.cache_rows import ROLLBACK_TOKENS_MAX, GrowingTensor, OpenGroup, WindowRows
from model_adapter.errors import CacheError

BLOCK = 8


def filled(tokens: int) -> SequenceCache:
    """A cache with random global rows for `tokens` positions."""
    cache = SequenceCache(config())
    rng = np.random.default_rng(0)
    for spec in config().global_caches:
        shape = (tokens // spec.ratio, spec.row_bytes)
        cache.rows(spec).append(rng.integers(0, 256, shape, np.uint8))
    return cache


def test_blocks_come_back_as_they_went_in():
    source, cache = filled(3 * BLOCK), SequenceCache(config())
    for i in range(3):
        sections = source.block_sections(i, BLOCK)
        # As a store hands them over: bytes, views, flat arrays.
        forms = [bytes(sections[0]), memoryview(sections[1]).cast("B"), *sections[2:]]
        cache.load_block(i, BLOCK, forms)
    assert cache.loaded_tokens == 3 * BLOCK
    assert cache.length == 0
    for spec in config().global_caches:
        assert np.array_equal(cache.rows(spec).rows, source.rows(spec).rows)


def test_sections_are_in_layout_order_with_true_sizes():
    sections = filled(2 * BLOCK).block_sections(1, BLOCK)
    expected = [(BLOCK // s.ratio, s.row_bytes) for s in config().global_caches]
    assert [s.shape for s in sections] == expected
    assert all(s.base is not None and s.flags.c_contiguous for s in sections)


def test_an_incomplete_block_has_no_sections():
    with pytest.raises(CacheError, match="block 1 of 8 tokens is not complete"):
        filled(BLOCK + 6).block_sections(1, BLOCK)
    with pytest.raises(CacheError, match="block_tokens 3 is not a multiple"):
        filled(BLOCK).block_sections(0, 3)


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        (0, lambda s: s[:-1], "a block has 6 sections, not 5"),
        (0, lambda s: [s[0][:-1], *s[1:]], r"section 0 \(layer 2, main\) of block 0 has 108"),
        (1, lambda s: s, "block 1 is out of order: section 0 holds 0 rows"),
    ],
)
def test_blocks_that_do_not_fit_change_nothing(block, change, message):
    sections = filled(BLOCK).block_sections(0, BLOCK)
    cache = SequenceCache(config())
    with pytest.raises(CacheError, match=message):
        cache.load_block(block, BLOCK, change(sections))
    assert cache.loaded_tokens == 0
    assert all(len(cache.rows(spec)) == 0 for spec in config().global_caches)


def test_a_cache_in_use_takes_no_blocks():
    cache = SequenceCache(config())
    cache.length = 5
    with pytest.raises(CacheError, match="this one is 5 tokens long"):
        cache.load_block(0, BLOCK, filled(BLOCK).block_sections(0, BLOCK))


def test_growing_tensor_keeps_its_rows_and_older_views():
    rows = GrowingTensor((3,), torch.uint8)
    whole = np.random.default_rng(0).integers(0, 256, (1000, 3), np.uint8)
    rows.append(whole[:10])
    view = rows.rows
    for at in range(10, 1000, 33):
        rows.append(whole[at : at + 33])
    assert np.array_equal(rows.rows, whole)
    assert np.array_equal(view, whole[:10])
    rows.truncate(17)
    rows.append(whole[17:20])
    assert np.array_equal(rows.rows, whole[:20])


def test_reserved_room_is_not_copied_again():
    rows = GrowingTensor((3,), torch.uint8)
    rows.reserve(500)
    rows.append(np.zeros((1, 3), np.uint8))
    place = rows.rows.data_ptr()
    rows.append(np.zeros((499, 3), np.uint8))
    assert rows.rows.data_ptr() == place


@pytest.mark.parametrize("step", [1, 7, 40, 300])
def test_window_holds_the_latest_records(step):
    whole = np.arange(1000, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    window = WindowRows(2, window=16)
    for at in range(0, 1000, step):
        window.append(whole[at : at + step])
        end = min(at + step, 1000)
        assert window.end == end
        count = min(end, 16)
        assert np.array_equal(window.latest(16), whole[end - count : end])


def test_window_after_a_restart_begins_there():
    window = WindowRows(2, window=16)
    window.append(np.zeros((40, 2), np.uint8))
    window.restart(24)
    assert len(window.latest(16)) == 0
    window.append(np.ones((5, 2), np.uint8))
    assert (window.start, window.first, window.end) == (24, 24, 29)
    assert window.latest(16).tolist() == [[1, 1]] * 5


@pytest.mark.parametrize("end", range(150, 400, 31))
def test_window_can_go_back(end):
    whole = np.arange(1000, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    for back in (0, 1, 16, ROLLBACK_TOKENS_MAX):
        window = WindowRows(2, window=16)
        for at in range(0, end, 3):
            window.append(whole[at : min(at + 3, end)])
        window.truncate(end - back)
        assert np.array_equal(window.latest(15), whole[end - back - 15 : end - back])


def test_window_does_not_go_back_to_what_slid_out():
    window = WindowRows(2, window=16)
    window.append(np.zeros((500, 2), np.uint8))
    with pytest.raises(CacheError, match="can't go back to position 300"):
        window.truncate(300)


@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_open_group_gives_every_group_once(ratio, step):
    rows = torch.arange(400.0).reshape(200, 2)
    group, got = OpenGroup(ratio, 2), []
    for at in range(0, 200, step):
        got.append(group.complete(rows[at : at + step]))
        assert torch.equal(group.pending(), rows[group.end - group.end % ratio : group.end])
    whole = 200 // ratio * ratio
    assert torch.equal(torch.cat(got).flatten(0, 1), rows[:whole])


@pytest.mark.parametrize("back", [1, 2, 3, ROLLBACK_TOKENS_MAX])
def test_open_group_can_go_back(back):
    rows = torch.arange(400.0).reshape(200, 2)
    group = OpenGroup(4, 2)
    for at in range(0, 150, 3):
        group.complete(rows[at : at + 3])
    group.truncate(150 - back)
    start = (150 - back) // 4 * 4
    groups = group.complete(rows[150 - back : 170])
    assert torch.equal(groups.flatten(0, 1), rows[start : start + len(groups) * 4])


def test_truncate_refuses_what_it_can_not_do():
    cache = SequenceCache(config())
    cache.length = 10
    with pytest.raises(CacheError, match="can't cut a cache of 10 tokens to 11"):
        cache.truncate(11)
