"""Pictures in chat messages, by the official client."""

import base64

import openai
import pytest
import tiny_checkpoint as tiny
from image_prompts import picture
from serving import NAME, chatting, tokenizer
from tiny_checkpoint import BLOCK_TOKENS

from model_adapter.chat.tokens import BOS, USER

SPAN_TOKENS = 51
TEXT = "What is in this picture? " * 6


def data_url(seed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"


def asked(api, *urls: str, text: str = TEXT):
    parts = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts += [{"type": "text", "text": "Say it in few words. " * 3}]
    return api.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": parts}],
        max_tokens=4,
        temperature=0,
    )


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def api():
    with chatting() as api:
        yield api


def test_a_picture_is_its_span_of_tokens(api):
    # a gap stands on both sides of a part
    gap = asked(api, data_url(1)).usage.prompt_tokens - asked(api).usage.prompt_tokens - SPAN_TOKENS
    two = asked(api, data_url(1), data_url(2)).usage.prompt_tokens
    assert two - asked(api).usage.prompt_tokens == 2 * (SPAN_TOKENS + gap)
    assert 0 < gap <= 2


def test_base64_without_its_url_is_taken_too(api):
    bare = base64.b64encode(picture(1)).decode()
    assert asked(api, bare).choices == asked(api, data_url(1)).choices


def test_the_same_picture_hits_and_another_does_not(tmp_path):
    with tiny.store(tmp_path) as client, chatting(client) as api:
        cold, warm, other = (asked(api, data_url(seed)) for seed in (1, 1, 2))
        text = asked(api)
    tokens = cold.usage.prompt_tokens
    assert cached(cold) == 0
    assert cached(warm) == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    # the text before the picture is shared, in whole blocks, with any picture or none
    start = len(tokenizer().encode(BOS + USER + TEXT).ids)
    assert cached(other) == cached(text) == start // BLOCK_TOKENS * BLOCK_TOKENS > 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/x.png", r"content\[1\]: images are not fetched; send a data"),
        ("data:image/png;base64,AAAA", r"content\[1\]: 3 bytes are no picture of PNG"),
        ("data:image/png;base64,?", r"content\[1\]: the data URL is not base64"),
        ("data:image/png,AAAA", r"content\[1\]: an image URL must be data:image"),
    ],
)
def test_pictures_that_can_not_be_read(api, url, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        asked(api, url)
    assert caught.value.param == "messages[0].content[1]"


def test_a_placeholder_that_is_written_out_is_refused(api):
    with pytest.raises(openai.BadRequestError, match="1 image placeholders for 0 images"):
        asked(api, text="<｜deepseek_image｜>")


def test_too_many_pictures_are_refused(api):
    with pytest.raises(openai.BadRequestError, match="65 images; 64 at most in one request"):
        asked(api, *[data_url(1)] * 65)
