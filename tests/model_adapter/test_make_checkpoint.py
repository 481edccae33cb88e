"""Random checkpoints: complete, in the released layout, the same for the same seed, and sane."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
from safetensors import safe_open

from model_adapter import quantized
from model_adapter.checkpoint_spec import Encoding, Fill, TensorSpec, tensor_specs
from model_adapter.config import ModelConfig
from model_adapter.errors import InputError
from model_adapter.make_checkpoint import (
    encode_tensor,
    make_checkpoint,
    quantize_fp8_block,
)
from model_adapter.presets import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny-a"
DTYPES = {
    Encoding.BF16: "BF16",
    Encoding.FP32: "F32",
    Encoding.FP8_BLOCK: "F8_E4M3",
    Encoding.FP8_ROW: "F8_E4M3",
    Encoding.FP4_ROW: "I8",
}


def headers(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for shard in sorted(directory.glob("model-*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                part = tensors.get_slice(name)
                found[name] = (tuple(part.get_shape()), part.get_dtype())
    return found


@pytest.mark.parametrize("directory", ["golden", "made"])
def test_holds_exactly_the_released_tensors(directory):
    directory = GOLDEN if directory == "golden" else tiny.checkpoint()
    config = json.loads((directory / "config.json").read_text())
    found = headers(directory)
    expected = set()
    for spec in tensor_specs(config):
        shape, dtype = found[spec.name]
        columns = (spec.shape[-1] // 2,) if spec.encoding is Encoding.FP4_ROW else spec.shape[-1:]
        assert shape == spec.shape[:-1] + columns
        assert dtype == DTYPES[spec.encoding]
        expected.add(spec.name)
        if spec.encoding not in (Encoding.BF16, Encoding.FP32):
            assert found[spec.scale_name][1] == "F8_E8M0"
            expected.add(spec.scale_name)
    assert set(found) == expected
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == expected


def test_same_seed_same_bytes_and_another_seed_others(tmp_path):
    make_checkpoint("tiny", 0, tmp_path / "again")
    make_checkpoint("tiny", 1, tmp_path / "other")
    files = sorted(p.name for p in tiny.checkpoint().iterdir())
    assert files == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in files:
        bytes_of = [d / name for d in (tiny.checkpoint(), tmp_path / "again", tmp_path / "other")]
        first, again, other = (path.read_bytes() for path in bytes_of)
        assert first == again
        assert (first != other) == name.startswith("model-")


def test_sharding_changes_no_tensor(tmp_path):
    made = make_checkpoint("tiny", 0, tmp_path / "sharded", shard_bytes_max=1 << 20)
    assert made.shards > 3
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert [p.name for p in shards] == [
        f"model-{i + 1:05d}-of-{made.shards:05d}.safetensors" for i in range(made.shards)
    ]
    assert headers(tmp_path / "sharded") == headers(tiny.checkpoint())
    (whole,) = tiny.checkpoint().glob("*.safetensors")
    with safe_open(whole, "np") as one, safe_open(shards[0], "np") as part:
        for name in part.keys():  # noqa: SIM118 - no mapping
            assert one.get_slice(name).get_shape() == part.get_slice(name).get_shape()
    with safe_open(whole, "pt") as one, safe_open(shards[0], "pt") as part:
        for name in part.keys():  # noqa: SIM118 - no mapping
            a, b = one.get_tensor(name), part.get_tensor(name)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(64, 96), (40, 33), (1, 1)])
def test_fp8_blocks_keep_what_they_are_given(shape):
    weight = torch.from_numpy(np.random.default_rng(3).standard_normal(shape, dtype=np.float32))
    codes, scale = quantize_fp8_block(weight)
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = quantized.dequantize_fp8_blocks(codes, scale, torch.float32)
    # e4m3 has three mantissa bits; what lies below a scaled 2^-6 has an absolute step instead
    assert ((back - weight).abs() <= weight.abs() / 16 + 2**-9 * scale.float().max()).all()
    largest = codes.float().abs().max()
    assert 224 < largest <= 448


@pytest.mark.parametrize("encoding", [Encoding.FP8_ROW, Encoding.FP4_ROW])
def test_row_encodings_keep_what_they_are_given(encoding):
    values = np.random.default_rng(4).standard_normal((6, 64), dtype=np.float32)
    spec = TensorSpec("x.weight", (6, 64), encoding, Fill.MATRIX)
    tensors = encode_tensor(spec, values)
    codes, scale = tensors["x.weight"], tensors["x.scale"]
    assert scale.shape == (6, 2)
    if encoding is Encoding.FP4_ROW:
        back = quantized.dequantize_fp4(codes, scale, torch.float32)
        # the widest gap of e2m1 is 4 … 6
        bound = scale.float().repeat_interleave(32, dim=1)
    else:
        back = quantized.dequantize_fp8_rows(codes, scale, torch.float32)
        bound = torch.from_numpy(np.abs(values)) / 16 + 2**-9 * scale.float().max()
    assert ((back - torch.from_numpy(values)).abs() <= bound).all()


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"wide"}))
def test_presets_are_real_configurations(preset, tmp_path):
    made = make_checkpoint(preset, 0, tmp_path / "c")
    config = ModelConfig.load(tmp_path / "c")
    modes = [spec.mode.value for spec in config.layer_specs]
    assert set(modes) == {"window", "full", "reindex", "reuse"}
    assert len(config.kv_sources) > 2
    assert {config.compress_ratios[i] for i in config.kv_sources} == {1, 2}
    assert config.vision is not None
    assert config.dspark is not None
    assert made.tensor_bytes == sum(
        p.stat().st_size - 8 - int.from_bytes(p.read_bytes()[:8], "little")
        for p in (tmp_path / "c").glob("*.safetensors")
    )


def test_activations_stay_sane_and_answers_vary():
    streams = []

    def observe(stage, layer, tensor):
        if stage == "streams_in":
            streams.append(float(tensor.float().square().mean().sqrt()))

    model = tiny.model()
    model.prefill_all_logits(model.new_cache(), tiny.prompt(96), observer=observe)
    assert len(streams) == model.config.layers
    assert all(0.3 < size < 4 for size in streams)
    answers = [tiny.plain(tiny.prompt(96, seed), 12) for seed in range(3)]
    assert all(len(set(answer)) > 6 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 3


def test_refuses_what_it_can_not_make(tmp_path):
    with pytest.raises(InputError, match="unknown preset 'huge'; there are tiny, small"):
        make_checkpoint("huge", 0, tmp_path / "x")
    with pytest.raises(InputError, match="holds a checkpoint already"):
        make_checkpoint("tiny", 0, tiny.checkpoint())
