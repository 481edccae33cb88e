"""A decode step at the last of a million positions, over a synthetic cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_model import config, model

from model_adapter import indexer, records
from model_adapter.cache import SequenceCache
from model_adapter.errors import InputError
from model_adapter.model import Model

POSITIONS = 1 << 20
DISTINCT = 1024


def random_records(kind: records.Kind, rows: int, channels: int) -> records.Records:
    generator = torch.Generator().manual_seed(channels)
    return records.pack(kind, torch.randn(rows, channels, generator=generator))


def synthetic_cache(long_model: Model, tokens: int) -> SequenceCache:
    """A cache as a sequence of `tokens` tokens leaves it, of few distinct rows."""
    c, rng = long_model.config, np.random.default_rng(0)
    cache = long_model.new_cache()
    cache.append_tokens(rng.integers(11, 500, tokens))
    for spec in c.global_caches:
        kind, channels = (
            (records.MAIN, c.head_dim) if spec.role == "main" else (records.INDEX, c.index_dim)
        )
        distinct = random_records(kind, DISTINCT, channels)
        cache.rows(spec).append(distinct[rng.integers(0, DISTINCT, tokens // spec.ratio)])
    for window in cache.windows:
        window.restart(tokens - c.window)
        window.append(random_records(records.WINDOW, c.window, c.head_dim))
    for layer, group in cache.open_groups.items():
        ratio = c.compress_ratios[layer]
        group.restart(tokens // ratio * ratio)
        group.complete(torch.randn(tokens % ratio, 2 * c.head_dim))
    cache.length = tokens
    return cache


@pytest.fixture(scope="module")
def long_model() -> Model:
    short = model()
    engram = next(b.engram for b in short.blocks if b.engram is not None)
    c = replace(config(), positions_max=POSITIONS)
    return Model(c, short.weights, engram.hasher)


def test_the_last_position_reads_its_window_and_selection_only(long_model, monkeypatch):
    cache = synthetic_cache(long_model, POSITIONS - 1)
    c = long_model.config
    unpacked: dict[str, list[int]] = {records.MAIN: [], records.INDEX: [], records.WINDOW: []}
    unpack = records.unpack

    def counting(kind, rows):
        unpacked[kind].append(len(rows))
        return unpack(kind, rows)

    monkeypatch.setattr(records, "unpack", counting)
    selected = {}

    def keep(stage, layer, tensor):
        if stage == "selection":
            selected[layer] = tensor[0]

    logits = long_model.decode(cache, 17, observer=keep)
    assert logits.isfinite().all()
    assert cache.length == POSITIONS
    assert [len(cache.rows(s)) for s in c.global_caches] == [
        POSITIONS // s.ratio for s in c.global_caches
    ]
    assert max(unpacked[records.MAIN]) <= c.index_topk
    assert max(unpacked[records.WINDOW]) <= c.window
    tile = indexer.SCAN_TILE_BYTES_MAX // (c.index_heads * 4)
    assert max(unpacked[records.INDEX]) <= tile
    for layer, entries in selected.items():
        assert len(entries) == c.index_topk
        assert entries.max() < POSITIONS // c.compress_ratios[layer]
    # Entries from the far past are found: the scan covers the range.
    assert selected[2].min() < POSITIONS // 8

    with pytest.raises(InputError, match="1048577 tokens pass the model's 1048576 positions"):
        long_model.decode(cache, 17)


def test_reindexing_unpacks_candidate_blocks_only(long_model, monkeypatch):
    cache = synthetic_cache(long_model, 1 << 15)
    c = long_model.config
    seen: list[int] = []
    unpack = records.unpack
    monkeypatch.setattr(
        records,
        "unpack",
        lambda kind, rows: (
            (seen.append(len(rows)) if kind == records.INDEX else None) or unpack(kind, rows)
        ),
    )
    per_layer: dict[int, list[int]] = {}

    def keep(stage, layer, tensor):
        if stage == "selection":
            per_layer[layer] = seen.copy()
            seen.clear()

    long_model.decode(cache, 17, observer=keep)
    assert sum(per_layer[c.candidate_source]) > 1 << 15
    # Its own queries, then the entries of the candidate blocks.
    assert sum(per_layer[8]) <= 1 + c.candidate_blocks * c.candidate_block_size
