"""Answers become messages again, whole or piece by piece, and never fail."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_adapter.chat import (
    Answer,
    AnswerParser,
    ChatOptions,
    ToolCall,
    parse_answer,
    render_chat,
)
from model_adapter.chat.dsml import read_calls, write_calls

CALL = '<｜DSML｜ invoke name="run">\n{}\n</｜DSML｜ invoke>'
STRING = '<｜DSML｜ parameter name="cmd" string="true">ls</｜DSML｜ parameter>'
BLOCK = "<｜DSML｜ calls>\n" + CALL.format(STRING) + "\n</｜DSML｜ calls>"
EOS = "<｜end▁of▁sentence｜>"

# Whatever JSON has, short of the tag letters that the format can't escape.
plain = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda s: "｜DSML｜" not in s)
keys = st.text(st.characters(codec="utf-8", exclude_characters='">'), max_size=10)
names = st.from_regex(r"[A-Za-z0-9_:.-]{1,12}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner | plain, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, names, st.dictionaries(keys, plain | json_values, max_size=4))
answer_text = plain.filter(lambda s: "</think>" not in s and EOS not in s)
marks = st.sampled_from(
    [
        "<think>", "</think>", EOS, "\n\n", "\n", " ", "<｜DSML｜ calls>", "</｜DSML｜ calls>",
        BLOCK, "\n\n" + BLOCK, STRING, '<｜DSML｜ invoke name="f">', "</｜DSML｜ invoke>",
        '<｜DSML｜ parameter name="n" string="false">', "</｜DSML｜ parameter>", "{", "1", "text",
    ]
)  # fmt: skip


def in_pieces(text: str, cuts: list[int], thinking: bool) -> Answer:
    parser = AnswerParser(thinking=thinking)
    edges = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    deltas = [parser.feed(text[a:b]) for a, b in pairwise(edges)]
    deltas.append(parser.finish())
    return Answer(
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        tuple(call for d in deltas for call in d.calls),
    )


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=3))
def test_written_calls_are_read_back(written):
    text = write_calls(written)
    read = read_calls(text + "behind")
    assert read == (written, len(text))
    assert [list(call.arguments) for call in read[0]] == [list(c.arguments) for c in written]


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=2), st.data())
def test_no_beginning_of_a_block_is_a_block(written, data):
    text = write_calls(written)
    assert read_calls(text[: data.draw(st.integers(0, len(text) - 1))]) is None


@settings(deadline=None)
@given(answer_text, answer_text, st.lists(calls, max_size=3), st.booleans())
def test_a_rendered_answer_is_parsed_back(reasoning, content, made, thinking):
    message = Answer(reasoning if thinking else "", content, tuple(made)).message(lambda: "id")
    options = ChatOptions(thinking=thinking)
    question = {"role": "user", "content": "q"}
    prompt = render_chat([question], options).text
    answered = render_chat([question, message], options).text
    assert answered.startswith(prompt)
    assert parse_answer(answered[len(prompt) :], thinking=thinking).message(lambda: "id") == message


@settings(max_examples=300, deadline=None)
@given(st.lists(marks | plain, max_size=12), st.lists(st.integers(0, 600)), st.booleans())
def test_pieces_and_whole_agree_and_nothing_fails(texts, cuts, thinking):
    text = "".join(texts)
    whole = parse_answer(text, thinking=thinking)
    assert in_pieces(text, cuts, thinking) == whole
    assert in_pieces(text, list(range(len(text))), thinking) == whole


@settings(deadline=None)
@given(st.lists(plain | st.sampled_from(["<｜DSML｜ calls>", "\n\n", "</think>", "{"]), max_size=8))
def test_text_without_a_block_is_content_to_the_letter(texts):
    text = "".join(texts)
    assert parse_answer(text, thinking=False) == Answer("", text, ())


def test_thinking_answer_with_calls():
    answer = parse_answer("why</think>so\n\n" + BLOCK + EOS, thinking=True)
    assert answer == Answer("why", "so", (ToolCall("run", {"cmd": "ls"}),))
    assert answer.finish_reason == "tool_calls"
    message = answer.message(lambda: "call_1")
    assert message["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "run", "arguments": json.dumps({"cmd": "ls"})},
        }
    ]


def test_parts_that_are_missing():
    assert parse_answer("a", thinking=False).message() == {"role": "assistant", "content": "a"}
    assert parse_answer(BLOCK, thinking=False).message(lambda: "x")["content"] is None
    cut = parse_answer("never ended", thinking=True)
    assert cut == Answer("never ended", "", ())
    assert cut.finish_reason == "stop"


def test_call_ids_differ():
    two = parse_answer(BLOCK + BLOCK, thinking=False).message()["tool_calls"]
    assert two[0]["id"] != two[1]["id"]


@pytest.mark.parametrize(
    "block",
    [
        "<｜DSML｜ calls>\n</｜DSML｜ calls>",
        "<｜DSML｜ calls>\nrun ls\n</｜DSML｜ calls>",
        BLOCK.replace("</｜DSML｜ invoke>", ""),
        BLOCK.replace("</｜DSML｜ parameter>", ""),
        BLOCK.replace("</｜DSML｜ calls>", ""),
        BLOCK.replace(' string="true"', ""),
        BLOCK.replace('string="true"', 'string="false"'),
        BLOCK.replace('name="run"', 'name=""'),
        BLOCK.replace('string="true">ls', 'string="false">NaN'),
        BLOCK.replace('string="true">ls', 'string="false">1e999'),
        BLOCK.replace('string="true">ls', 'string="false">' + "[" * 100_000),
        BLOCK.replace(STRING, STRING + "\n" + STRING),
    ],
)
def test_a_malformed_block_is_content(block):
    text = "see:\n\n" + block
    assert parse_answer(text + EOS, thinking=False) == Answer("", text, ())


def test_a_closing_tag_within_a_value_closes_nothing():
    value = "</｜DSML｜ calls>"
    block = BLOCK.replace(">ls<", f">{value}<")
    assert parse_answer(block, thinking=False).calls == (ToolCall("run", {"cmd": value}),)


def test_a_block_behind_a_malformed_one_is_read():
    text = "<｜DSML｜ calls></｜DSML｜ calls> then " + BLOCK
    answer = parse_answer(text, thinking=False)
    assert answer.content == "<｜DSML｜ calls></｜DSML｜ calls> then "
    assert len(answer.calls) == 1


def test_text_behind_a_block_is_content_and_blanks_there_are_not():
    assert parse_answer(BLOCK + "\n ", thinking=False).content == ""
    assert parse_answer(BLOCK + "\n more", thinking=False).content == "\n more"


def test_deltas_come_as_soon_as_they_are_sure():
    parser = AnswerParser(thinking=True)
    assert parser.feed("because").reasoning == "because"
    assert not parser.feed("</thi")
    assert parser.feed("s</think>it").reasoning == "</this"
    assert parser.feed(" is\n\n<").content == " is"
    assert parser.feed("b>").content == "\n\n<b>"
    assert not parser.feed("\n\n" + BLOCK[:-1])
    assert parser.feed(BLOCK[-1]).calls == [ToolCall("run", {"cmd": "ls"})]
    assert not parser.feed(EOS + "ignored")
    assert not parser.finish()
