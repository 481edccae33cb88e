"""The backbone's features for drafts, collected while it runs (ds41f §2 DSpark)."""

import torch

from model_adapter.config import DSparkConfig


class FeatureTap:
    """An observer of the model's passes that keeps the features of the last positions.

    A position's features: the mean over its streams at the attention site, behind Engram, of every
    target layer, concatenated. No more than the last `keep` positions are held.
    """

    def __init__(self, config: DSparkConfig, keep: int) -> None:
        self._keep = keep
        self._seen: dict[int, torch.Tensor] = {}
        self._targets = config.target_layers

    def __call__(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        """See `forward_pass.Observer`."""
        if stage != "attention_streams" or layer not in self._targets:
            return
        mean = tensor.float().mean(1).to(tensor.dtype)
        before = self._seen.get(layer)
        rows = mean if before is None else torch.cat([before, mean])
        self._seen[layer] = rows[-self._keep :]

    def take(self) -> torch.Tensor | None:
        """Features [T, targets·H] of the last T positions that went through every target layer
        since the last call; None where there are none."""
        seen, self._seen = self._seen, {}
        if len(seen) < len(self._targets):
            return None
        # In a bounded prefill fewer positions reach the decoder's layers than the encoder's.
        count = min(len(rows) for rows in seen.values())
        return torch.cat([seen[layer][-count:] for layer in self._targets], dim=1)
