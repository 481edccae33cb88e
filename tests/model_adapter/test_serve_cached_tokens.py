"""What the endpoint says of the store: cached tokens that grow turn by turn, and a lost store."""

import pytest
import tiny_checkpoint as tiny
from serving import NAME, chatting
from tiny_checkpoint import BLOCK_TOKENS

from model_adapter.demo.conversations import training_texts

TEXTS = [text[:300] for text in training_texts()]


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


def ask(api, messages, **options):
    options = {"max_tokens": 12, "temperature": 0} | options
    return api.chat.completions.create(model=NAME, messages=messages, **options)


def test_cached_tokens_grow_turn_by_turn(client):
    messages = [{"role": "system", "content": TEXTS[0]}]
    usages = []
    with chatting(client) as api:
        for turn in range(4):
            messages.append({"role": "user", "content": TEXTS[turn + 1]})
            answer = ask(api, messages)
            messages.append(answer.choices[0].message.to_dict())
            usages.append(answer.usage)
    cached = [u.prompt_tokens_details.cached_tokens for u in usages]
    assert cached[0] == 0
    for before, now, hit in zip(usages, usages[1:], cached[1:], strict=False):
        # the whole blocks of the last prompt, and perhaps of its answer
        least = before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        assert least <= hit < now.prompt_tokens
        assert hit % BLOCK_TOKENS == 0
    assert cached == sorted(set(cached))
