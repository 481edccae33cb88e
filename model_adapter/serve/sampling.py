"""How a request's tokens are chosen."""

from collections.abc import Collection, Generator
from dataclasses import dataclass

import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding import SamplingParams, generate
from model_adapter.dspark import Drafter, SequenceDrafts
from model_adapter.model import Model
from model_adapter.session import Decode


@dataclass(frozen=True, slots=True)
class Choice:
    """One request's way of choosing. `drafts`: those that `decode` uses."""

    decode: Decode
    drafts: SequenceDrafts | None = None


@dataclass(frozen=True, slots=True)
class Choosing:
    """Makes the `Choice` of each request. `drafter`: speculates, which changes no token."""

    drafter: Drafter | None = None

    def __call__(self, temperature: float, top_p: float, seed: int | None) -> Choice:
        """Temperature 0 takes the likeliest token; without a seed every answer is drawn anew."""
        drafts = None if self.drafter is None else SequenceDrafts(self.drafter)

        def decode(
            model: Model,
            cache: SequenceCache,
            logits: torch.Tensor,
            max_tokens: int,
            stop_ids: Collection[int],
        ) -> Generator[int, None, None]:
            params = SamplingParams(max_tokens, temperature, top_p, seed)
            yield from generate(model, cache, logits, params, stop_ids, drafts)

        return Choice(decode, drafts)
