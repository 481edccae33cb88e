"""Comparisons of one DSpark draft: from the vectors' features, and from the model's own.

A draft hangs on the last bit of its window values: one that lies on a rounding midpoint and is
rounded the other way moves the logits by more than the tolerance. So where a draft is over it, the
values on midpoints are rounded the other way, one after another, and the draft that then agrees
best is compared; the results say how many values were turned.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from model_adapter import records
from model_adapter.dspark import Draft, Drafter, DraftWindows, FeatureTap
from model_adapter.golden.end_to_end import Comparison
from model_adapter.golden.result import Part, Result, Status, equal, relative
from model_adapter.golden.rounding import on_midpoints, turn_

RUNS_MAX = 64
"""Drafts computed in search of the one that agrees."""

Turned = tuple[tuple[int, int], ...]
"""Values rounded the other way: which tensor, in the order of making, and where in it."""

Compare = Callable[[Comparison, Draft], Iterator[Result]]


def draft(c: Comparison) -> Iterator[Result]:
    """Features and anchor, the draft alone on the vectors' features, the draft end to end."""
    if "dspark.draft_tokens" not in c.vectors or c.model.config.dspark is None:
        return
    prompt = c.vectors.get("greedy.prompt_ids")
    tap = FeatureTap(c.model.config.dspark, len(prompt))
    logits = c.model.prefill(c.model.new_cache(), prompt, "exact", c.chunk(prompt), observer=tap)
    features = tap.take()
    assert features is not None
    yield c.relative("dspark.target_features", features)
    yield c.equal("dspark.anchor_token", logits.argmax().reshape(1))
    yield from _best(c, c.vectors.get("dspark.target_features").to(features), _alone)
    yield from _best(c, features, _end_to_end)


class _Run:
    """A draft, with some values rounded the other way. `on_midpoints`: what else could be."""

    def __init__(self, c: Comparison, features: torch.Tensor, turned: Turned) -> None:
        drafter = Drafter(c.model)
        windows = DraftWindows(c.model.config, c.model.device)
        self._turned = turned
        self._made = 0
        self.on_midpoints: list[tuple[int, int]] = []
        with torch.inference_mode():
            for kv, rows in zip(drafter.window_values(features, 0), windows.layers, strict=True):
                self._visit(kv)
                rows.append(records.pack(records.WINDOW, kv))
        anchor = int(c.vectors.get("dspark.anchor_token"))
        self.draft: Draft = drafter.draft(windows, anchor, observer=self._observe)

    def _observe(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        if stage == "window_kv":
            self._visit(tensor)

    def _visit(self, values: torch.Tensor) -> None:
        self.on_midpoints += [(self._made, at) for at in on_midpoints(values)]
        turn_(values, [at for made, at in self._turned if made == self._made])
        self._made += 1


def _best(c: Comparison, features: torch.Tensor, compare: Compare) -> list[Result]:
    """The results with the fewest failures, and of these with the fewest values turned."""
    tried: list[Turned] = [()]
    best: list[Result] = []
    for turned in tried:
        run = _Run(c, features, turned)
        results = [replace(r, turned=len(turned)) for r in compare(c, run.draft)]
        if not best or _failures(results) < _failures(best):
            best = results
        if not _failures(best) or features.dtype is not torch.float32:
            break
        later = [at for at in run.on_midpoints if not turned or at > turned[-1]]
        tried += [(*turned, at) for at in later][: RUNS_MAX - len(tried)]
    return best


def _failures(results: list[Result]) -> int:
    return sum(r.status is Status.FAIL for r in results)


def _parts(result: Draft) -> list[tuple[str, torch.Tensor]]:
    return [
        ("dspark.base_logits", result.base_logits),
        ("dspark.draft_logits", result.logits),
        ("dspark.confidence", result.confidences),
    ]


def _alone(c: Comparison, result: Draft) -> Iterator[Result]:
    for key, tensor in _parts(result):
        name, theirs = f"draft: {key}", c.vectors.get(key)
        yield relative(Part.BLOCKS, name, tensor, theirs, c.tolerances.block)
    tokens, theirs = torch.tensor(result.tokens), c.vectors.get("dspark.draft_tokens")
    tolerance = c.tolerances.exact_for_key("dspark.draft_tokens")
    yield equal(Part.BLOCKS, "draft: dspark.draft_tokens", tokens, theirs, tolerance)


def _end_to_end(c: Comparison, result: Draft) -> Iterator[Result]:
    for key, tensor in _parts(result):
        yield c.relative(key, tensor)
    yield c.equal("dspark.draft_tokens", torch.tensor(result.tokens))
