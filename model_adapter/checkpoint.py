"""The released checkpoint layout (ds41f §3): memory-mapped safetensors shards, read lazily.

Opening maps the shards and reads their headers only. `Checkpoint.tensor` returns a view into the
mapping, so that the kernel reads the pages that are used and may drop them again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model_adapter.checkpoint_header import diagnose
from model_adapter.errors import ShardError, TensorError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """Tensors by name, from the shards of one directory.

    Raises `ShardError` or `TensorError` where a file is missing, truncated or not safetensors, or
    where the index and the shards disagree.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for shard, expected in self._read_index().items():
            handle = self._open(shard, expected)
            held = set(handle.keys())
            if lost := sorted(expected - held):
                raise TensorError(
                    f"{INDEX_FILE} places {lost[0]} (and {len(lost) - 1} more) in {shard}, which "
                    f"does not hold it: the index belongs to another checkpoint, or {shard} does"
                )
            self._shards[shard] = handle
            self._shard_of.update(dict.fromkeys(expected or held, shard))

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def names(self) -> list[str]:
        """Names of all tensors, scales included."""
        return list(self._shard_of)

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self.directory / self._shard_of[name])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it lies on disk, mapped, not copied.

        Raises `TensorError` where the checkpoint has no such tensor.
        """
        try:
            return self._shards[self._shard_of[name]].get_tensor(name)
        except KeyError:
            raise TensorError(f"{self.directory} holds no tensor {name}") from None
        except (SafetensorError, OSError, RuntimeError) as e:
            raise TensorError(f"{name} in {self.where(name)} can't be read: {e}") from e

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape on disk and safetensors dtype name (`F8_E4M3`, `BF16`…), without touching data."""
        part = self._shards[self._shard_of[name]].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def _read_index(self) -> dict[str, set[str]]:
        """Shard → names expected in it (an empty set where no index says so)."""
        index = self.directory / INDEX_FILE
        if not index.is_file():
            if (self.directory / SINGLE_FILE).is_file():
                return {SINGLE_FILE: set()}
            raise ShardError(f"{index} is missing, and so is {SINGLE_FILE}: not a checkpoint")
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards: dict[str, set[str]] = {}
            for name, shard in weight_map.items():
                shards.setdefault(shard, set()).add(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ShardError(f"{index} is no safetensors index ({e!r}); fetch it again") from e
        return shards

    def _open(self, shard: str, expected: set[str]) -> Any:
        path = self.directory / shard
        if not path.is_file():
            raise ShardError(
                f"shard {path} is missing; {INDEX_FILE} places {min(expected)} (and "
                f"{len(expected) - 1} more) in it, so fetch it"
            )
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as e:
            raise diagnose(path, e) from e
