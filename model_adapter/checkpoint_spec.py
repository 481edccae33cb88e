"""Which tensors a released DS4.1F checkpoint holds: name, shape and encoding, from its config.

Shapes are logical (before packing). ds41f §3 has the names; sizes come from `config.json` alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

Config = dict[str, Any]

SCALE_GROUP = 32
"""Columns that share a scale; rows too where a scale serves a block."""


class Encoding(Enum):
    """How a tensor lies on disk. All but BF16 and FP32 are a `.weight` with a `.scale`."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8_BLOCK = "fp8_block"
    """e4m3, one ue8m0 scale per 32×32 block."""
    FP8_ROW = "fp8_row"
    """e4m3, one ue8m0 scale per row and 32 columns."""
    FP4_ROW = "fp4_row"
    """e2m1, two per byte, one ue8m0 scale per row and 32 columns."""


class Fill(Enum):
    """What the tensor does, which decides how random values for it are drawn."""

    MATRIX = "matrix"
    """A projection: keeps the size of what it maps."""
    RESIDUAL = "residual"
    """A projection whose output is added to the streams: smaller, the deeper the network."""
    NORM = "norm"
    """A norm's weight, around one."""
    EMBEDDING = "embedding"
    """Rows that enter the streams, of size one."""
    BIAS = "bias"
    """Added to something of size one: small."""
    OFFSET = "offset"
    """Added inside a sigmoid or softmax: large enough to matter."""
    FACTOR = "factor"
    """Multiplies something of size one: positive."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `name`: without `.scale`; `.weight` included where the name on disk has it."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    fill: Fill

    @property
    def scale_name(self) -> str:
        """Name of the scale of a quantised tensor."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def parameters(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def code_shape(self) -> tuple[int, ...]:
        """Shape on disk: that of the values, but for FP4, which packs two columns into one."""
        if self.encoding is Encoding.FP4_ROW:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scale; None for a tensor that has none."""
        if self.encoding in (Encoding.BF16, Encoding.FP32):
            return None
        rows, columns = self.shape
        if self.encoding is Encoding.FP8_BLOCK:
            rows = -(-rows // SCALE_GROUP)
        return (rows, -(-columns // SCALE_GROUP))

    @property
    def disk_bytes(self) -> int:
        """Bytes of data on disk, scale included."""
        code_bytes = {Encoding.BF16: 2, Encoding.FP32: 4}.get(self.encoding, 1)
        return prod(self.code_shape) * code_bytes + prod(self.scale_shape or (0,))


def _bf16(name: str, *shape: int, fill: Fill = Fill.MATRIX) -> TensorSpec:
    return TensorSpec(name, shape, Encoding.BF16, fill)


def _fp32(name: str, *shape: int, fill: Fill = Fill.MATRIX) -> TensorSpec:
    return TensorSpec(name, shape, Encoding.FP32, fill)


def _fp8(name: str, *shape: int, fill: Fill = Fill.MATRIX) -> TensorSpec:
    return TensorSpec(f"{name}.weight", shape, Encoding.FP8_BLOCK, fill)


def _norm(name: str, *shape: int) -> TensorSpec:
    return _bf16(name, *shape, fill=Fill.NORM)


def _streams(c: Config, at: str) -> Iterator[TensorSpec]:
    n = c["hc_mult"]
    out = 2 * n + n * n
    for site in ("hc_attn", "hc_ffn"):
        yield _fp32(f"{at}.{site}_fn", out, n * c["hidden_size"])
        yield _fp32(f"{at}.{site}_base", out, fill=Fill.OFFSET)
        yield _fp32(f"{at}.{site}_scale", 3, fill=Fill.FACTOR)


def _attention(c: Config, at: str) -> Iterator[TensorSpec]:
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    q_lora, groups = c["q_lora_rank"], c["o_groups"]
    o_lora = groups * c["o_lora_rank"]
    yield _fp8(f"{at}.wq_a", q_lora, hidden)
    yield _fp8(f"{at}.wq_b", heads * dim, q_lora)
    yield _fp8(f"{at}.wkv", dim, hidden)
    yield _fp8(f"{at}.wo_a", o_lora, heads * dim // groups)
    yield _fp8(f"{at}.wo_b", hidden, o_lora, fill=Fill.RESIDUAL)
    yield _norm(f"{at}.q_norm.weight", q_lora)
    yield _norm(f"{at}.kv_norm.weight", dim)
    yield _fp32(f"{at}.attn_sink", heads, fill=Fill.OFFSET)


def _compressor(c: Config, at: str, ratio: int) -> Iterator[TensorSpec]:
    yield _fp32(f"{at}.wkv.weight", c["head_dim"], c["hidden_size"])
    if ratio > 1:
        yield _fp32(f"{at}.wgate.weight", c["head_dim"], c["hidden_size"])
    yield _norm(f"{at}.norm.weight", c["head_dim"])


def _indexer(c: Config, at: str, owns_keys: bool) -> Iterator[TensorSpec]:
    heads, dim = c["index_n_heads"], c["index_head_dim"]
    yield _fp8(f"{at}.wq_b", heads * dim, c["q_lora_rank"])
    yield _bf16(f"{at}.weights_proj.weight", heads, c["hidden_size"])
    if owns_keys:
        yield _bf16(f"{at}.wk.weight", dim, c["head_dim"])
        yield _norm(f"{at}.k_norm.weight", dim)


def _experts(c: Config, at: str, experts: int) -> Iterator[TensorSpec]:
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    yield _bf16(f"{at}.gate.weight", experts, hidden)
    yield _fp32(f"{at}.gate.bias", experts, fill=Fill.BIAS)
    yield _fp32(f"{at}.gate.bias_vl", experts, fill=Fill.BIAS)
    parts = (
        ("w1", (inner, hidden), Fill.MATRIX),
        ("w2", (hidden, inner), Fill.RESIDUAL),
        ("w3", (inner, hidden), Fill.MATRIX),
    )
    for w, shape, fill in parts:
        yield _fp8(f"{at}.shared_experts.{w}", *shape, fill=fill)
    for e in range(experts):
        for w, shape, fill in parts:
            yield TensorSpec(f"{at}.experts.{e}.{w}.weight", shape, Encoding.FP4_ROW, fill)


def _engram(c: Config, at: str, rows: int) -> Iterator[TensorSpec]:
    hidden, n, dim = c["hidden_size"], c["hc_mult"], c["engram_head_dim"]
    lookups = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
    yield TensorSpec(f"{at}.embed.weight", (rows, dim), Encoding.FP8_ROW, Fill.MATRIX)
    yield _fp8(f"{at}.wkv", (n + 1) * hidden, lookups * dim)
    yield _norm(f"{at}.q_weight", n, hidden)
    yield _norm(f"{at}.k_weight", n, hidden)


def _block(c: Config, at: str, experts: int) -> Iterator[TensorSpec]:
    yield _norm(f"{at}.attn_norm.weight", c["hidden_size"])
    yield _norm(f"{at}.ffn_norm.weight", c["hidden_size"])
    yield from _streams(c, at)
    yield from _attention(c, f"{at}.attn")
    yield from _experts(c, f"{at}.ffn", experts)


def _backbone(c: Config) -> Iterator[TensorSpec]:
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield _bf16("embed.weight", vocab, hidden, fill=Fill.EMBEDDING)
    yield _norm("norm.weight", hidden)
    yield _fp32("head.weight", vocab, hidden)
    engram_rows = dict(zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True))
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}"
        yield from _block(c, at, c["n_routed_experts"])
        owns = i in c["kv_source_layer_ids"]
        if owns:
            yield from _compressor(c, f"{at}.attn.compressor", c["compress_ratios"][i])
        if owns or i in c["index_source_layer_ids"]:
            yield from _indexer(c, f"{at}.attn.indexer", owns)
        if i in engram_rows:
            yield from _engram(c, f"{at}.engram", engram_rows[i])


def _draft(c: Config) -> Iterator[TensorSpec]:
    hidden, rank, layers = c["hidden_size"], c["dspark_markov_rank"], c["num_nextn_predict_layers"]
    for s in range(layers):
        yield from _block(c, f"mtp.{s}", c["dspark_n_routed_experts"])
    if not layers:
        return
    first, last = "mtp.0", f"mtp.{layers - 1}"
    yield _fp8(f"{first}.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
    yield _norm(f"{first}.main_norm.weight", hidden)
    yield _norm(f"{last}.norm.weight", hidden)
    yield _bf16(f"{last}.markov_head.embed.weight", c["vocab_size"], rank, fill=Fill.BIAS)
    yield _bf16(f"{last}.markov_head.head.weight", c["vocab_size"], rank)
    yield _fp32(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def _linear(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield _bf16(f"{name}.weight", rows, columns)
    yield _bf16(f"{name}.bias", rows, fill=Fill.BIAS)


def _vision(v: Config, text_hidden: int) -> Iterator[TensorSpec]:
    hidden, inner = v["hidden_size"], v["intermediate_size"]
    yield from _linear("vision.patch_embed.proj", hidden, 3 * v["patch_size"] ** 2)
    for b in range(v["num_hidden_layers"]):
        at = f"vision.blocks.{b}"
        yield _fp32(f"{at}.norm1.weight", hidden, fill=Fill.NORM)
        yield _fp32(f"{at}.norm2.weight", hidden, fill=Fill.NORM)
        yield from _linear(f"{at}.attn.wqkv", 3 * hidden, hidden)
        yield from _linear(f"{at}.attn.wo", hidden, hidden)
        yield _bf16(f"{at}.mlp.w1.weight", 2 * inner, hidden)
        yield _bf16(f"{at}.mlp.w2.weight", hidden, inner)
    yield _fp32("vision.norm.weight", hidden, fill=Fill.NORM)
    yield from _linear("aligner.w1", text_hidden, hidden * v["downsample_ratio"] ** 2)
    yield from _linear("aligner.w2", text_hidden, text_hidden)
    for mark in ("image_start", "image_end", "image_newline"):
        yield _bf16(mark, text_hidden, fill=Fill.EMBEDDING)


def tensor_specs(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint that `config` (a whole `config.json`) describes."""
    text = config["text_config"]
    yield from _backbone(text)
    yield from _draft(text)
    if config.get("vision_config"):
        yield from _vision(config["vision_config"], text["hidden_size"])
