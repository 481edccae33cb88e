"""Completions by the official client."""

import openai
import pytest
import tiny_checkpoint as tiny
from serving import NAME, chatting, tokenizer

from model_adapter.tokenizer import decode_answer, encode_prompt

TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def api():
    with chatting() as api:
        yield api


def ask(api, prompt=TEXT, **options):
    return api.completions.create(model=NAME, prompt=prompt, **({"temperature": 0} | options))


def test_text_is_that_of_the_model_alone(api):
    expected = tiny.plain(encode_prompt(tokenizer(), TEXT), 16)
    answer = ask(api)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == decode_answer(tokenizer(), expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_adds_up_to_it(api):
    *chunks, last = ask(api, stream=True, stream_options={"include_usage": True})
    whole = ask(api)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage == whole.usage


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p]])
def test_token_ids_are_taken_as_they_are(api, wrap):
    ids = encode_prompt(tokenizer(), TEXT)
    assert ask(api, wrap(ids)).choices[0].text == ask(api, wrap(TEXT)).choices[0].text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        (["a", "b"], "2 prompts; send one per request"),
        ([5, 512], "token id 512 is outside the vocabulary of 512"),
        ([5, -1], "token id -1 is outside"),
        ([5, 511], "1 image placeholders for 0 images"),
        ([5] * 16384, "this model has 16384 positions; the prompt has 16384 tokens and 16 are"),
    ],
)
def test_prompts_that_can_not_be_right(api, prompt, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(api, prompt)
