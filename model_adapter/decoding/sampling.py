"""Choosing a token from logits.

A request's randomness is a function of its seed and of how many tokens were drawn before, not a
stream that is used up: the n-th token of a request comes out the same whether it was decoded alone,
in a batch, verified as a draft, or on another node that took the request over.
"""

import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from model_adapter.config import ModelConfig
from model_adapter.errors import InputError

_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks for.

    `max_tokens`: at most so many tokens. `temperature`: 0 takes the likeliest token. `top_p`: only
    the likeliest tokens that together reach this share. `seed`: any integer; None draws one.
    `banned_ids`: never generated, beside those that the model never generates.

    Raises `InputError` for a value outside its range.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    banned_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature {self.temperature} must be a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} must be above 0 and at most 1")


def never_generated(config: ModelConfig) -> frozenset[int]:
    """Ids that stand for no text: the image token and DSpark's placeholder."""
    noise = None if config.dspark is None else config.dspark.noise_token
    return frozenset(i for i in (config.image_token, noise) if i is not None)


class Sampler:
    """One request's choice of tokens; it keeps no state. `seed`: the one in use, below 2⁶⁴."""

    def __init__(self, params: SamplingParams, never: Collection[int] = ()) -> None:
        self.params = params
        self.banned = frozenset(never) | params.banned_ids
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self.seed = seed % (1 << _SEED_BITS)
        self._banned = torch.tensor(sorted(self.banned), dtype=torch.int64)

    def token(self, logits: torch.Tensor, index: int) -> int:
        """The request's token number `index`, counted from 0, from logits float32 [vocab].

        Equal logits: the lower id first. Drawn on the host, so that no device draws another.
        """
        allowed = logits.cpu().index_fill(0, self._banned, -torch.inf)
        if self.params.temperature == 0:
            return int(allowed.argmax())
        scaled = (allowed.double() - allowed.max()) / self.params.temperature
        odds, order = scaled.softmax(0).sort(descending=True, stable=True)
        reached = odds.cumsum(0)
        kept = int((reached - odds < self.params.top_p).sum())
        point = self._uniform(index) * reached[kept - 1]
        # Rounding may put the point on the very end of the last token's share.
        chosen = min(int(torch.searchsorted(reached[:kept], point, right=True)), kept - 1)
        return int(order[chosen])

    def _uniform(self, index: int) -> float:
        """In [0, 1). Philox is counter-based: any number of the sequence can be had at once."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=index)).random()
