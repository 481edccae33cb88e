"""Prompts of thousands of tokens whose records have the released sizes, stored and resumed.

`wide` has the released widths and is slow; the default suite runs the same test on a narrow network
with the same records.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import released_records
from released_records import WINDOW

import kvstore
from kvstore import Tier
from model_adapter.cache import SequenceCache
from model_adapter.generate import greedy
from model_adapter.model import Model
from model_adapter.presets import preset_config
from model_adapter.session import CachedSession, StoreBlocks, namespace_of

RELEASED = Path(__file__).parents[1] / "golden" / "released" / "config.json"
BLOCK_TOKENS = 256
PROMPT_TOKENS = 2310
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
HIT_TOKENS = BLOCKS * BLOCK_TOKENS
TOKENS = 3
ROW_BYTES = {"main": 288, "index": 68}
WIDE_WEIGHT_CACHE_BYTES = 3 << 29
STORE = {
    "dram": {"budget_bytes": "64MiB"},
    "ssd": {"budget_bytes": "128MiB", "segment_bytes": "8MiB", "free_floor_bytes": 0},
}


def narrow():
    return released_records.narrow_checkpoint(), released_records.narrow_model()


def wide():
    checkpoint = released_records.wide_checkpoint()
    return checkpoint, Model.load(checkpoint, weight_cache_bytes_max=WIDE_WEIGHT_CACHE_BYTES)


def test_wide_has_the_released_widths():
    released = json.loads(RELEASED.read_text())["text_config"]
    text = preset_config("wide")["text_config"]
    fewer = {
        "vocab_size",
        "num_hidden_layers",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
    }
    for key, value in released.items():
        if key in text and key not in fewer and not key.startswith(("engram_", "dspark_", "num_n")):
            assert text[key] == value, key
    assert {"hidden_size", "head_dim", "q_lora_rank", "o_lora_rank"} <= text.keys() - fewer


def loaded(model: Model, blocks: list[list[np.ndarray]]) -> SequenceCache:
    cache = model.new_cache()
    for i, sections in enumerate(blocks):
        cache.load_block(i, BLOCK_TOKENS, sections)
    return cache


@pytest.mark.parametrize("make", [narrow, pytest.param(wide, marks=pytest.mark.long)])
def test_a_long_prompt_is_stored_and_resumed(make, tmp_path):
    checkpoint, model = make()
    ids = np.random.default_rng(0).integers(11, 2000, PROMPT_TOKENS).astype(np.uint32)
    namespace = namespace_of(model, checkpoint, BLOCK_TOKENS)
    caches = model.cache_sections()
    section_bytes = tuple(BLOCK_TOKENS // ratio * ROW_BYTES[role] for _, role, ratio, _ in caches)
    assert {ratio for _, _, ratio, _ in caches} == {1, 2}
    assert namespace.layout.section_bytes == section_bytes

    with kvstore.connect(f"file://{tmp_path}", **STORE) as client:
        session = CachedSession(model, StoreBlocks(client, namespace))
        cold = session.generate(ids, 1).report
        stored = {t.tier: t.payload_bytes for t in client.stat().tiers}
    assert cold.stored_blocks == BLOCKS
    assert cold.encoder_positions == PROMPT_TOKENS
    assert stored[Tier.SSD] == BLOCKS * sum(section_bytes)

    with kvstore.connect(f"file://{tmp_path}", **STORE) as client:
        session = CachedSession(model, StoreBlocks(client, namespace))
        warm = session.generate(ids, TOKENS)
        handle = client.open_namespace(namespace)
        keys = handle.block_keys(ids)
        with client.acquire(handle, keys) as lease:
            blocks = [[np.array(s) for s in b.sections] for b in client.read(lease, keys)]
    assert warm.report.hit_tokens == HIT_TOKENS >= 2048
    assert warm.report.hit_blocks == {Tier.SSD: BLOCKS}
    assert warm.report.fetched_bytes == BLOCKS * sum(section_bytes)
    assert warm.report.replayed_tokens == WINDOW
    assert warm.report.encoder_positions == WINDOW + PROMPT_TOKENS - HIT_TOKENS
    assert warm.report.decoder_positions == WINDOW
    assert [len(bytes(s)) for s in blocks[-1]] == list(section_bytes)

    cache = loaded(model, blocks)
    logits = model.resume(cache, ids, HIT_TOKENS)
    assert list(greedy(model, cache, logits, TOKENS)) == warm.token_ids
    assert {w.latest(WINDOW).shape for w in cache.windows} == {(WINDOW, 528)}
    # what was computed behind the hit differs from it and from itself
    rows = cache.main(model.config.decoder_start).rows[HIT_TOKENS:]
    assert len(np.unique(rows, axis=0)) == len(rows) == PROMPT_TOKENS + TOKENS - 1 - HIT_TOKENS
