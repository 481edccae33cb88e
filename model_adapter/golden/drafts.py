"""Comparisons of one DSpark draft: from the model's own features, and from the vectors'.

End to end a draft hangs on the last bit of its features: one window code that rounds the other way
moves its logits by more than the tolerance. So the tolerance holds end to end as long as the codes
of the two drafts agree. Where they part, the earliest value that was rounded differently must lie
on the midpoint, or the tolerance holds all the same.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from model_adapter.dspark import Draft, Drafter, DraftWindows, FeatureTap
from model_adapter.golden.end_to_end import Comparison
from model_adapter.golden.result import Part, Result, equal, relative
from model_adapter.golden.rounding import part_at_a_midpoint


def draft(c: Comparison) -> Iterator[Result]:
    """Features and anchor, the draft alone on the vectors' features, the draft end to end."""
    if "dspark.draft_tokens" not in c.vectors or c.model.config.dspark is None:
        return
    prompt = c.vectors.get("greedy.prompt_ids")
    tap = FeatureTap(c.model.config.dspark, len(prompt))
    logits = c.model.prefill(c.model.new_cache(), prompt, "exact", len(prompt), observer=tap)
    features = tap.take()
    assert features is not None
    yield c.relative("dspark.target_features", features)
    yield c.equal("dspark.anchor_token", logits.argmax().reshape(1))
    anchor = int(c.vectors.get("dspark.anchor_token"))
    theirs = _Run(c, c.vectors.get("dspark.target_features").to(features.dtype), anchor)
    mine = _Run(c, features, anchor)
    yield from _alone(c, theirs.draft)
    jumped = part_at_a_midpoint(mine.values, theirs.values)
    for result in _end_to_end(c, mine.draft):
        yield replace(result, tolerance=None) if jumped else result


class _Run:
    """A draft, and every window value of the draft layers in the order of their making."""

    def __init__(self, c: Comparison, features: torch.Tensor, anchor: int) -> None:
        drafter = Drafter(c.model)
        windows = DraftWindows(c.model.config)
        with torch.inference_mode():
            self.values = drafter.window_values(features, 0)
            drafter.extend(windows, features)
        self.draft: Draft = drafter.draft(windows, anchor, observer=self._keep)

    def _keep(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        if stage == "window_kv":
            self.values.append(tensor.clone())


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
