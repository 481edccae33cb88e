"""All comparisons of one golden directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from model_adapter.devices import CPU
from model_adapter.golden.blocks import blocks_alone
from model_adapter.golden.drafts import draft
from model_adapter.golden.end_to_end import TEXT_GROUPS, Comparison, Group
from model_adapter.golden.images import image_prompt
from model_adapter.golden.result import Part, Result, Status, not_covered
from model_adapter.golden.spread import excused, may_excuse
from model_adapter.golden.tolerance import TOLERANCES
from model_adapter.golden.vectors import Vectors
from model_adapter.model import Model

DTypeName = Literal["float32", "bfloat16"]

GROUPS: tuple[Group, ...] = (*TEXT_GROUPS, draft, image_prompt, blocks_alone)
"""What the adapter can compute; a key that none of them reads is listed as not covered."""


@dataclass(frozen=True, slots=True)
class Report:
    """Every comparison in order, then every key that was not covered."""

    directory: Path
    dtype: str
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Something was compared, and nothing is over its tolerance."""
        statuses = [r.status for r in self.results]
        return Status.OK in statuses and Status.FAIL not in statuses

    def worst(self, part: Part) -> Result | None:
        """The largest relative error that has a tolerance."""
        held = (r for r in self.results if r.part is part and r.tolerance)
        return max(held, key=lambda r: r.error or 0.0, default=None)

    def count(self, status: Status) -> int:
        """Number of results with a status."""
        return sum(r.status is status for r in self.results)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "directory": str(self.directory),
            "dtype": self.dtype,
            "ok": self.ok,
            "counts": {s.value: self.count(s) for s in Status},
            "results": [r.as_json() for r in self.results],
        }


def check_golden(
    directory: Path, dtype: DTypeName = "float32", device: torch.device = CPU
) -> Report:
    """Compare the adapter on a device with `golden-{dtype}.safetensors` of a golden directory.

    Raises `GoldenError`, `ConfigError` or `CheckpointError` for a directory that can't be used.
    """
    vectors = Vectors(directory, dtype)
    model = Model.load(directory, getattr(torch, dtype), device=device)
    comparison = Comparison(model, vectors, TOLERANCES[dtype])
    results = [r for group in GROUPS for r in group(comparison)]
    if any(may_excuse(r) for r in results):
        results = excused(comparison, results, GROUPS)
    results += [not_covered(key) for key in sorted(vectors.keys - vectors.used)]
    return Report(directory, dtype, tuple(results))
