"""Decode steps at the last of a million positions over a full-size synthetic global cache.

The records are the released ones, 712 bytes per token in three sources; the widths are `small`'s.
Every index key is different, so that the selections can be checked against a brute-force one.
"""

from collections import Counter
from dataclasses import dataclass, field

import million
import numpy as np
import pytest
import released_records
import torch
from million import GROWTH_BYTES, POSITIONS

from model_adapter import indexer, records
from model_adapter.config import LayerMode
from model_adapter.errors import InputError

TOPK = 512
CANDIDATE_BLOCKS = 2048
BLOCK_SIZE = 8
LAST = POSITIONS - 1
TOKEN = 77

pytestmark = pytest.mark.xdist_group("million")


@pytest.fixture(scope="module")
def model():
    return released_records.narrow_model()


@pytest.fixture(scope="module")
def cache(model):
    """Of 1,048,575 tokens; every test takes its step back."""
    made = million.synthetic_cache(model, LAST - 1)
    model.decode(made, TOKEN)
    return made


@dataclass
class Step:
    """What one decode step did: per selecting layer its index queries and weights, its selection
    and the candidate blocks that stood then; per kind of record the rows of every unpacking."""

    logits: torch.Tensor | None = None
    queries: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    entries: dict[int, np.ndarray] = field(default_factory=dict)
    blocks: dict[int, np.ndarray | None] = field(default_factory=dict)
    unpacked: dict[str, list[int]] = field(default_factory=dict)


@pytest.fixture
def decode(model, cache, monkeypatch):
    """Run tokens behind the cache, watched; the test's are taken back behind it. What a `Step` has
    is of the first one's position."""

    def run(tokens=(TOKEN,)) -> Step:
        step = Step()
        select, queries = indexer.Indexer.select, indexer.Indexer._queries
        unpack = records.unpack

        def watched_select(self, q_latent, x, work):
            select(self, q_latent, x, work)
            chosen = work.selections[0]
            step.entries[self._layer] = chosen.entries[0].numpy().copy()
            blocks = chosen.blocks
            step.blocks[self._layer] = None if blocks is None else blocks[0].numpy().copy()

        def watched_queries(self, *arguments):
            q, w = queries(self, *arguments)
            step.queries[self._layer] = (q[0].numpy().copy(), w[0].numpy().copy())
            return q, w

        def watched_unpack(kind, rows):
            step.unpacked.setdefault(kind, []).append(rows[..., 0].numel())
            return unpack(kind, rows)

        with monkeypatch.context() as patched:
            patched.setattr(indexer.Indexer, "select", watched_select)
            patched.setattr(indexer.Indexer, "_queries", watched_queries)
            patched.setattr(records, "unpack", watched_unpack)
            step.logits = model.prefill(cache, tokens, "exact")
        return step

    yield run
    cache.truncate(LAST - 1)
    model.decode(cache, TOKEN)


def scores(step: Step, layer: int, rows: records.Records) -> np.ndarray:
    """Σ_h relu(q_h·k_j)·w_h in float64 behind float32 products, for packed keys."""
    q, w = step.queries[layer]
    total = []
    for at in range(0, len(rows), 1 << 16):
        keys = million.index_values(rows[at : at + (1 << 16)])
        total.append(np.maximum(keys @ q.T, 0) @ w.astype(np.float64))
    return np.concatenate(total)


def assert_best(chosen: np.ndarray, among: np.ndarray, values: np.ndarray, count: int) -> None:
    """`chosen` are the `count` best of the numbers `among`, up to rounding at the cut."""
    assert len(chosen) == len(set(chosen)) == count
    assert np.array_equal(chosen, np.sort(chosen))
    order = np.argsort(-values, kind="stable")[:count]
    cut = values[order[-1]]
    slack = 1e-5 * np.abs(values).max()
    value_of = dict(zip(among.tolist(), values.tolist(), strict=True))
    for number in set(chosen.tolist()) ^ set(among[order].tolist()):
        assert abs(value_of[number] - cut) <= slack


def index_layers(model):
    return [s for s in model.config.layer_specs if s.selects]


def test_selections_at_the_last_position_are_the_best_of_all_visible(model, cache, decode):
    step = decode()
    assert cache.length == POSITIONS
    layers = index_layers(model)
    assert [s.index for s in layers] == sorted(step.entries) == [2, 4, 6, 8, 10]
    candidates = None
    for spec in layers:
        visible = POSITIONS // spec.ratio
        rows = cache.index(spec.kv_source).rows
        assert len(rows) == visible
        if spec.mode is LayerMode.FULL:
            among, values = np.arange(visible), scores(step, spec.index, rows)
        else:
            among = (candidates[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
            values = scores(step, spec.index, rows[among])
        assert_best(step.entries[spec.index], among, values, TOPK)
        if spec.index == model.config.candidate_source:
            tops = values.reshape(-1, BLOCK_SIZE).max(1)
            latest = (visible - 1) // BLOCK_SIZE
            assert latest == 131_071
            tops[latest] = tops.max() + 1  # it always takes a place
            candidates = step.blocks[spec.index]
            assert latest in candidates
            assert_best(candidates, np.arange(len(tops)), tops, CANDIDATE_BLOCKS)


def best_key(step: Step, cache) -> records.Records:
    """The key that layer 2's query likes best."""
    chosen = cache.index(2).rows[step.entries[2]]
    return chosen[np.argmax(scores(step, 2, chosen))].clone()


def test_entries_at_both_ends_are_found(cache, decode):
    """Layer 2 has ratio 2; nothing before it reads an index key, so its queries stay the same."""
    rows = cache.index(2).rows
    ends = [0, 524_286]
    kept = rows[ends].clone()
    try:
        for length in (LAST, LAST - 1):  # (t + 1) // 2 is 524,288, the newest itself, and 524,287
            cache.truncate(length)
            best = best_key(decode(), cache)
            cache.truncate(length)
            rows[ends] = best
            assert set(ends) <= set(decode().entries[2].tolist())
            rows[ends] = kept
    finally:
        rows[ends] = kept


def test_an_entry_that_a_later_position_completes_is_not_seen(cache, decode, monkeypatch):
    cache.truncate(LAST - 1)
    best = best_key(decode(), cache)
    cache.truncate(LAST - 1)
    pack = records.pack

    def planted(kind, values):
        packed = pack(kind, values)
        if kind == records.INDEX and values.ndim == 2:  # keys, not queries
            packed[:] = best
        return packed

    monkeypatch.setattr(records, "pack", planted)
    step = decode([TOKEN, TOKEN])
    assert np.array_equal(cache.index(2).rows[524_287], best)
    assert len(step.entries[2]) == TOPK
    assert step.entries[2].max() < 524_287
    # of ratio 1 the position's own entry is seen, that of the next is not
    assert np.array_equal(cache.index(6).rows[LAST], best)
    assert step.entries[6].max() < LAST


def test_a_step_touches_the_window_and_the_selected_rows_only(model, cache, decode):
    first = decode()
    assert torch.isfinite(first.logits).all()
    selected: dict[int, set[int]] = {}
    entries = None
    for spec in model.config.layer_specs:
        entries = first.entries.get(spec.index, entries)
        if spec.ratio:
            selected.setdefault(spec.kv_source, set()).update(entries.tolist())
    cache.truncate(LAST)
    kept = {}
    try:
        for layer, numbers in selected.items():
            rows = cache.main(layer).rows
            kept[layer] = rows.clone()
            poison = torch.ones(len(rows), dtype=torch.bool)
            poison[[n for n in numbers if n < len(rows)]] = False
            rows[poison] = 0xFF
        assert torch.isnan(
            records.unpack(records.MAIN, torch.full((288,), 0xFF, dtype=torch.uint8))
        ).all()
        assert torch.equal(decode().logits, first.logits)
        cache.truncate(LAST)
        cache.main(2).rows[first.entries[2][0]] = 0xFF
        assert torch.isnan(decode().logits).all()
    finally:
        for layer, rows in kept.items():
            cache.main(layer).rows[: len(rows)] = rows


def test_rows_unpacked_in_a_step(model, cache, decode):
    step = decode()
    totals = Counter({kind: sum(counts) for kind, counts in step.unpacked.items()})
    with_global = sum(1 for s in model.config.layer_specs if s.ratio)
    assert totals[records.MAIN] == with_global * TOPK
    assert totals[records.WINDOW] == model.config.layers * model.config.window
    layers = index_layers(model)
    scanned = sum(POSITIONS // s.ratio for s in layers if s.mode is LayerMode.FULL)
    reindexed = sum(1 for s in layers if s.mode is LayerMode.REINDEX) * 2048 * BLOCK_SIZE
    queries = len(layers) * model.config.index_heads
    assert totals[records.INDEX] == scanned + reindexed + queries
    tile = indexer.SCAN_TILE_BYTES_MAX // (4 * model.config.index_dim)
    assert max(step.unpacked[records.INDEX]) <= tile


def test_a_step_runs_in_bounded_memory(model, cache, decode):
    unpacked_bytes = len(cache.index(6).rows) * 128 * 4
    assert unpacked_bytes > 8 * GROWTH_BYTES - (1 << 20)
    with million.growth_limited(GROWTH_BYTES):
        with pytest.raises(MemoryError):
            np.ones(unpacked_bytes, np.uint8)
        decode()


def test_the_last_block_is_complete_and_lies_at_the_end(model, cache, decode):
    decode()
    assert cache.loaded_tokens == POSITIONS
    sections = cache.block_sections(4095, 256)
    for spec, section in zip(model.config.global_caches, sections, strict=True):
        rows = cache.rows(spec).rows
        assert section.shape == (256 // spec.ratio, spec.row_bytes)
        assert np.array_equal(section, rows[len(rows) - 256 // spec.ratio :])
    with pytest.raises(InputError, match="1048577 tokens pass the model's 1048576 positions"):
        model.decode(cache, TOKEN)
