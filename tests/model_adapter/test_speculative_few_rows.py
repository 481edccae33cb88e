"""Few rows go one by one, each as a copy of its own; none and many go at once."""

import pytest
import torch

from model_adapter.few_rows import FEW_ROWS_MAX, by_row, linear, queries_per_step


@pytest.mark.parametrize(
    ("rows", "calls"),
    [(0, [0]), (1, [1]), (2, [1, 1]), (FEW_ROWS_MAX, [1] * FEW_ROWS_MAX), (9, [9]), (40, [40])],
)
def test_calls(rows, calls):
    seen = []

    def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        assert len(x) == len(y)
        return x + y

    x = torch.arange(rows * 3.0).reshape(rows, 3)
    assert torch.equal(by_row(double, x, x), 2 * x)
    assert seen == calls


def test_a_row_is_handed_out_at_the_alignment_of_a_fresh_tensor():
    offsets = []

    def look(row: torch.Tensor) -> torch.Tensor:
        offsets.append((row.storage_offset(), row.data_ptr() % 64))
        return row

    by_row(look, torch.zeros(5, 7))
    assert offsets == [(0, 0)] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(1, FEW_ROWS_MAX + 1))
def test_a_product_by_few_rows_has_the_bits_of_each(dtype, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = torch.randn(40, 96, generator=generator).to(dtype)
    each = [torch.nn.functional.linear(row.clone(), weight) for row in x.split(1)]
    assert torch.equal(linear(x, weight), torch.cat(each))


@pytest.mark.parametrize(("count", "step"), [(1, 1), (FEW_ROWS_MAX, 1), (9, 128), (500, 128)])
def test_few_queries_are_taken_one_by_one(count, step):
    assert queries_per_step(count, 128) == step
