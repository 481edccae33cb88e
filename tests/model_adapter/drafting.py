"""Sources of guesses for tests, over real draft layers."""

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding import SamplingParams, generate
from model_adapter.dspark import Drafter, SequenceDrafts
from model_adapter.model import Model
from model_adapter.replay import Mode


@cache
def drafter(model: Model) -> Drafter:
    return Drafter(model)


class Coached(SequenceDrafts):
    """DSpark's guesses, some replaced by the tokens that plain decoding gives."""

    def __init__(
        self, drafter: Drafter, answer: Sequence[int], share: float, seed: int, most: int = 7
    ) -> None:
        super().__init__(drafter, verify_threshold=0.0)
        self._answer = list(answer)
        self._share = share
        self._rng = np.random.default_rng(seed)
        self._most = most
        self._first: int | None = None
        self.proposed: list[tuple[int, ...]] = []

    def propose(self, token: int, limit: int, banned: Collection[int]) -> tuple[int, ...]:
        if self._first is None:
            self._first = self.windows.end
        guesses = list(super().propose(token, limit, banned))
        known = self._answer[self.windows.end - self._first + 1 :]
        for i, right in enumerate(known[: min(limit, self._most)]):
            if self._rng.random() < self._share:
                guesses[i : i + 1] = [right]
            elif i >= len(guesses):
                break
        self.proposed.append(tuple(guesses))
        return self.proposed[-1]


def plain_answer(
    model: Model, prompt: Sequence[int], params: SamplingParams, stop_ids: Collection[int] = ()
) -> tuple[list[int], SequenceCache]:
    """Tokens and cache of decoding without drafts."""
    cache = model.new_cache()
    logits = model.prefill(cache, prompt)
    return list(generate(model, cache, logits, params, stop_ids)), cache


def prompt_tokens(seed: int, longest: int = 80) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(5, 500, int(rng.integers(1, longest)))


def prefilled(
    model: Model, prompt, drafts: SequenceDrafts, mode: Mode = "bounded"
) -> tuple[SequenceCache, torch.Tensor]:
    cache = model.new_cache()
    return cache, model.prefill(cache, prompt, mode, observer=drafts.observer)
