"""What the layers of one forward pass share: positions, rotations, selections.

Rows of all sequences lie one behind the other in flat tensors [T, ...]; a `Span` says which belong
to whom. Everything but attention and the caches works on the flat rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from model_adapter.cache import SequenceCache
from model_adapter.config import ModelConfig
from model_adapter.rope import rotations

Observer = Callable[[str, int, torch.Tensor], None]
"""Called with a stage's name, the layer and the tensor, as the pass reaches it. Stages:
`streams_in` and `pre_mix_in` at a block's entry, `attention_streams` at its attention site behind
Engram, `window_kv` before it is packed, `selection` (entries, −1 behind the last) where a layer
selects, once per span."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions [start, stop) of one sequence in the rows `rows` of the pass.

    Global rows of positions before `write_from` are in the cache already and never written again.
    """

    cache: SequenceCache
    start: int
    stop: int
    rows: slice
    write_from: int = 0


@dataclass
class Selection:
    """What the latest indexer chose for one span.

    `entries`: int64 [T, k], ascending, −1 behind the last. `blocks`: the candidate source's choice
    of blocks, int64 [T, b], ascending, −1 behind the last; None where it leaves out nothing.
    """

    entries: torch.Tensor
    blocks: torch.Tensor | None = None


class ForwardPass:
    """One run of some layers over the positions of some spans.

    `write_global` is False where another pass has written the positions' global rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        spans: Sequence[Span],
        plain_frequencies: torch.Tensor,
        compressed_frequencies: torch.Tensor,
        observer: Observer | None = None,
        write_global: bool = True,
    ) -> None:
        self.spans = tuple(spans)
        self.write_global = write_global
        self.selections: list[Selection | None] = [None] * len(self.spans)
        self._config = config
        self._plain = plain_frequencies
        self._compressed = compressed_frequencies
        self._observer = observer

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]."""
        device = self._plain.device
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in self.spans])

    @cached_property
    def image_mask(self) -> torch.Tensor | None:
        """bool [T], True at image positions; None where there is none."""
        if self._config.image_token is None:
            return None
        ids = np.concatenate([s.cache.token_ids[s.start : s.stop] for s in self.spans])
        mask = ids == self._config.image_token
        return torch.from_numpy(mask).to(self._plain.device) if mask.any() else None

    @cached_property
    def _plain_rotations(self) -> torch.Tensor:
        return rotations(self.positions, self._plain)

    @cached_property
    def _compressed_rotations(self) -> torch.Tensor:
        return rotations(self.positions, self._compressed)

    def rotations(self, ratio: int) -> torch.Tensor:
        """Rotations at the pass's positions for a layer of that ratio: complex64 [T, pairs]."""
        return self._compressed_rotations if ratio else self._plain_rotations

    def compressed_rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations of layers with global KV at other positions."""
        return rotations(positions, self._compressed)

    def observe(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        """Show a tensor to whoever asked for it."""
        if self._observer is not None:
            self._observer(stage, layer, tensor)
