"""config.json: what is derived from it, and what is refused."""

import copy
import json

import pytest
from golden_model import DIRECTORY

from model_adapter.config import LayerMode, ModelConfig
from model_adapter.errors import ConfigError

RELEASED = {
    "num_hidden_layers": 40,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "num_nextn_predict_layers": 3,
}


@pytest.fixture
def raw():
    return json.loads((DIRECTORY / "config.json").read_text())


def parsed(raw, **text):
    changed = copy.deepcopy(raw)
    changed["text_config"] |= text
    return ModelConfig.from_dict(changed)


def test_released_schedule_and_record_sizes(raw):
    c = parsed(raw, **RELEASED)
    modes = [spec.mode for spec in c.layer_specs]
    assert c.decoder_start == 20
    assert [i for i, m in enumerate(modes) if m is LayerMode.WINDOW] == [0, 1]
    assert [i for i, m in enumerate(modes) if m is LayerMode.FULL] == [2, 8, 14, 20]
    assert [i for i, m in enumerate(modes) if m is LayerMode.REINDEX] == [24, 28, 32, 36]
    assert (c.layer_specs[13].kv_source, c.layer_specs[13].index_source) == (8, 8)
    assert (c.layer_specs[39].kv_source, c.layer_specs[39].index_source) == (20, 36)
    assert [(s.layer, s.role, s.ratio, s.row_bytes) for s in c.global_caches] == [
        (layer, role, ratio, size)
        for layer, ratio in ((2, 2), (8, 2), (14, 2), (20, 1))
        for role, size in (("main", 288), ("index", 68))
    ]
    assert sum(s.row_bytes / s.ratio for s in c.global_caches) == 890.0
    assert c.window_row_bytes == 528
    assert c.layers * c.window * c.window_row_bytes == 2_703_360
    assert [s.prefix for s in c.draft_specs] == ["mtp.0", "mtp.1", "mtp.2"]
    assert c.group_tokens == 2


def test_rope_may_be_called_scaling(raw):
    expected = parsed(raw).rope
    raw["text_config"]["rope_scaling"] = raw["text_config"].pop("rope_parameters")
    assert parsed(raw).rope == expected


@pytest.mark.parametrize("key", ["head_dim", "compress_ratios", "hc_eps", "engram_n_heads"])
def test_a_missing_key_is_named(raw, key):
    del raw["text_config"][key]
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        ModelConfig.from_dict(raw, "some/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is unknown"),
        ({"rope_parameters": {"factor": 2}}, "rope_type None is unknown"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 32"),
        ({"head_dim": "64"}, "head_dim must be an integer"),
        ({"qk_rope_head_dim": 48}, "qk_rope_head_dim 48"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number"),
        ({"compress_ratios": [0, 0, 2]}, "compress_ratios has 3 entries for 10 layers"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 2, 1, 1]}, "layer 7 has ratio 2"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 2, 1, 1, 1, 1]}, "layer 1 has ratio 2 but no KV"),
        ({"kv_source_layer_ids": [2, 4, 6, 11]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [2, 6, 8]}, r"KV source layers \[4\] are missing"),
        ({"candidate_source_layer_id": 3}, "candidate_source_layer_id 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds"),
        ({"engram_num_embeddings": [663]}, "engram_layer_ids has 2 entries"),
    ],
)
def test_what_can_not_be_is_refused_with_its_value(raw, change, message):
    with pytest.raises(ConfigError, match=message):
        parsed(raw, **change)


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(ConfigError, match="is missing"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read as JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        ModelConfig.load(tmp_path / "config.json")
