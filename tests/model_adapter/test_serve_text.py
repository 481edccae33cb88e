"""Tokens to text as they come, and where a stop string ends it."""

import random

import pytest
from serving import tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from model_adapter.serve.text import AnswerText, StopScanner
from model_adapter.tokenizer import decode_answer

EOS = 1


def scan(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    text = "".join(map(scanner.feed, pieces)) + scanner.finish()
    return text, scanner.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", False)),
        (["x"], "abc", ("abc", False)),
        (["bc"], "abcd", ("a", True)),
        (["cd", "b"], "abcd", ("a", True)),
        (["aab"], "aaaabc", ("aa", True)),
        (["abc"], "ab", ("ab", False)),
        (["\n\n"], "one\ntwo\n\nthree", ("one\ntwo", True)),
        (["bcdx", "cd"], "abcde", ("ab", True)),
        (["a"], "abc", ("", True)),
    ],
)
def test_stops_wherever_the_pieces_end(size, stops, text, expected):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert scan(stops, pieces) == expected


def test_shows_at_once_what_can_be_no_stop_string():
    scanner = StopScanner(["stop"])
    assert [scanner.feed(p) for p in ("a st", "art st", "op")] == ["a ", "start ", ""]
    assert scanner.feed("more") == scanner.finish() == ""


def spell(ids: list[int], stops=()) -> tuple[str, bool]:
    text = AnswerText(tokenizer(), stops, (EOS,))
    return "".join(map(text.feed, ids)) + text.finish(), text.stopped


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_text_of_all_tokens(seed):
    rng = random.Random(seed)
    any_token = [rng.randrange(2, 512) for _ in range(60)]
    single_bytes = [tokenizer().token_to_id(c) for c in ByteLevel.alphabet()]
    broken = [rng.choice(single_bytes) for _ in range(60)]
    letters = tokenizer().encode("Grüße, 世界 \U0001f40d" * 3).ids[: rng.randrange(1, 60)]
    for ids in (any_token, broken, letters):
        assert spell(ids) == (decode_answer(tokenizer(), ids), False)


def test_pieces_hold_whole_characters():
    ids = tokenizer().encode("\U0001f40d!").ids
    text = AnswerText(tokenizer(), (), ())
    pieces = [text.feed(i) for i in ids]
    assert len(ids) > 2
    assert [p for p in pieces if p] == ["\U0001f40d", "!"]


def test_the_end_token_has_no_text_and_stop_strings_are_found_in_it():
    ids = tokenizer().encode("one two three").ids
    assert spell([*ids, EOS]) == ("one two three", False)
    assert spell(ids, ["o th"]) == ("one tw", True)
