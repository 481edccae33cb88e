"""Other schedules than the golden one: nothing but the config decides."""

import json

import numpy as np
import pytest
import torch
from golden_model import error

from model_adapter.make_checkpoint import complete_config, write_weights
from model_adapter.model import Model
from model_adapter.presets import preset_config
from model_adapter.records import host
from model_adapter.tokenizer import save_tokenizer, train_tokenizer

TOKENS = 70
HIT = 48
BLOCK = 12
SCHEDULES = {
    # Ratio 4 from the second layer on, a window-only layer between, ratio 2 in the decoder, no
    # candidate source, Engram at the first layer and at the decoder's Full layer.
    "wide ratios": {
        "num_hidden_layers": 7,
        "compress_ratios": [0, 4, 4, 0, 2, 2, 2],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4, 6],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [0, 4],
        "engram_max_ngram_size": 3,
        "num_attention_heads": 6,
        "o_groups": 3,
        "head_dim": 96,
        "index_head_dim": 64,
        "index_n_heads": 3,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "hc_mult": 3,
        "sliding_window": 12,
        "num_nextn_predict_layers": 0,
    },
    # Every layer with global KV, one source, no Engram; candidates in blocks of three.
    "one source": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 1, 1, 1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 3,
        "index_topk": 5,
        "engram_layer_ids": [],
        "sliding_window": 8,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.fixture(scope="module", params=SCHEDULES)
def model(request, tmp_path_factory) -> Model:
    directory = tmp_path_factory.mktemp("schedule")
    raw = preset_config("tiny")
    raw["text_config"] |= SCHEDULES[request.param]
    tokenizer = train_tokenizer(["the quick brown fox"], raw["text_config"]["vocab_size"])
    if raw["text_config"]["engram_layer_ids"]:
        raw = complete_config(raw, tokenizer)
    else:
        raw["text_config"]["engram_num_embeddings"] = []
    save_tokenizer(tokenizer, directory)
    (directory / "config.json").write_text(json.dumps(raw))
    write_weights(raw, 0, directory)
    return Model.load(directory)


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(11, 500, TOKENS)


def assert_same_rows(model: Model, a, b) -> None:
    for spec in model.config.global_caches:
        mine, theirs = host(a.rows(spec).rows), host(b.rows(spec).rows)
        assert mine.shape == theirs.shape == (TOKENS // spec.ratio, spec.row_bytes)
        assert np.mean(mine != theirs) < 0.005


def test_decoding_and_chunks_give_what_one_prefill_gives(model, prompt):
    whole, stepwise, cut = (model.new_cache() for _ in range(3))
    expected = model.prefill_all_logits(whole, prompt)
    steps = torch.stack([model.decode(stepwise, int(t)) for t in prompt])
    assert error(steps, expected) < 5e-3
    assert_same_rows(model, stepwise, whole)
    model.prefill(cut, prompt, "bounded", chunk_tokens=9)
    assert_same_rows(model, cut, whole)


def test_a_hit_is_resumed(model, prompt):
    source, cache = model.new_cache(), model.new_cache()
    model.prefill(source, prompt)
    for i in range(HIT // BLOCK):
        cache.load_block(i, BLOCK, source.block_sections(i, BLOCK))
    model.counters.reset()
    assert model.resume(cache, prompt, HIT).isfinite().all()
    assert model.counters.encoder_positions == model.config.window + TOKENS - HIT
    for spec in model.config.global_caches:
        loaded = HIT // spec.ratio
        assert np.array_equal(cache.rows(spec).rows[:loaded], source.rows(spec).rows[:loaded])
        assert len(cache.rows(spec)) == TOKENS // spec.ratio
