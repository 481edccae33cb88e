"""From the draft layers' output to tokens and confidences (ds41f §2 DSpark)."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.nn import functional

from model_adapter.config import ModelConfig
from model_adapter.norms import rms_norm
from model_adapter.weights import Weights


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for the positions behind the anchor token.

    `base_logits`, `logits` float32 [block, vocab]: without and with the Markov term. `confidences`
    float32 [block]: how likely each guess is to stand if the ones before it do.
    """

    tokens: tuple[int, ...]
    confidences: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor


class DraftHeads:
    """Norm, the backbone's head, the Markov head and the confidence head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._prefix = config.draft_specs[-1].prefix
        self._eps = config.norm_eps
        self._weights = weights

    def draft(self, hidden: torch.Tensor, anchor: int, banned: Collection[int]) -> Draft:
        """Greedy, left to right, from collapsed streams [block, H] behind the anchor token.

        `banned` tokens are never guessed. Equal logits: the lower id.
        """
        base = self._base_logits(hidden)
        never = torch.tensor(sorted(banned), dtype=torch.int64, device=base.device)
        tokens, confidences, logits = [], [], []
        before = anchor
        for k in range(len(hidden)):
            embedding = self._weights.rows(f"{self._prefix}.markov_head.embed", _index(before))
            confidences.append(self._confidence(hidden[k : k + 1], embedding))
            row = base[k] + self._markov_logits(embedding)
            logits.append(row)
            before = int(row.index_fill(0, never, -torch.inf).argmax())
            tokens.append(before)
        return Draft(tuple(tokens), torch.cat(confidences), base, torch.stack(logits))

    def _base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._weights.vector(f"{self._prefix}.norm.weight")
        normed = rms_norm(hidden, weight, self._eps)
        return functional.linear(normed.float(), self._weights.vector("head.weight"))

    def _markov_logits(self, embedding: torch.Tensor) -> torch.Tensor:
        head = self._weights.matrix(f"{self._prefix}.markov_head.head")
        return functional.linear(embedding, head)[0].float()

    def _confidence(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """float32 [1], from the output before its norm and the token before."""
        weight = self._weights.vector(f"{self._prefix}.confidence_head.proj.weight")
        both = torch.cat([hidden, embedding], dim=1).float()
        return functional.linear(both, weight)[0].sigmoid()


def _index(token: int) -> torch.Tensor:
    return torch.tensor([token])
