"""What `config.json` says, checked, and what follows from it (ds41f §1).

Nothing else in the adapter knows a size, a ratio or a schedule.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import kernels
from model_adapter.config_reader import Section
from model_adapter.errors import ConfigError

_WINDOW_GROUP = 32
_MAIN_GROUP = 16


class LayerMode(Enum):
    """What a layer attends to beside its own window, and who chooses it (ds41f §1)."""

    WINDOW = "window"
    FULL = "full"
    """Owns global KV and index keys, and selects."""
    REINDEX = "reindex"
    """Own index query over the shared keys."""
    REUSE = "reuse"
    """Shared global KV and the latest selection."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's part in the schedule.

    `prefix`: of its tensors' names. `kv_source`: the layer whose global KV it reads,
    `index_source`: the one whose selection it uses; None for a window-only layer. `experts`,
    `experts_per_token`: of its MoE.
    """

    prefix: str
    index: int
    mode: LayerMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    has_engram: bool
    experts: int
    experts_per_token: int

    @property
    def selects(self) -> bool:
        """It has an indexer of its own."""
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary frequencies of the layers with global KV: theta and, with YaRN, its five numbers."""

    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class GlobalCache:
    """One persistent cache. `role`: `main` or `index`; a row stands for `ratio` tokens."""

    layer: int
    role: str
    ratio: int
    row_bytes: int


@dataclass(frozen=True)
class EngramConfig:
    """n-gram lookups (ds41f §2 Engram)."""

    layers: tuple[int, ...]
    table_rows: tuple[int, ...]
    ngram_max: int
    bucket_size: int
    heads: int
    head_dim: int
    pad_token: int
    compressed_vocab: int


@dataclass(frozen=True)
class DSparkConfig:
    """The draft layers (ds41f §2 DSpark)."""

    layers: int
    block_size: int
    noise_token: int
    target_layers: tuple[int, ...]
    markov_rank: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True)
class VisionConfig:
    """The image encoder (ds41f §2 Vision).

    `wh_ratio_max`: a wider picture counts as this wide for its height; None has no bound.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    rope_theta: float
    downsample: int
    image_tokens_max: int
    pixels_min: int
    wh_ratio_max: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A DS4.1F of any size. `raw`: the whole `config.json`."""

    model_type: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    norm_eps: float
    positions_max: int
    window_theta: float
    rope: RopeSpec
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int | None
    candidate_blocks: int
    candidate_block_size: int
    experts: int
    experts_per_token: int
    expert_dim: int
    shared_experts: int
    route_scale: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    stream_eps: float
    bos_token: int
    eos_token: int
    pad_token: int
    image_token: int | None
    engram: EngramConfig | None
    dspark: DSparkConfig | None
    vision: VisionConfig | None
    raw: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json`, or the one in a checkpoint directory.

        Raises `ConfigError` for a missing file or key, an impossible value, or a feature that is
        not implemented (rope type, scoring function…).
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise ConfigError(f"{file} is missing: point at a checkpoint directory") from e
        except (OSError, ValueError) as e:
            raise ConfigError(f"{file} can't be read as JSON: {e}") from e
        return cls.from_dict(raw, str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], origin: str = "config") -> "ModelConfig":
        """The same from parsed JSON; `origin` names it in errors."""
        from model_adapter.config_parse import parse

        config = parse(cls, Section(raw, origin), raw)
        _check(config, origin)
        return config

    @cached_property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source (ds41f §2 CED). Layers before it are encoder."""
        return self.kv_sources[-1]

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The backbone's layers in order."""
        return tuple(self._layer_spec(i) for i in range(self.layers))

    @cached_property
    def draft_specs(self) -> tuple[LayerSpec, ...]:
        """DSpark's window-only layers; their `index` goes on behind the backbone's."""
        if self.dspark is None:
            return ()
        sizes = (self.dspark.experts, self.dspark.experts_per_token)
        return tuple(
            LayerSpec(f"mtp.{s}", self.layers + s, LayerMode.WINDOW, 0, None, None, False, *sizes)
            for s in range(self.dspark.layers)
        )

    @cached_property
    def global_caches(self) -> tuple[GlobalCache, ...]:
        """The persistent caches: layers ascending, main before index (ds41f §4)."""
        return tuple(
            GlobalCache(layer, role, self.compress_ratios[layer], row_bytes)
            for layer in self.kv_sources
            for role, row_bytes in (
                ("main", kernels.record_bytes("nvfp4", self.head_dim)),
                ("index", kernels.record_bytes("mxfp4", self.index_dim)),
            )
        )

    @cached_property
    def window_row_bytes(self) -> int:
        """Bytes of one window KV record."""
        return kernels.record_bytes("fp8", self.head_dim)

    @cached_property
    def group_tokens(self) -> int:
        """Tokens after which no compression group is open: the ratios' least common multiple."""
        return math.lcm(*(self.compress_ratios[i] for i in self.kv_sources))

    def _layer_spec(self, i: int) -> LayerSpec:
        ratio = self.compress_ratios[i]
        if ratio == 0:
            mode = LayerMode.WINDOW
        elif i in self.kv_sources:
            mode = LayerMode.FULL
        else:
            mode = LayerMode.REINDEX if i in self.index_sources else LayerMode.REUSE
        return LayerSpec(
            prefix=f"layers.{i}",
            index=i,
            mode=mode,
            ratio=ratio,
            kv_source=_latest(self.kv_sources, i) if ratio else None,
            index_source=_latest(self.index_sources, i) if ratio else None,
            has_engram=self.engram is not None and i in self.engram.layers,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
        )


def _latest(sources: tuple[int, ...], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def _check(c: ModelConfig, origin: str) -> None:
    for problem in _problems(c):
        raise ConfigError(f"{origin}: {problem}")


def _problems(c: ModelConfig) -> Iterator[str]:
    yield from _shape_problems(c)
    yield from _schedule_problems(c)
    if c.dspark:
        yield from _draft_problems(c, c.dspark)
    if c.vision:
        yield from _vision_problems(c.vision)


def _shape_problems(c: ModelConfig) -> Iterator[str]:
    if c.head_dim % _WINDOW_GROUP or c.head_dim % _MAIN_GROUP:
        yield f"head_dim {c.head_dim} is not a multiple of {_WINDOW_GROUP} (record scales)"
    if c.index_dim % _WINDOW_GROUP:
        yield f"index_head_dim {c.index_dim} is not a multiple of {_WINDOW_GROUP} (record scales)"
    if c.rope_dim % 2 or c.rope_dim > min(c.head_dim, c.index_dim):
        yield (
            f"qk_rope_head_dim {c.rope_dim} must be even and within head_dim {c.head_dim} and "
            f"index_head_dim {c.index_dim}"
        )
    if c.heads % c.o_groups:
        yield f"num_attention_heads {c.heads} is not a multiple of o_groups {c.o_groups}"
    if c.experts_per_token > c.experts:
        yield f"num_experts_per_tok {c.experts_per_token} exceeds n_routed_experts {c.experts}"
    if c.engram and len(c.engram.layers) != len(c.engram.table_rows):
        yield (
            f"engram_layer_ids has {len(c.engram.layers)} entries, engram_num_embeddings "
            f"{len(c.engram.table_rows)}"
        )


def _draft_problems(c: ModelConfig, d: DSparkConfig) -> Iterator[str]:
    targets = d.target_layers
    if not targets or list(targets) != sorted(set(targets)) or targets[-1] >= c.layers:
        yield f"dspark_target_layer_ids {list(targets)} must ascend and lie below {c.layers}"
    if not 0 <= d.noise_token < c.vocab:
        yield f"dspark_noise_token_id {d.noise_token} is outside the vocabulary of {c.vocab}"
    if d.experts_per_token > d.experts:
        yield (
            f"dspark_num_experts_per_tok {d.experts_per_token} exceeds dspark_n_routed_experts "
            f"{d.experts}"
        )


def _vision_problems(v: VisionConfig) -> Iterator[str]:
    # A head is turned by the row in its one half and by the column in the other, in pairs.
    if v.hidden % (4 * v.heads):
        yield f"vision hidden_size {v.hidden} is not a multiple of 4 × {v.heads} heads"
    if v.image_tokens_max < 4:
        yield f"max_image_tokens {v.image_tokens_max} holds no image; 4 are the least"


def _schedule_problems(c: ModelConfig) -> Iterator[str]:
    if len(c.compress_ratios) < c.layers:
        yield f"compress_ratios has {len(c.compress_ratios)} entries for {c.layers} layers"
        return
    for name, ids in (("kv_source", c.kv_sources), ("index_source", c.index_sources)):
        if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= c.layers:
            yield f"{name}_layer_ids {list(ids)} must ascend and lie below {c.layers}"
            return
    if missing := set(c.kv_sources) - set(c.index_sources):
        yield f"KV source layers {sorted(missing)} are missing from index_source_layer_ids"
    for spec in c.layer_specs:
        if spec.ratio and spec.kv_source is None:
            yield f"layer {spec.index} has ratio {spec.ratio} but no KV source at or below it"
        elif spec.ratio and c.compress_ratios[spec.kv_source or 0] != spec.ratio:
            yield (
                f"layer {spec.index} has ratio {spec.ratio}, its KV source {spec.kv_source} has "
                f"{c.compress_ratios[spec.kv_source or 0]}"
            )
        elif not spec.ratio and (spec.index in c.kv_sources or spec.index in c.index_sources):
            yield f"layer {spec.index} is a source but has ratio 0"
    if c.candidate_source is not None and c.candidate_source not in c.index_sources:
        yield f"candidate_source_layer_id {c.candidate_source} is not an index source"
