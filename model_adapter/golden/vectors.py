"""Reading a golden file, and knowing which of its keys were used."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model_adapter.errors import GoldenError


class Vectors:
    """The tensors of `golden-{dtype}.safetensors`, without their batch axis of one.

    `used` collects what was read. Raises `GoldenError` for a file that is missing or broken.
    """

    def __init__(self, directory: Path, dtype: str) -> None:
        self.path = directory / f"golden-{dtype}.safetensors"
        self.used: set[str] = set()
        if not self.path.is_file():
            raise GoldenError(f"{self.path} is missing: {directory} is no golden directory")
        try:
            self._file = safe_open(str(self.path), framework="pt")
        except (SafetensorError, OSError) as e:
            raise GoldenError(f"{self.path} can't be opened: {e}") from e
        self.keys = frozenset(self._file.keys())

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def get(self, key: str) -> torch.Tensor:
        """A tensor; raises `GoldenError` where the file lacks it."""
        if key not in self.keys:
            raise GoldenError(f"{self.path} lacks {key}")
        self.used.add(key)
        tensor: torch.Tensor = self._file.get_tensor(key)
        return tensor[0] if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor

    def runs(self) -> list[str]:
        """Names of the text runs with logits of every position: `short`, `mid`, …"""
        ids = {k.removesuffix(".input_ids") for k in self.keys if k.endswith(".input_ids")}
        return sorted(r for r in ids if f"{r}.logits" in self and not self._has_image(r))

    def matching(self, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Keys that match a whole pattern, in order of their numbers."""
        found = ((k, m) for k in self.keys if (m := re.fullmatch(pattern, k)))
        return iter(sorted(found, key=lambda pair: _natural(pair[0])))

    def _has_image(self, run: str) -> bool:
        return f"{run}.pixel_values" in self


def _natural(key: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
