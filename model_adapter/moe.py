"""Mixture of experts (ds41f §2 MoE): routed FP4 experts by demand, and one shared expert."""

import torch
from torch.nn import functional

from model_adapter.config import LayerSpec, ModelConfig
from model_adapter.few_rows import by_row, linear
from model_adapter.weights import Weights

_SUM_EPS = 1e-20


class MoE:
    """The FFN of one layer."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Weights) -> None:
        self._prefix = f"{spec.prefix}.ffn"
        self._per_token = spec.experts_per_token
        self._route_scale = config.route_scale
        self._limit = config.swiglu_limit
        self._weights = weights

    def forward(self, x: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        """x [T, H], image_mask bool [T] or None where no position belongs to an image."""
        chosen, share = self.route(x, image_mask)
        routed = self._routed(x, chosen, share)
        return routed + self._expert(x, f"{self._prefix}.shared_experts", None)

    def route(
        self, x: torch.Tensor, image_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts chosen per position, [T, k], and their weights, float32 [T, k].

        A modality's bias decides who is chosen, not with what weight; equal scores: the lower
        expert first.
        """
        gate = self._weights.vector(f"{self._prefix}.gate.weight")
        scores = by_row(_affinity, linear(x.float(), gate))
        bias = self._weights.vector(f"{self._prefix}.gate.bias")
        if image_mask is not None:
            bias_vl = self._weights.vector(f"{self._prefix}.gate.bias_vl")
            bias = torch.where(image_mask.unsqueeze(1), bias_vl, bias)
        order = (scores + bias).sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : self._per_token]
        share = scores.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + _SUM_EPS) * self._route_scale
        return chosen, share

    def _routed(self, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Each expert once, over all positions that chose it."""
        out = x.new_zeros(x.shape, dtype=torch.float32)
        order = chosen.flatten().argsort(stable=True)
        positions = order.div(chosen.shape[1], rounding_mode="floor")
        factors = share.flatten()[order].unsqueeze(1)
        counts = torch.bincount(chosen.flatten()).cpu().tolist()
        at = 0
        for expert, count in enumerate(counts):
            if count:
                mine = positions[at : at + count]
                name = f"{self._prefix}.experts.{expert}"
                y = self._expert(x[mine], name, factors[at : at + count])
                out.index_add_(0, mine, y.float())
                at += count
        return out.to(x.dtype)

    def _expert(self, x: torch.Tensor, name: str, factor: torch.Tensor | None) -> torch.Tensor:
        """One SwiGLU over x [T, H]; `factor` float32 [T, 1] enters before w2."""
        w13, w2 = self._weights.stacked(
            name, f"{name}.w1", f"{name}.w3", f"{name}.w2", by_demand=factor is not None
        )
        gate, up = linear(x, w13).float().chunk(2, dim=1)
        hidden = by_row(functional.silu, gate.clamp(max=self._limit))
        hidden = hidden * up.clamp(-self._limit, self._limit)
        if factor is not None:
            hidden = hidden * factor
        return linear(hidden.to(x.dtype), w2)


def _affinity(logits: torch.Tensor) -> torch.Tensor:
    return functional.softplus(logits).sqrt()
