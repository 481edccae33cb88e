"""The compressor and the index keys of a Full layer (ds41f §2 Compressor, Index keys).

Turns the layer's normed input into the records that outlive the window: one entry per group of r
positions, and the key by which the indexer finds it.
"""

import torch

from model_adapter import records
from model_adapter.cache import SequenceCache
from model_adapter.config import LayerSpec, ModelConfig
from model_adapter.few_rows import by_row, linear
from model_adapter.forward_pass import ForwardPass
from model_adapter.norms import rms_norm
from model_adapter.rope import rotate_
from model_adapter.weights import Weights


class Compressor:
    """Appends global rows to the caches of the spans that it is given."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Weights) -> None:
        self._layer = spec.index
        self._ratio = spec.ratio
        self._eps = config.norm_eps
        self._prefix = f"{spec.prefix}.attn"
        self._weights = weights

    def append(self, x: torch.Tensor, work: ForwardPass) -> None:
        """x [T, H]: the normed input of the layer at the pass's positions.

        Positions before a span's `write_from` have their rows already and are left out.
        """
        for span in work.spans:
            fresh = x[span.rows][max(span.write_from - span.start, 0) :]
            if len(fresh):
                self._append_span(fresh, span.cache, work)

    def _append_span(self, x: torch.Tensor, cache: SequenceCache, work: ForwardPass) -> None:
        latent = self._latents(x, cache)
        if not len(latent):
            return
        first = len(cache.main(self._layer))
        numbers = torch.arange(first, first + len(latent), device=latent.device)
        positions = numbers * self._ratio
        rotation = work.compressed_rotations(positions)
        keys = rms_norm(
            linear(latent, self._weights.matrix(f"{self._prefix}.indexer.wk")),
            self._weights.vector(f"{self._prefix}.indexer.k_norm.weight"),
            self._eps,
        )
        cache.index(self._layer).append(records.pack(records.INDEX, rotate_(keys, rotation)))
        cache.main(self._layer).append(records.pack(records.MAIN, rotate_(latent, rotation)))

    def _latents(self, x: torch.Tensor, cache: SequenceCache) -> torch.Tensor:
        """Entries that are complete now, normed, before RoPE: [groups, D]."""
        name = f"{self._prefix}.compressor"
        if self._ratio == 1:
            mixed = linear(x, self._weights.matrix(f"{name}.wkv"))
        else:
            wide = x.float()
            v = linear(wide, self._weights.vector(f"{name}.wkv.weight"))
            s = linear(wide, self._weights.vector(f"{name}.wgate.weight"))
            groups = cache.open_groups[self._layer].complete(torch.cat([v, s], dim=1))
            mixed = by_row(_pooled, groups).to(x.dtype)
        return rms_norm(mixed, self._weights.vector(f"{name}.norm.weight"), self._eps)


def _pooled(groups: torch.Tensor) -> torch.Tensor:
    """Values and scores [groups, ratio, 2·D] to each group's weighted sum [groups, D]."""
    v, s = groups.chunk(2, dim=2)
    return (v * s.softmax(dim=1)).sum(dim=1)
