"""Random checkpoints in the released on-disk layout (ds41f §3), the same for the same seed.

Values are drawn per tensor from the seed and the tensor's name, so that neither the order nor the
sharding changes them. A projection has variance 1/columns and a norm's weight lies around one. What
is added to the streams is smaller by the root of the number of sites, two per layer, so that all
sites together add about as much as the embedding brought. mHC's mixing is doubly stochastic and
changes no sizes. So activations stay sane at any depth; and, as in a trained network, what lies far
back matters less than what is near: an answer after a bounded replay (ds41f §5) is mostly that
of a full prefill.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import kernels
from model_adapter.checkpoint_spec import Config, Encoding, Fill, TensorSpec, tensor_specs
from model_adapter.config import ModelConfig
from model_adapter.demo.conversations import training_texts
from model_adapter.engram import table_rows
from model_adapter.errors import InputError
from model_adapter.presets import PRESETS, preset_config
from model_adapter.token_map import token_map
from model_adapter.tokenizer import save_tokenizer, train_tokenizer

SHARD_BYTES_MAX_DEFAULT = 64 << 20
_BLOCK = 32
_E4M3_MAX = 448.0
_AMAX_MIN = 1e-4

Float32 = npt.NDArray[np.float32]


def _random(spec: TensorSpec, seed: int, sites: int) -> Float32:
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match spec.fill:
        case Fill.FACTOR:
            return rng.uniform(0.3, 0.9, spec.shape).astype(np.float32)
        case Fill.NORM:
            mean, deviation = 1.0, 0.1
        case Fill.MATRIX:
            mean, deviation = 0.0, spec.shape[-1] ** -0.5
        case Fill.RESIDUAL:
            mean, deviation = 0.0, (spec.shape[-1] * sites) ** -0.5
        case Fill.EMBEDDING:
            mean, deviation = 0.0, 1.0
        case Fill.OFFSET:
            mean, deviation = 0.0, 0.5
        case Fill.BIAS:
            mean, deviation = 0.0, 0.1
    values = rng.standard_normal(spec.shape, dtype=np.float32)
    return values * np.float32(deviation) + np.float32(mean)


def _exponent(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float8_e8m0fnu)


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and one ue8m0 scale per 32×32 block of a float32 matrix.

    Returns codes `[rows, columns]` and scales `[⌈rows/32⌉, ⌈columns/32⌉]`.
    """
    rows, columns = weight.shape
    pad = (0, -columns % _BLOCK, 0, -rows % _BLOCK)
    blocks = torch.nn.functional.pad(weight, pad)
    blocks = blocks.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    amax = blocks.abs().amax(dim=(1, 3)).clamp_min(_AMAX_MIN)
    scale = torch.exp2(torch.ceil(torch.log2(amax / _E4M3_MAX)))
    codes = (blocks / scale[:, None, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), _exponent(scale)


def _split_record(
    record: npt.NDArray[np.uint8], code_bytes: int, codes: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.from_numpy(record)
    scale = tensor[:, code_bytes:].contiguous().view(torch.float8_e8m0fnu)
    return tensor[:, :code_bytes].contiguous().view(codes), scale


def encode_tensor(spec: TensorSpec, values: Float32) -> dict[str, torch.Tensor]:
    """`values` as the tensors that lie on disk under the spec's names."""
    columns = spec.shape[-1]
    match spec.encoding:
        case Encoding.FP32:
            return {spec.name: torch.from_numpy(values)}
        case Encoding.BF16:
            return {spec.name: torch.from_numpy(values).bfloat16()}
        case Encoding.FP8_BLOCK:
            codes, scale = quantize_fp8_block(torch.from_numpy(values))
        case Encoding.FP8_ROW:
            record = kernels.fp8_quantize(values)
            codes, scale = _split_record(record, columns, torch.float8_e4m3fn)
        case Encoding.FP4_ROW:
            record = kernels.mxfp4_quantize(values)
            codes, scale = _split_record(record, columns // 2, torch.int8)
    return {spec.name: codes, spec.scale_name: scale}


def _shards(config: Config, seed: int, bytes_max: int) -> Iterator[dict[str, torch.Tensor]]:
    sites = 2 * config["text_config"]["num_hidden_layers"]
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for spec in tensor_specs(config):
        tensors = encode_tensor(spec, _random(spec, seed, sites))
        added = sum(t.nbytes for t in tensors.values())
        if shard and size + added > bytes_max:
            yield shard
            shard, size = {}, 0
        shard |= tensors
        size += added
    yield shard


def write_weights(
    config: Config, seed: int, directory: Path, shard_bytes_max: int = SHARD_BYTES_MAX_DEFAULT
) -> tuple[int, int]:
    """Write random weights for `config` as shards and their index; returns the bytes of all tensors
    and the number of shards.

    One shard is held in memory at a time.
    """
    parts: list[list[str]] = []
    tensor_bytes = 0
    for number, shard in enumerate(_shards(config, seed, shard_bytes_max)):
        save_file(shard, directory / f"part-{number}", metadata={"format": "pt"})
        parts.append(list(shard))
        tensor_bytes += sum(t.nbytes for t in shard.values())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / name)
        weight_map |= dict.fromkeys(names, name)
    _write_json(
        {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))},
        directory / "model.safetensors.index.json",
    )
    return tensor_bytes, len(parts)


def _write_json(value: Config, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """What was written. `parameters`: values, scales not counted. `tensor_bytes`: on disk."""

    parameters: int
    tensor_bytes: int
    shards: int


def complete_config(config: Config, tokenizer: Tokenizer) -> Config:
    """Enter what the tokenizer decides: the merged vocabulary's size and, with it, the Engram
    tables' rows (ds41f §2)."""
    text = config["text_config"]
    merged = token_map(tokenizer, text["vocab_size"])
    text["engram_compressed_vocab_size"] = int(merged.max()) + 1
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    engram = ModelConfig.from_dict(config).engram
    assert engram is not None
    text["engram_num_embeddings"] = table_rows(engram)
    return config


def make_checkpoint(
    preset: str,
    seed: int,
    directory: Path,
    shard_bytes_max: int = SHARD_BYTES_MAX_DEFAULT,
) -> MadeCheckpoint:
    """Write a complete random checkpoint; `directory` is made where it does not exist.

    Raises `InputError` for an unknown preset and for a directory that holds a checkpoint already.
    """
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    return write_checkpoint(preset_config(preset), seed, directory, shard_bytes_max)


def write_checkpoint(
    config: Config,
    seed: int,
    directory: Path,
    shard_bytes_max: int = SHARD_BYTES_MAX_DEFAULT,
) -> MadeCheckpoint:
    """The same for a config such as `preset_config` gives."""
    if (directory / "config.json").exists():
        raise InputError(f"{directory} holds a checkpoint already; name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(training_texts(), config["text_config"]["vocab_size"])
    config = complete_config(config, tokenizer)
    save_tokenizer(tokenizer, directory)
    tensor_bytes, shards = write_weights(config, seed, directory, shard_bytes_max)
    _write_json(config, directory / "config.json")
    parameters = sum(spec.parameters for spec in tensor_specs(config))
    return MadeCheckpoint(parameters, tensor_bytes, shards)
