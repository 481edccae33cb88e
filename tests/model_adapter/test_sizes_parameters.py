"""Parameters by part: of the released config, and against checkpoints that are really there."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
from golden_model import DIRECTORY as GOLDEN

from model_adapter.checkpoint import Checkpoint
from model_adapter.checkpoint_check import check_checkpoint
from model_adapter.config import LayerMode, ModelConfig
from model_adapter.engram import EngramHasher, table_rows
from model_adapter.model import Model
from model_adapter.sizes import Group, PartSize, part_sizes, total
from model_adapter.sizes.meta import MetaCheckpoint
from model_adapter.weights import Weights

RELEASED = Path(__file__).parents[1] / "golden" / "released"
DOCUMENT = Path(__file__).parents[2] / "docs" / "sizes.md"
BILLION = 1e9


@cache
def released() -> ModelConfig:
    return ModelConfig.load(RELEASED)


@cache
def released_sizes() -> dict[tuple[Group, str], PartSize]:
    return {(p.group, p.part): p for p in part_sizes(released())}


def released_total(group: Group) -> PartSize:
    return total(released_sizes().values(), group)


def test_the_released_model_has_the_published_parameters():
    assert released_total(Group.BACKBONE).parameters == pytest.approx(552 * BILLION, rel=0.01)
    assert released_total(Group.ENGRAM).parameters == pytest.approx(196 * BILLION, rel=0.01)
    tables = released_sizes()[Group.ENGRAM, "tables"].parameters
    assert tables == pytest.approx(196 * BILLION, rel=0.01)


def test_the_released_model_has_the_published_active_parameters():
    sizes = released_sizes().values()
    assert round(sum(p.active_prefill for p in sizes) / BILLION) == 8
    assert round(sum(p.active_decode for p in sizes) / BILLION) == 16
    # with or without Engram's projections
    assert round(released_total(Group.BACKBONE).active_prefill / BILLION) == 8
    assert round(released_total(Group.BACKBONE).active_decode / BILLION) == 16


def test_the_released_checkpoint_has_the_published_size():
    disk = sum(p.disk_bytes for p in released_sizes().values())
    assert disk / 2**30 == pytest.approx(475, rel=0.01)


@pytest.mark.parametrize(
    ("group", "part", "parameters"),
    [
        (Group.BACKBONE, "embedding", 129280 * 5120),
        (Group.BACKBONE, "head", 129280 * 5120),
        (Group.BACKBONE, "attention wq_a", 40 * 1280 * 5120),
        (Group.BACKBONE, "attention wq_b", 40 * 64 * 512 * 1280),
        (Group.BACKBONE, "attention wkv", 40 * 512 * 5120),
        (Group.BACKBONE, "attention wo_a", 40 * 8 * 1024 * (64 // 8) * 512),
        (Group.BACKBONE, "attention wo_b", 40 * 5120 * 8 * 1024),
        (Group.BACKBONE, "compressor", 3 * 2 * 512 * 5120 + 512 * 5120 + 4 * 512),
        (
            Group.BACKBONE,
            "indexer",
            8 * (32 * 128 * 1280 + 32 * 5120) + 4 * (128 * 512 + 128),
        ),
        (Group.BACKBONE, "routed experts", 40 * 384 * 3 * 5120 * 2304),
        (Group.BACKBONE, "shared expert", 40 * 3 * 5120 * 2304),
        (Group.BACKBONE, "gate", 40 * 384 * (5120 + 2)),
        (Group.BACKBONE, "mHC", 40 * 2 * (24 * 4 * 5120 + 24 + 3)),
        (Group.ENGRAM, "tables", (384006168 + 384016682) * 256),
        (Group.ENGRAM, "projections", 2 * (5 * 5120 * 24 * 256 + 2 * 4 * 5120)),
        (Group.DSPARK, "routed experts", 3 * 128 * 3 * 5120 * 2304),
        (Group.DSPARK, "Markov head", 2 * 129280 * 256),
        (Group.DSPARK, "main projection", 5120 * 3 * 5120),
    ],
)
def test_parts_of_the_released_model(group, part, parameters):
    assert released_sizes()[group, part].parameters == parameters


def test_what_a_released_token_is_multiplied_with():
    sizes = released_sizes()
    expert = 3 * 5120 * 2304
    routed = sizes[Group.BACKBONE, "routed experts"]
    assert (routed.active_prefill, routed.active_decode) == (20 * 6 * expert, 40 * 6 * expert)
    head = sizes[Group.BACKBONE, "head"]
    assert (head.active_prefill, head.active_decode) == (0, head.parameters)
    assert sizes[Group.BACKBONE, "embedding"].active_prefill == 5120
    assert sizes[Group.ENGRAM, "tables"].active_decode == 2 * 24 * 256
    # every compressor serves prefill; of layer 20's indexer only what makes keys does
    assert sizes[Group.BACKBONE, "compressor"].active_prefill == (
        sizes[Group.BACKBONE, "compressor"].parameters
    )
    queries = 32 * 128 * 1280 + 32 * 5120
    keys = 128 * 512 + 128
    assert sizes[Group.BACKBONE, "indexer"].active_prefill == 3 * queries + 4 * keys
    for part in sizes.values():
        assert part.active_prefill <= part.active_decode <= part.parameters
        if part.group in (Group.DSPARK, Group.VISION):
            assert part.active_decode == 0


def test_the_documented_table_is_this_one():
    table = DOCUMENT.read_text(encoding="utf-8")
    for p in released_sizes().values():
        numbers = [f"{p.parameters / 1e6:,.2f}", f"{p.disk_bytes / 1e9:,.3f}"]
        numbers += [f"{n / 1e6:,.2f}" if n else "–" for n in (p.active_prefill, p.active_decode)]
        assert f"| {p.group.value} | {p.part} | {' | '.join(numbers)} |" in table
    for group in Group:
        assert f"| **total** | **{released_total(group).parameters / 1e6:,.2f}** |" in table


def test_the_released_engram_tables_have_the_rows_that_the_primes_add_up_to():
    engram = released().engram
    assert table_rows(engram) == [384006168, 384016682] == list(engram.table_rows)


def test_the_released_model_is_instantiated_without_memory():
    config = released()
    checkpoint = MetaCheckpoint(config)
    check_checkpoint(checkpoint, config)
    merged = np.arange(config.vocab) % config.engram.compressed_vocab
    hasher = EngramHasher(config.engram, merged, config.image_token)
    model = Model(config, Weights(checkpoint, torch.bfloat16), hasher)
    modes = [spec.mode for spec in config.layer_specs]
    assert len(model.blocks) == 40
    assert [modes.count(m) for m in LayerMode] == [2, 4, 4, 30]
    assert sum(rows * 256 // ratio for _, _, ratio, rows in model.cache_sections()) == 227_840
    tensors = (checkpoint.tensor(name) for name in checkpoint.names())
    held = 0
    for tensor in tensors:
        assert tensor.is_meta
        held += tensor.nbytes
    assert held == sum(p.disk_bytes for p in released_sizes().values())


@pytest.mark.parametrize("directory", [GOLDEN, "tiny"])
def test_sizes_are_those_of_a_checkpoint_that_is_there(directory):
    directory = tiny.checkpoint() if directory == "tiny" else directory
    config = ModelConfig.load(directory)
    real, meta = Checkpoint(directory), MetaCheckpoint(config)
    assert set(meta.names()) == set(real.names())
    for name in real.names():
        assert meta.header(name) == real.header(name), name
        assert meta.tensor(name).dtype == real.tensor(name).dtype, name
    disk = sum(real.tensor(name).nbytes for name in real.names())
    sizes = part_sizes(config)
    assert sum(p.disk_bytes for p in sizes) == disk
    values = sum(
        real.tensor(name).numel() * (2 if real.header(name)[1] == "I8" else 1)
        for name in real.names()
        if not name.endswith(".scale")
    )
    assert sum(p.parameters for p in sizes) == values


def test_a_model_without_its_optional_parts_has_no_sizes_for_them():
    raw = ModelConfig.load(GOLDEN).raw
    text = raw["text_config"] | {"num_nextn_predict_layers": 0, "engram_layer_ids": []}
    text["engram_num_embeddings"] = []
    config = ModelConfig.from_dict(
        {k: v for k, v in raw.items() if k != "vision_config"} | {"text_config": text}
    )
    assert {p.group for p in part_sizes(config)} == {Group.BACKBONE}
    assert total(part_sizes(config), Group.VISION).parameters == 0


def test_sizes_need_no_torch():
    code = "import sys, model_adapter.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
