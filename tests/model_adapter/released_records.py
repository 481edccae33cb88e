"""Models whose cache records have the released sizes: 288, 68 and 528 bytes (ds41f §4)."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_adapter.make_checkpoint import write_checkpoint
from model_adapter.model import Model
from model_adapter.presets import preset_config

WINDOW = 128
RECORD_WIDTHS = (
    "head_dim",
    "qk_rope_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "max_position_embeddings",
    "rope_parameters",
)
_kept: list[TemporaryDirectory] = []


def narrow_config() -> dict[str, Any]:
    """`small`, but for what decides the cache records, the selection and the positions: those are
    `wide`'s, which are the released ones."""
    config = preset_config("small")
    wide = preset_config("wide")["text_config"]
    config["text_config"] |= {key: wide[key] for key in RECORD_WIDTHS}
    return config


def _checkpoint(config: dict[str, Any]) -> Path:
    _kept.append(TemporaryDirectory(prefix="released-records-"))
    path = Path(_kept[-1].name) / "checkpoint"
    write_checkpoint(config, 0, path)
    return path


@cache
def narrow_checkpoint() -> Path:
    """Of `narrow_config`, seed 0; read only."""
    return _checkpoint(narrow_config())


@cache
def wide_checkpoint() -> Path:
    """The preset `wide`, seed 0: 0.96 GB, some twenty seconds; read only."""
    return _checkpoint(preset_config("wide"))


@cache
def narrow_model() -> Model:
    return Model.load(narrow_checkpoint())
