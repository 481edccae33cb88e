"""Parameters and bytes on disk by part of the model, and what one token is multiplied with.

*Active* parameters are those of every matrix that a text token goes through: of the routed experts
the chosen ones, of a table with a row per token or n-gram the rows looked up, of everything else
all. In *prefill* that is what a prompt position needs which leaves global KV behind and nothing
more (ds41f §2 CED): the embedding, the encoder, and the decoder's Full layer as far as it projects
global rows. In *decode* it is the whole backbone and the head. DSpark and vision count in neither:
a draft's cost is per draft, an image's per image.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from model_adapter.checkpoint_spec import TensorSpec, tensor_specs
from model_adapter.config import LayerSpec, ModelConfig


class Group(Enum):
    """The model's parts as the report counts them."""

    BACKBONE = "backbone"
    ENGRAM = "Engram"
    DSPARK = "DSpark"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part. `parameters`: values, scales not counted. `disk_bytes`: scales included.
    `active_prefill`, `active_decode`: parameters per token, see the module."""

    group: Group
    part: str
    parameters: int = 0
    disk_bytes: int = 0
    active_prefill: int = 0
    active_decode: int = 0


_EXPERTS = "routed experts"
_LAYER_PARTS = (
    ("attn.wq_a.", "attention wq_a"),
    ("attn.wq_b.", "attention wq_b"),
    ("attn.wkv.", "attention wkv"),
    ("attn.wo_a.", "attention wo_a"),
    ("attn.wo_b.", "attention wo_b"),
    ("attn.compressor.", "compressor"),
    ("attn.indexer.", "indexer"),
    ("attn.", "attention norms, sinks"),
    ("ffn.experts.", _EXPERTS),
    ("ffn.shared_experts.", "shared expert"),
    ("ffn.gate.", "gate"),
    ("hc_", "mHC"),
    ("engram.embed.", "tables"),
    ("engram.", "projections"),
    ("main_proj.", "main projection"),
    ("markov_head.", "Markov head"),
    ("confidence_head.", "confidence head"),
    ("", "norms"),
)
_WHOLE_NAMES = {
    "embed.weight": (Group.BACKBONE, "embedding"),
    "head.weight": (Group.BACKBONE, "head"),
    "norm.weight": (Group.BACKBONE, "norms"),
}
_VISION_PARTS = (
    ("vision.", "image encoder"),
    ("aligner.", "aligner"),
    ("image_", "span embeddings"),
)
_CED_PARTS = re.compile(r"attn_norm\.|attn\.compressor\.|attn\.indexer\.(wk|k_norm)\.|engram\.")
"""Of the decoder's Full layer: what a position needs whose global rows alone are wanted."""


def part_sizes(config: ModelConfig) -> list[PartSize]:
    """Every part in the order of the checkpoint, groups together."""
    counter = _Counter(config)
    tensors = [counter.one(spec) for spec in tensor_specs(config.raw)]
    found: dict[tuple[Group, str], list[PartSize]] = {}
    for group in Group:
        for one in tensors:
            if one.group is group:
                found.setdefault((group, one.part), []).append(one)
    return [_sum(group, part, sizes) for (group, part), sizes in found.items()]


def total(sizes: Iterable[PartSize], group: Group) -> PartSize:
    """The sum of a group's parts."""
    return _sum(group, "total", (s for s in sizes if s.group is group))


def _sum(group: Group, part: str, sizes: Iterable[PartSize]) -> PartSize:
    sizes = list(sizes)
    return PartSize(
        group=group,
        part=part,
        parameters=sum(s.parameters for s in sizes),
        disk_bytes=sum(s.disk_bytes for s in sizes),
        active_prefill=sum(s.active_prefill for s in sizes),
        active_decode=sum(s.active_decode for s in sizes),
    )


class _Counter:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        layers = (*config.layer_specs, *config.draft_specs)
        self._layers = {layer.prefix: layer for layer in layers}

    def one(self, spec: TensorSpec) -> PartSize:
        """One tensor as a part of its own."""
        group, part, layer, rest = self._place(spec.name)
        prefill = decode = 0
        if group in (Group.BACKBONE, Group.ENGRAM):
            decode = self._active(spec, part, layer)
            prefill = decode if self._in_prefill(part, layer, rest) else 0
        return PartSize(group, part, spec.parameters, spec.disk_bytes, prefill, decode)

    def _place(self, name: str) -> tuple[Group, str, LayerSpec | None, str]:
        """Group, part, layer, and the tensor's name within the layer."""
        if name in _WHOLE_NAMES:
            return (*_WHOLE_NAMES[name], None, name)
        for prefix, part in _VISION_PARTS:
            if name.startswith(prefix):
                return Group.VISION, part, None, name
        kind, number, rest = name.split(".", 2)
        part = next(part for prefix, part in _LAYER_PARTS if rest.startswith(prefix))
        group = Group.DSPARK if kind == "mtp" else Group.BACKBONE
        if rest.startswith("engram."):
            group = Group.ENGRAM
        return group, part, self._layers[f"{kind}.{number}"], rest

    def _active(self, spec: TensorSpec, part: str, layer: LayerSpec | None) -> int:
        if part == "embedding":
            return spec.shape[1]
        if part == "tables":
            assert self._config.engram is not None
            lookups = (self._config.engram.ngram_max - 1) * self._config.engram.heads
            return lookups * spec.shape[1]
        if part == _EXPERTS:
            assert layer is not None
            # Of E experts k are chosen: k of them count in full, which ones does not matter.
            number = int(spec.name.split(".experts.")[1].split(".")[0])
            return spec.parameters if number < layer.experts_per_token else 0
        return spec.parameters

    def _in_prefill(self, part: str, layer: LayerSpec | None, rest: str) -> bool:
        if layer is None:
            return part == "embedding"
        if layer.index == self._config.decoder_start:
            return _CED_PARTS.match(rest) is not None
        return layer.index < self._config.decoder_start
