"""How tokens are chosen: temperature, top-p and seed."""

from collections.abc import Collection, Iterator

import torch

from model_adapter.cache import SequenceCache
from model_adapter.generate import greedy
from model_adapter.model import Model
from model_adapter.session.session import Decode


def draw(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token drawn from `logits` fp32 [vocab]: one uniform number per token, whatever the logits.

    Only the likeliest tokens count whose probabilities together reach `top_p`. Equal logits: the
    lower id comes first.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    ranked, ids = torch.sort(probabilities, descending=True, stable=True)
    sums = torch.cumsum(ranked, dim=0)
    kept = int((sums - ranked < top_p).sum())
    at = torch.rand(1, generator=generator, dtype=torch.float64) * sums[kept - 1]
    return int(ids[min(int(torch.searchsorted(sums, at, right=True)), kept - 1)])


def sampled(temperature: float, top_p: float, seed: int | None) -> Decode:
    """Choose by temperature and top-p; temperature 0 is greedy. Without a seed every answer is
    drawn anew."""
    if temperature == 0:
        return greedy

    def decode(
        model: Model,
        cache: SequenceCache,
        logits: torch.Tensor,
        max_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        image_token = model.config.image_token
        for produced in range(1, max_tokens + 1):
            if image_token is not None:
                logits[image_token] = -torch.inf
            token = draw(logits, temperature, top_p, generator)
            yield token
            if token in stop_ids or produced == max_tokens:
                return
            logits = model.decode(cache, token)

    return decode
