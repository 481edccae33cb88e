"""One model's draft layers. Like the model, they keep no state of a sequence."""

from collections.abc import Collection

import numpy as np
import torch

from model_adapter import records
from model_adapter.block import Block
from model_adapter.config import DSparkConfig, RopeSpec
from model_adapter.dspark.heads import Draft, DraftHeads
from model_adapter.dspark.layers import DraftAttention, DraftPass
from model_adapter.dspark.windows import DraftWindows
from model_adapter.errors import InputError
from model_adapter.few_rows import linear
from model_adapter.forward_pass import Observer
from model_adapter.hyper_connections import collapse
from model_adapter.model import Model
from model_adapter.norms import rms_norm
from model_adapter.rope import frequencies, rotations


class Drafter:
    """The draft layers of `model`; their weights are those of its checkpoint.

    Raises `InputError` for a model without any.
    """

    def __init__(self, model: Model) -> None:
        config, weights = model.config, model.weights
        self.model = model
        self.config = _config(model)
        self._heads = DraftHeads(config, weights)
        self._attentions = [
            DraftAttention(config, spec, number, weights)
            for number, spec in enumerate(config.draft_specs)
        ]
        self._blocks = [
            Block(config, spec, weights, None, attention)
            for spec, attention in zip(config.draft_specs, self._attentions, strict=True)
        ]
        plain = frequencies(RopeSpec(config.window_theta), config.rope_dim)
        self._frequencies = plain.to(model.device)

    def extend(self, windows: DraftWindows, features: torch.Tensor) -> None:
        """Add the window records of the next positions, from their features [T, targets·H]."""
        values = self.window_values(features, windows.end)
        for kv, rows in zip(values, windows.layers, strict=True):
            rows.append(records.pack(records.WINDOW, kv))

    def window_values(self, features: torch.Tensor, first: int) -> list[torch.Tensor]:
        """Window KV [T, D] of every draft layer before it is packed, of the positions from `first`
        on.

        Every draft layer projects the same normed features, without a norm of its own.
        """
        prefix = self.model.config.draft_specs[0].prefix
        weights = self.model.weights
        shared = linear(features, weights.matrix(f"{prefix}.main_proj"))
        norm = weights.vector(f"{prefix}.main_norm.weight")
        shared = rms_norm(shared, norm, self.model.config.norm_eps)
        positions = torch.arange(first, first + len(features), device=features.device)
        rotation = rotations(positions, self._frequencies)
        return [attention.window_kv(shared, rotation) for attention in self._attentions]

    @torch.inference_mode()
    def draft(
        self,
        windows: DraftWindows,
        anchor: int,
        banned: Collection[int] = (),
        observer: Observer | None = None,
    ) -> Draft:
        """Guesses behind `anchor`, the token just sampled for position `windows.end`."""
        block = np.full(self.config.block_size, self.config.noise_token, np.int32)
        block[0] = anchor
        work = DraftPass(self.model.config, windows, len(block), self._frequencies, observer)
        state = self.model.embed(block)
        for layer in self._blocks:
            state = layer.forward(*state, work)
        return self._heads.draft(collapse(*state), anchor, banned)


def _config(model: Model) -> DSparkConfig:
    if model.config.dspark is None:
        raise InputError("this checkpoint has no draft layers (num_nextn_predict_layers is 0)")
    return model.config.dspark
