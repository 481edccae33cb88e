"""Decoding one sequence, token by token as its reader asks for them."""

from collections.abc import Collection, Generator

import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding.sampling import Sampler, SamplingParams, never_generated
from model_adapter.decoding.speculative import Drafts, SpeculationStats, speculate
from model_adapter.model import Model


def generate(
    model: Model,
    cache: SequenceCache,
    logits: torch.Tensor,
    params: SamplingParams,
    stop_ids: Collection[int] = (),
    drafts: Drafts | None = None,
    *,
    drawn: int = 0,
    stats: SpeculationStats | None = None,
) -> Generator[int, None, None]:
    """Yield up to `params.max_tokens` tokens, the last one of `stop_ids` where one comes.

    `logits`: of the last position in `cache`, float32 [vocab]. `drafts`: guesses to verify instead
    of decoding token by token (the tokens are the same); `stats` counts how that went. `drawn`:
    tokens of this request that were drawn before, elsewhere.

    The last token yielded is not in the cache. With drafts the cache may hold tokens that are still
    to be yielded, never one that was not accepted; closing the generator takes them out again.
    """
    sampler = Sampler(params, never_generated(model.config))
    if drafts is not None:
        yield from speculate(
            model, cache, logits, sampler, stop_ids, drafts, drawn, stats or SpeculationStats()
        )
        return
    for index in range(drawn, drawn + params.max_tokens):
        token = sampler.token(logits, index)
        yield token
        if token in stop_ids or index == drawn + params.max_tokens - 1:
            return
        logits = model.decode(cache, token)
