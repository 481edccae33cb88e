"""Greedy decoding by a scripted model."""

from types import SimpleNamespace

import pytest
import torch

from model_adapter.generate import greedy

IMAGE = 4
VOCAB = 6


class Scripted:
    """Prefers, at step k, the tokens of `script[k]`, best first."""

    config = SimpleNamespace(image_token=IMAGE, dspark=None)

    def __init__(self, *script: list[int]) -> None:
        self.script = list(script)
        self.fed: list[int] = []

    def logits(self) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        for rank, token in enumerate(self.script.pop(0)):
            logits[token] = 10.0 - rank
        return logits

    def decode(self, cache, token):
        self.fed.append(token)
        return self.logits()


def answer(model: Scripted, max_tokens: int, stop_ids=()) -> list[int]:
    return list(greedy(model, None, model.logits(), max_tokens, stop_ids))


def test_takes_the_best_and_feeds_all_but_the_last():
    model = Scripted([3], [1], [5])
    assert answer(model, 3) == [3, 1, 5]
    assert model.fed == [3, 1]


def test_stops_behind_a_stop_token():
    model = Scripted([3], [1], [5])
    assert answer(model, 3, {1}) == [3, 1]
    assert model.fed == [3]


def test_equal_logits_give_the_lower_id():
    assert answer(Scripted([]), 1) == [0]


@pytest.mark.parametrize("image_token", [IMAGE, None])
def test_the_image_token_is_never_chosen(image_token):
    model = Scripted([IMAGE, 2])
    model.config = SimpleNamespace(image_token=image_token, dspark=None)
    assert answer(model, 1) == [IMAGE if image_token is None else 2]
