"""Where a tolerance asks for more than the dtype gives.

In bfloat16 every last bit can turn a code, and what follows is amplified from layer to layer. How
far is measured: the model computes the same tensors once more in another order of sums. A tensor
end to end that is over its tolerance by no more than that spread says nothing about the formula;
it is shown, with the spread, and not held. The blocks alone are held in every dtype, and float32
end to end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from model_adapter.few_rows import FEW_ROWS_MAX
from model_adapter.golden.end_to_end import Comparison, Group
from model_adapter.golden.result import Part, Result, Status, relative

SPREADS_MAX = 2.0
"""An error that is excused is at most so many spreads."""


def may_excuse(result: Result) -> bool:
    """Whether a failure could be the dtype's own."""
    return (
        result.status is Status.FAIL
        and result.part is Part.END_TO_END
        and result.measure == "relative error"
    )


def excused(c: Comparison, results: Sequence[Result], groups: Iterable[Group]) -> list[Result]:
    """The results, those over their tolerance with their spread, and not held where it explains
    them. float32 is held always."""
    if c.model.weights.dtype is torch.float32:
        return list(results)
    other = replace(c, chunk_tokens=FEW_ROWS_MAX - 1, mine={})
    for group in groups:
        for _ in group(other):
            pass
    return [_with_spread(c, other, r) if may_excuse(r) else r for r in results]


def _with_spread(c: Comparison, other: Comparison, result: Result) -> Result:
    a, b = c.mine.get(result.key), other.mine.get(result.key)
    if a is None or b is None or result.error is None:
        return result
    spread = relative(result.part, result.key, b, a, None).error
    held = not (spread and result.error <= SPREADS_MAX * spread)
    return replace(result, spread=spread, tolerance=result.tolerance if held else None)
