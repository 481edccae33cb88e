"""The byte-level tokenizer: loses nothing, knows the chat format, extends with its prompt."""

from itertools import pairwise

import pytest
import tiny_checkpoint as tiny

from model_adapter.chat import render_chat
from model_adapter.demo.conversations import load_conversations, training_texts
from model_adapter.errors import CheckpointError
from model_adapter.tokenizer import (
    FIRST_TOKENS,
    LAST_TOKENS,
    VOCAB_MIN,
    decode_answer,
    encode_prompt,
    load_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny.checkpoint())


@pytest.mark.parametrize(
    "text", ["", "plain", "Grüße, 世界 \U0001f40d", "\x00\x01\t\r\n", "<think>x</think>"]
)
def test_text_comes_back_unchanged(tokenizer, text):
    ids = encode_prompt(tokenizer, text)
    assert decode_answer(tokenizer, ids) == FIRST_TOKENS[0] + text


def test_special_tokens_have_their_ids(tokenizer):
    assert tokenizer.get_vocab_size() == 512
    for i, token in enumerate(FIRST_TOKENS):
        assert encode_prompt(tokenizer, FIRST_TOKENS[0] + token)[1:] == [i]
    assert [tokenizer.token_to_id(t) for t in LAST_TOKENS] == [510, 511]


def test_bos_is_put_in_front_once(tokenizer):
    assert encode_prompt(tokenizer, "a") == encode_prompt(tokenizer, FIRST_TOKENS[0] + "a")


def test_a_growing_conversation_is_a_growing_prompt(tokenizer):
    for conversation in load_conversations():
        prompts = [encode_prompt(tokenizer, render_chat(p).text) for p in conversation.prompts]
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before


def test_sessions_share_their_system_prompt(tokenizer):
    texts = [render_chat(c.prompts[0]).text for c in load_conversations()]
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    system = encode_prompt(tokenizer, texts[0].partition("<｜User｜>")[0])
    assert all(p[: len(system)] == system for p in prompts)
    assert len(system) > 1000


def test_training_is_repeatable_and_fills_the_vocabulary():
    texts = list(training_texts())
    first, second = (train_tokenizer(texts, 600).to_str() for _ in range(2))
    assert first == second
    starved = train_tokenizer(["ab"], 400)
    assert starved.get_vocab_size() == 400
    assert starved.token_to_id(LAST_TOKENS[-1]) == 399


def test_refuses_a_vocabulary_without_room_for_the_bytes():
    with pytest.raises(ValueError, match=f"needs {VOCAB_MIN} entries, not 200"):
        train_tokenizer([], 200)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)
