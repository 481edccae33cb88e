"""Broken checkpoints: each is refused by an error that names the file or the tensor."""

import json
import shutil

import pytest
import torch
from golden_model import DIRECTORY, model, vector
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_adapter.errors import CheckpointError, InputError, ShardError, TensorError
from model_adapter.model import Model

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copied(tmp_path):
    for file in DIRECTORY.iterdir():
        if not file.name.startswith("golden-"):
            shutil.copy(file, tmp_path)
    return tmp_path


def rewrite(directory, change) -> None:
    """Apply `change` to the first shard's tensors, and keep the index in step."""
    tensors = load_file(directory / FIRST)
    change(tensors)
    save_file(tensors, directory / FIRST)
    index = json.loads((directory / INDEX).read_text())
    kept = {n: s for n, s in index["weight_map"].items() if s != FIRST}
    index["weight_map"] = kept | dict.fromkeys(tensors, FIRST)
    (directory / INDEX).write_text(json.dumps(index))


def test_missing_shard(copied):
    (copied / SECOND).unlink()
    with pytest.raises(ShardError, match=f"{SECOND} is missing; {INDEX} places aligner.w1.bias"):
        Model.load(copied)


def test_missing_index(copied):
    (copied / INDEX).unlink()
    with pytest.raises(ShardError, match="not a checkpoint"):
        Model.load(copied)


def test_broken_index(copied):
    (copied / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(ShardError, match=f"{INDEX} is no safetensors index"):
        Model.load(copied)


@pytest.mark.parametrize("kept", [0, 5, 5000, -1])
def test_truncated_shard(copied, kept):
    data = (copied / FIRST).read_bytes()
    (copied / FIRST).write_bytes(data[:kept])
    with pytest.raises(ShardError, match=f"{FIRST} is (truncated|not a safetensors file)"):
        Model.load(copied)


def test_garbage_instead_of_a_header(copied):
    data = bytearray((copied / FIRST).read_bytes())
    data[8:24] = bytes(16)
    (copied / FIRST).write_bytes(data)
    with pytest.raises(ShardError, match=f"{FIRST} is not a safetensors file"):
        Model.load(copied)


def test_unknown_dtype_is_named_with_its_tensor(copied):
    data = (copied / FIRST).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"BF16"', b'"BF17"', 1)
    (copied / FIRST).write_bytes(data[:8] + header + data[8 + length :])
    with pytest.raises(TensorError, match=r"in .* has the unknown dtype 'BF17'"):
        Model.load(copied)


def test_index_names_a_tensor_that_is_not_there(copied):
    index = json.loads((copied / INDEX).read_text())
    index["weight_map"]["layers.0.surprise"] = FIRST
    (copied / INDEX).write_text(json.dumps(index))
    with pytest.raises(TensorError, match=r"layers\.0\.surprise"):
        Model.load(copied)


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("layers.3.attn.wq_a.weight"), r"lacks layers\.3\.attn\.wq_a\.weight"),
        (_drop("layers.3.attn.wq_a.scale"), r"is F8_E4M3 but has no layers\.3\.attn\.wq_a\.scale"),
        (_put("odd.scale", torch.ones(1)), r"odd\.scale in .* is a scale without a weight"),
        (
            _put("layers.0.ffn.gate.weight", torch.zeros(7, 128)),
            r"gate\.weight in .* has shape \[7, 128\]; config\.json asks for \[8, 128\]",
        ),
        (
            _put("layers.1.engram.embed.scale", torch.zeros(663, 2).to(torch.float8_e8m0fnu)),
            r"embed\.scale in .* has shape \[663, 2\]",
        ),
        (
            _put("layers.2.attn.wkv.scale", torch.ones(2, 4)),
            r"wkv\.scale in .* has dtype F32; expected F8_E8M0",
        ),
        (
            _put("layers.0.hc_attn_fn", torch.zeros(24, 512, dtype=torch.int32)),
            r"hc_attn_fn in .* has dtype I32",
        ),
        (
            _put("layers.0.attn.wkv.weight", torch.zeros(64, 128)),
            r"wkv\.weight in .* is F32 and yet has layers\.0\.attn\.wkv\.scale",
        ),
    ],
)
def test_tensors_that_do_not_fit(copied, change, message):
    rewrite(copied, change)
    with pytest.raises(TensorError, match=message):
        Model.load(copied)


def test_a_tokenizer_of_another_checkpoint(copied):
    path = copied / "tokenizer.json"
    path.write_text(path.read_text().replace('"THE"', '"unrelated"'))
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        Model.load(copied)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Model.load(copied)


def check_same_model(loaded):
    """Close, not equal: in another file the mapped weights lie at other addresses, and a product's
    order of sums may follow the alignment."""
    ids = vector("short.input_ids")
    expected = model().prefill(model().new_cache(), ids)
    torch.testing.assert_close(
        loaded.prefill(loaded.new_cache(), ids), expected, rtol=1e-4, atol=1e-3
    )


def test_a_text_only_checkpoint_is_enough(copied):
    text = {n: t for n, t in load_file(copied / SECOND).items() if n.startswith("layers.")}
    save_file(text, copied / SECOND)
    index = json.loads((copied / INDEX).read_text())
    first = {n: s for n, s in index["weight_map"].items() if s == FIRST}
    index["weight_map"] = first | dict.fromkeys(text, SECOND)
    (copied / INDEX).write_text(json.dumps(index))
    check_same_model(Model.load(copied))


def test_one_file_without_an_index(copied):
    save_file(load_file(copied / FIRST) | load_file(copied / SECOND), copied / "model.safetensors")
    for name in (FIRST, SECOND, INDEX):
        (copied / name).unlink()
    check_same_model(Model.load(copied))


def test_dtypes_that_are_not_offered():
    with pytest.raises(InputError, match=r"torch\.float16 is not supported"):
        Model.load(DIRECTORY, torch.float16)


def test_unquantised_tensors_are_views_into_the_file():
    with safe_open(DIRECTORY / FIRST, "pt") as file:
        name = next(n for n in file.keys() if n.endswith("hc_attn_fn"))  # noqa: SIM118
    weights = model().weights
    before = weights.cached_bytes
    first = weights.checkpoint.tensor(name)
    assert first.data_ptr() == weights.checkpoint.tensor(name).data_ptr()
    assert weights.vector(name).data_ptr() == first.data_ptr()
    assert weights.cached_bytes == before
