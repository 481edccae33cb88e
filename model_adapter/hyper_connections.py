"""Single-pass manifold-constrained hyper-connections (ds41f §2 Streams, report §2.4.1).

Every position carries n residual streams. A site (attention or FFN) sees one mixture of them, whose
coefficients `pre_mix` the site *before* it computed, and spreads its output back while a doubly
stochastic matrix mixes the streams.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from model_adapter.few_rows import by_row, linear
from model_adapter.norms import rstd
from model_adapter.weights import Weights

SPREAD_ELEMENTS_MAX = 1 << 20
"""Bounds the products held at once: positions × n × n × H."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one site computes from the streams, float32.

    `pre` [T, n]: the next site's mixture. `post` [T, n]: weight of the output per stream. `comb`
    [T, n, n]: from stream (axis 1) to stream (axis 2).
    """

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class StreamSite:
    """One of a block's two sites. `prefix`: `layers.{i}.hc_attn` or `layers.{i}.hc_ffn`."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        streams: int,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> None:
        self._weights = weights
        self._prefix = prefix
        self._n = streams
        self._iterations = iterations
        self._eps = eps
        self._norm_eps = norm_eps

    def coefficients(self, streams: torch.Tensor) -> Coefficients:
        """From streams [T, n, H]."""
        n, eps = self._n, self._eps
        flat = streams.flatten(1).float()
        mixed = linear(flat, self._vector("fn")) * rstd(flat, self._norm_eps)
        z = torch.addcmul(self._vector("base"), mixed, self._scale)
        return Coefficients(
            pre=z[:, :n].sigmoid() + eps,
            post=2 * z[:, n : 2 * n].sigmoid(),
            comb=sinkhorn(z[:, 2 * n :].unflatten(1, (n, n)), self._iterations, eps),
        )

    @cached_property
    def _scale(self) -> torch.Tensor:
        """One factor per coefficient, from the three on disk."""
        n = self._n
        return torch.cat(
            [
                part.expand(count)
                for part, count in zip(self._vector("scale").split(1), (n, n, n * n), strict=True)
            ]
        )

    def _vector(self, name: str) -> torch.Tensor:
        return self._weights.vector(f"{self._prefix}_{name}")


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """float32 [T, n, n] to nearly doubly stochastic [T, n, n].

    Positions go last meanwhile, so that sums over n run along whole rows of positions. The loop is
    a hundred tiny operations, half of a decode step at torch's cost per call; on the CPU NumPy
    gives the same bits for a third of it.
    """
    last = logits.softmax(2).permute(1, 2, 0).contiguous().add_(eps)
    if last.device.type != "cpu":
        for axis in _axes(iterations):
            last.div_(last.sum(axis, keepdim=True).add_(eps))
        return last.permute(2, 0, 1)
    matrix = last.numpy()
    addend = np.float32(eps)
    sums = [np.empty_like(matrix[:1]), np.empty_like(matrix[:, :1])]
    for axis in _axes(iterations):
        np.add.reduce(matrix, axis=axis, keepdims=True, out=sums[axis])
        sums[axis] += addend
        np.divide(matrix, sums[axis], out=matrix)
    return last.permute(2, 0, 1)


def _axes(iterations: int) -> list[int]:
    return [0] + [1, 0] * (iterations - 1)


def collapse(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """Σ_i pre_mix[i]·X[i]: streams [T, n, H], pre_mix float32 [T, n] to [T, H] in X's dtype."""
    mixed = by_row(torch.bmm, pre_mix.unsqueeze(1), streams.float())
    return mixed.squeeze(1).to(streams.dtype)


def spread(streams: torch.Tensor, output: torch.Tensor, c: Coefficients) -> torch.Tensor:
    """post[j]·y + Σ_i comb[i,j]·X[i]: the streams [T, n, H] behind a site with output [T, H].

    Products are rounded before they are summed in order: a fused product sum, which a matrix
    product would be, moves values across the rounding midpoints of the quantisers further on.
    """
    count, n, hidden = streams.shape
    step = max(1, SPREAD_ELEMENTS_MAX // (n * n * hidden))
    out = torch.empty_like(streams)
    for at in range(0, count, step):
        rows = slice(at, at + step)
        mixed = (c.comb[rows].unsqueeze(3) * streams[rows].float().unsqueeze(2)).sum(1)
        out[rows] = mixed.add_(c.post[rows].unsqueeze(2) * output[rows].float().unsqueeze(1))
    return out
