"""From the names of a released `config.json` to `ModelConfig`'s fields."""

from typing import Any

from model_adapter.config import (
    DSparkConfig,
    EngramConfig,
    ModelConfig,
    RopeSpec,
    VisionConfig,
)
from model_adapter.config_reader import Section
from model_adapter.errors import ConfigError


def parse(cls: type[ModelConfig], root: Section, raw: dict[str, Any]) -> ModelConfig:
    """Read every field; see `ModelConfig.from_dict`."""
    text = root.section("text_config")
    _refuse_unsupported(text)
    return cls(
        model_type=root.text("model_type"),
        vocab=text.integer("vocab_size", 1),
        hidden=text.integer("hidden_size", 1),
        layers=text.integer("num_hidden_layers", 1),
        heads=text.integer("num_attention_heads", 1),
        head_dim=text.integer("head_dim", 1),
        rope_dim=text.integer("qk_rope_head_dim", 2),
        q_rank=text.integer("q_lora_rank", 1),
        o_rank=text.integer("o_lora_rank", 1),
        o_groups=text.integer("o_groups", 1),
        window=text.integer("sliding_window", 1),
        norm_eps=text.number("rms_norm_eps"),
        positions_max=text.integer("max_position_embeddings", 1),
        window_theta=text.number("rope_theta"),
        rope=_rope(text),
        compress_ratios=text.integers("compress_ratios"),
        kv_sources=text.integers("kv_source_layer_ids"),
        index_sources=text.integers("index_source_layer_ids"),
        index_heads=text.integer("index_n_heads", 1),
        index_dim=text.integer("index_head_dim", 1),
        index_topk=text.integer("index_topk", 1),
        candidate_source=_candidate_source(text),
        candidate_blocks=text.integer("candidate_topk_blocks", 1, default=1),
        candidate_block_size=text.integer("candidate_block_size", 1, default=1),
        experts=text.integer("n_routed_experts", 1),
        experts_per_token=text.integer("num_experts_per_tok", 1),
        expert_dim=text.integer("moe_intermediate_size", 1),
        shared_experts=text.integer("n_shared_experts", 1),
        route_scale=text.number("routed_scaling_factor"),
        swiglu_limit=text.number("swiglu_limit"),
        streams=text.integer("hc_mult", 1),
        sinkhorn_iterations=text.integer("hc_sinkhorn_iters", 1),
        stream_eps=text.number("hc_eps"),
        bos_token=text.integer("bos_token_id"),
        eos_token=text.integer("eos_token_id"),
        pad_token=text.integer("pad_token_id"),
        image_token=root.integer("image_token_id") if "image_token_id" in root.values else None,
        engram=_engram(text),
        dspark=_dspark(text),
        vision=_vision(root),
        raw=raw,
    )


def _refuse_unsupported(text: Section) -> None:
    text.expect("num_key_value_heads", 1)
    text.expect("hidden_act", "silu")
    text.expect("attention_bias", False)
    text.expect("scoring_func", "sqrtsoftplus")
    text.expect("topk_method", "noaux_tc")
    text.expect("norm_topk_prob", True)
    text.expect("n_shared_experts", 1)
    text.expect("tie_word_embeddings", False)


def _rope(text: Section) -> RopeSpec:
    theta = text.number("compress_rope_theta")
    rope = text.optional_section("rope_parameters", "rope_scaling")
    if rope is None:
        return RopeSpec(theta)
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if kind == "default":
        return RopeSpec(theta)
    if kind != "yarn":
        raise ConfigError(
            f"{rope.origin}: rope_type {kind!r} is unknown; use 'yarn', or 'default' for plain "
            "frequencies"
        )
    return RopeSpec(
        theta=theta,
        factor=rope.number("factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        original_positions=rope.integer("original_max_position_embeddings", 1),
    )


def _candidate_source(text: Section) -> int | None:
    if text.values.get("candidate_source_layer_id") is None:
        return None
    return text.integer("candidate_source_layer_id")


def _engram(text: Section) -> EngramConfig | None:
    if not text.values.get("engram_layer_ids"):
        return None
    return EngramConfig(
        layers=text.integers("engram_layer_ids"),
        table_rows=text.integers("engram_num_embeddings"),
        ngram_max=text.integer("engram_max_ngram_size", 2),
        bucket_size=text.integer("engram_vocab_size", 1),
        heads=text.integer("engram_n_heads", 1),
        head_dim=text.integer("engram_head_dim", 1),
        pad_token=text.integer("engram_pad_token_id"),
        compressed_vocab=text.integer("engram_compressed_vocab_size", 1),
    )


def _dspark(text: Section) -> DSparkConfig | None:
    if not text.values.get("num_nextn_predict_layers"):
        return None
    return DSparkConfig(
        layers=text.integer("num_nextn_predict_layers", 1),
        block_size=text.integer("dspark_block_size", 1),
        noise_token=text.integer("dspark_noise_token_id"),
        target_layers=text.integers("dspark_target_layer_ids"),
        markov_rank=text.integer("dspark_markov_rank", 1),
        experts=text.integer("dspark_n_routed_experts", 1),
        experts_per_token=text.integer("dspark_num_experts_per_tok", 1),
    )


def _vision(root: Section) -> VisionConfig | None:
    vision = root.optional_section("vision_config")
    if vision is None:
        return None
    return VisionConfig(
        layers=vision.integer("num_hidden_layers", 1),
        hidden=vision.integer("hidden_size", 1),
        heads=vision.integer("num_attention_heads", 1),
        intermediate=vision.integer("intermediate_size", 1),
        patch=vision.integer("patch_size", 1),
        rope_theta=vision.number("rope_theta"),
        downsample=vision.integer("downsample_ratio", 1),
        image_tokens_max=vision.integer("max_image_tokens", 1),
        pixels_min=vision.integer("min_pixels", 1),
        wh_ratio_max=None
        if vision.values.get("max_wh_ratio") is None
        else vision.integer("max_wh_ratio", 1),
    )
