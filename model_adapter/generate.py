"""Greedy decoding."""

from collections.abc import Collection, Generator

import torch

from model_adapter.cache import SequenceCache
from model_adapter.model import Model


def greedy(
    model: Model,
    cache: SequenceCache,
    logits: torch.Tensor,
    max_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generator[int, None, None]:
    """Yield up to `max_tokens` tokens, the last one of `stop_ids` where one comes.

    `logits`: of the last position in `cache`, fp32 `[vocab]`. Equal logits: the lower id. A token
    is computed when it is asked for, and enters the cache when the one behind it is; so the last
    one yielded is not in it. The image token is never chosen: it stands for pixels.
    """
    image_token = model.config.image_token
    for produced in range(1, max_tokens + 1):
        if image_token is not None:
            logits[image_token] = -torch.inf
        token = int(logits.argmax())
        yield token
        if token in stop_ids or produced == max_tokens:
            return
        logits = model.decode(cache, token)
