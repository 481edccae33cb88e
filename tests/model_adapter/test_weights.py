"""Dequantising, and the budget of what is kept dequantised."""

import pytest
import torch
from golden_model import DIRECTORY, error, model, vector

from model_adapter import quantized
from model_adapter.checkpoint import Checkpoint
from model_adapter.model import Model
from model_adapter.weights import Weights

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def exponents(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(117, 137, shape, generator=generator, dtype=torch.uint8)
    return bits.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (40, 70), (1, 32)])
def test_fp8_blocks(shape, dtype):
    rows, columns = shape
    codes = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = exponents(-(-rows // 32), -(-columns // 32))
    values = quantized.dequantize_fp8_blocks(codes, scale, dtype)
    for r in range(0, rows, 13):
        for c in range(0, columns, 11):
            expected = float(codes[r, c]) * float(scale[r // 32, c // 32])
            assert float(values[r, c]) == expected


def test_fp8_rows():
    codes = torch.randn(3, 5, 64).to(torch.float8_e4m3fn)
    scale = exponents(3, 5, 2)
    values = quantized.dequantize_fp8_rows(codes, scale, torch.float32)
    assert torch.equal(values[..., 32:], codes[..., 32:].float() * scale[..., 1:].float())
    assert torch.equal(values[..., :32], codes[..., :32].float() * scale[..., :1].float())


def test_fp4_knows_every_byte():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(16, 16)
    scale = exponents(16, 1)
    values = quantized.dequantize_fp4(codes, scale, torch.float32)
    for byte in range(256):
        row, column = byte // 16, byte % 16 * 2
        factor = float(scale[row, 0])
        assert float(values[row, column]) == E2M1[byte & 15] * factor
        assert float(values[row, column + 1]) == E2M1[byte >> 4] * factor


def test_table_rows_are_the_rows_of_the_whole_table():
    weights = Weights(Checkpoint(DIRECTORY), torch.float32)
    whole = quantized.dequantize_fp8_rows(
        weights.checkpoint.tensor("layers.1.engram.embed.weight"),
        weights.checkpoint.tensor("layers.1.engram.embed.scale"),
        torch.float32,
    )
    picked = torch.tensor([[0, 662], [17, 17]])
    assert torch.equal(weights.rows("layers.1.engram.embed", picked), whole[picked])
    assert weights.cached_bytes == 0


def test_budget_is_kept_and_changes_nothing():
    ids = vector("mid.input_ids")
    expected = model().prefill(model().new_cache(), ids)
    budget = 200_000
    small = Model.load(DIRECTORY, weight_cache_bytes_max=budget)
    held = []
    cache = small.new_cache()
    logits = small.prefill(cache, ids, on_chunk=lambda _: held.append(small.weights.cached_bytes))
    assert torch.equal(logits, expected)
    assert 0 < max(held) <= budget
    assert small.weights.cached_bytes <= budget
    # All that the same prompt converts needs more.
    assert model().weights.cached_bytes > 2 * budget


def expert(weights: Weights, number: int) -> torch.Tensor:
    name = f"layers.0.ffn.experts.{number}"
    parts = (f"{name}.w1", f"{name}.w3", f"{name}.w2")
    return weights.stacked(name, *parts, by_demand=True)[0]


EXPERT_BYTES = 3 * 64 * 128 * 4
MATRIX_BYTES = 64 * 128 * 4


def test_the_least_recently_used_expert_goes_first():
    weights = Weights(Checkpoint(DIRECTORY), torch.float32, 2 * EXPERT_BYTES)
    kept, other = expert(weights, 0), expert(weights, 1)
    assert expert(weights, 0) is kept
    expert(weights, 2)
    assert expert(weights, 0) is kept
    assert expert(weights, 1) is not other
    assert weights.cached_bytes == 2 * EXPERT_BYTES


def test_what_every_token_needs_takes_the_place_of_experts_and_stays():
    weights = Weights(Checkpoint(DIRECTORY), torch.float32, EXPERT_BYTES + MATRIX_BYTES)
    first = expert(weights, 0)
    matrices = {name: weights.matrix(name) for name in ("layers.0.attn.wq_a", "layers.1.attn.wq_a")}
    assert weights.cached_bytes == 2 * MATRIX_BYTES
    assert expert(weights, 0) is not first  # it had to go, and no longer fits
    for name, matrix in matrices.items():
        assert weights.matrix(name) is matrix
    assert weights.cached_bytes == 2 * MATRIX_BYTES


def test_a_ring_that_does_not_fit_is_kept_in_part():
    weights = Weights(Checkpoint(DIRECTORY), torch.float32, 2 * MATRIX_BYTES)
    names = [f"layers.{i}.attn.wq_a" for i in range(3)]
    before = [weights.matrix(name) for name in names]
    after = [weights.matrix(name) for name in names]
    assert [a is b for a, b in zip(before, after, strict=True)] == [True, True, False]
    assert torch.equal(before[2], after[2])


def test_a_tensor_over_budget_is_used_but_not_kept():
    weights = Weights(Checkpoint(DIRECTORY), torch.float32, cache_bytes_max=100)
    assert weights.matrix("layers.0.attn.wq_a").shape == (64, 128)
    assert weights.cached_bytes == 0


def test_bfloat16_and_float32_hold_the_same_values():
    wide = Weights(Checkpoint(DIRECTORY), torch.float32)
    narrow = Weights(Checkpoint(DIRECTORY), torch.bfloat16)
    for name in ("layers.4.attn.wo_a", "layers.4.engram.wkv"):
        assert error(narrow.matrix(name).float(), wide.matrix(name)) == 0
