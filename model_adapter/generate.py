"""Greedy decoding."""

from collections.abc import Collection, Generator

import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding import SamplingParams, generate
from model_adapter.model import Model


def greedy(
    model: Model,
    cache: SequenceCache,
    logits: torch.Tensor,
    max_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generator[int, None, None]:
    """The likeliest tokens; see `decoding.generate`."""
    return generate(model, cache, logits, SamplingParams(max_tokens), stop_ids)
