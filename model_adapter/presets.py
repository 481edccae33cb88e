"""Sizes for random checkpoints, in the released config's own names (ds41f §1).

`tiny` is the smallest model in which everything happens: all three attention modes, several KV
sources, the hierarchical indexer dropping blocks, Engram, DSpark, vision. A test builds and runs it
in well under a second.

`small` is made for the demo: long prompts in seconds on two cores, with the released proportions
where they decide what a hit is worth. Half of the layers are encoder, so that a prompt position
costs half of the network; the first two layers are window-only, then ratio 2, then ratio 1; three
sources own global KV and two more layers select anew; window 128 and blocks of 256 tokens as
released, so that a replay costs what it costs there in tokens. The top-k is 64 of up to some
thousand entries, so that selection matters. Widths are 1/20 of the released ones in hidden size and
a quarter in head width, which is what thousands of tokens per second allow.

`wide` has the released widths wherever they shape attention and its caches (hidden size, heads,
head width, ranks, indexer, window, candidate blocks), so that records of the released sizes flow
through the whole path: 288, 68 and 528 bytes. What they do not depend on is as small as it goes:
five layers (window-only, Full with ratio 2, then Full, Reuse and Reindex with ratio 1), four narrow
experts, no draft layers. 0.96 GB on disk, 3.3 GB when everything is dequantised to float32.
"""

from copy import deepcopy
from typing import Any

from model_adapter.tokenizer import FIRST_TOKENS, LAST_TOKENS

Config = dict[str, Any]

_COMMON_TEXT: Config = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "model_type": "deepseek_v41_text",
}

_TINY_TEXT: Config = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "swiglu_limit": 4.0,
    "max_position_embeddings": 16384,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 3, 4],
    "index_source_layer_ids": [2, 3, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 12,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 4,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_SMALL_TEXT: Config = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 65536,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 128,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 1021,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_WIDE_TEXT: Config = {
    "vocab_size": 2048,
    "hidden_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1 << 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_layer_ids": [1],
    "engram_vocab_size": 1021,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_VISION: Config = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 4,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 64,
    "max_wh_ratio": None,
    "model_type": "deepseek_v41_vision",
}


def _rope(original_positions: int) -> Config:
    return {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original_positions,
        "rope_theta": 10000.0,
    }


PRESETS: dict[str, tuple[Config, Config]] = {
    "tiny": (_TINY_TEXT | {"rope_parameters": _rope(1024)}, _VISION),
    "small": (_SMALL_TEXT | {"rope_parameters": _rope(4096)}, _VISION),
    "wide": (_WIDE_TEXT | {"rope_parameters": _rope(65536)}, _VISION),
}
"""Name → text and vision sizes."""


def preset_config(preset: str) -> Config:
    """The `config.json` of a preset, but for what its tokenizer and Engram tables decide
    (`engram_compressed_vocab_size`, `engram_num_embeddings`).

    Raises `KeyError` for an unknown preset.
    """
    text, vision = deepcopy(PRESETS[preset])
    vocab = text["vocab_size"]
    text["dspark_noise_token_id"] = vocab - len(LAST_TOKENS)
    return {
        "text_config": _COMMON_TEXT | text,
        "vision_config": vision,
        "image_token_id": vocab - 1,
        "architectures": ["DeepseekV41ForCausalLM"],
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": FIRST_TOKENS.index("<｜▁pad▁｜>"),
        "tie_word_embeddings": False,
        "model_type": "deepseek_v41",
    }
