"""Single-pass manifold-constrained hyper-connections (ds41f §2 Streams, report §2.4.1).

Every position carries n residual streams. A site (attention or FFN) sees one mixture of them, whose
coefficients `pre_mix` the site *before* it computed, and spreads its output back while a doubly
stochastic matrix mixes the streams.
"""

from dataclasses import dataclass

import torch

from model_adapter.norms import rstd
from model_adapter.weights import Weights


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
        mixed = flat @ self._vector("fn").T * rstd(flat, self._norm_eps)
        scale = self._vector("scale").repeat_interleave(
            torch.tensor([n, n, n * n]), output_size=2 * n + n * n
        )
        z = torch.addcmul(self._vector("base"), mixed, scale)
        return Coefficients(
            pre=z[:, :n].sigmoid() + eps,
            post=2 * z[:, n : 2 * n].sigmoid(),
            comb=sinkhorn(z[:, 2 * n :].unflatten(1, (n, n)), self._iterations, eps),
        )

    def _vector(self, name: str) -> torch.Tensor:
        return self._weights.vector(f"{self._prefix}_{name}")


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """float32 [T, n, n] to nearly doubly stochastic [T, n, n].

    Positions go last meanwhile: sums over n run along whole rows of positions then.
    """
    m = logits.permute(1, 2, 0).contiguous().softmax(1).add_(eps)
    m.div_(m.sum(0, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        m.div_(m.sum(1, keepdim=True).add_(eps))
        m.div_(m.sum(0, keepdim=True).add_(eps))
    return m.permute(2, 0, 1)


def collapse(streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """Σ_i pre_mix[i]·X[i]: streams [T, n, H], pre_mix float32 [T, n] to [T, H] in X's dtype."""
    return torch.bmm(pre_mix.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def spread(streams: torch.Tensor, output: torch.Tensor, c: Coefficients) -> torch.Tensor:
    """post[j]·y + Σ_i comb[i,j]·X[i]: the streams [T, n, H] behind a site with output [T, H]."""
    added = c.post.unsqueeze(2) * output.float().unsqueeze(1)
    return torch.baddbmm(added, c.comb.transpose(1, 2), streams.float()).to(streams.dtype)
