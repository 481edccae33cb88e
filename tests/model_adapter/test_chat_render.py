"""Conversations become the prompt text of the released format."""

import json
from pathlib import Path

import pytest

from model_adapter.chat import ChatError, ChatOptions, render_chat

CASES = json.loads((Path(__file__).parents[1] / "golden" / "chat.json").read_text("utf-8"))
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
PNG = "data:image/png;base64,AAAA"


def options_of(case: dict) -> ChatOptions:
    return ChatOptions.from_mapping({"thinking": case["thinking"], **case["options"]})


def text_of(messages: list, **kwargs) -> str:
    return render_chat(messages, **kwargs).text


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_case_to_the_letter(case):
    assert text_of(case["messages"], options=options_of(case)) == case["prompt"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_tools_beside_the_messages_equal_tools_on_the_system_message(case):
    first, *rest = case["messages"]
    extra = {k: first[k] for k in ("tools", "response_format") if k in first}
    bare = {k: v for k, v in first.items() if k not in extra}
    assert text_of([bare, *rest], options=options_of(case), **extra) == case["prompt"]


def test_tools_without_a_system_message_make_one():
    got = text_of([{"role": "user", "content": "a"}], tools=[TOOL])
    assert got == text_of([{"role": "system", "tools": [TOOL]}, {"role": "user", "content": "a"}])
    assert got.startswith("<｜begin▁of▁sentence｜><｜System｜>\n\n## Tools")


def test_tools_and_response_format_keep_their_order():
    system = {"role": "system", "content": "s", "tools": [TOOL]}
    got = text_of([system, {"role": "user"}], response_format={"type": "json_object"})
    assert got.index("### Available Tool Schemas") < got.index("\n\n## Response Format:")


def test_response_format_text_asks_for_nothing():
    messages = [{"role": "user", "content": "a"}]
    assert text_of(messages, response_format={"type": "text"}) == text_of(messages)


def test_developer_is_system():
    turns = [{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}]
    assert text_of(turns) == text_of([{"role": "system", "content": "s"}, turns[1]])


def test_a_history_that_ends_with_the_assistant_ends_behind_it():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert text_of(messages).endswith("</think>b<｜end▁of▁sentence｜>")


def test_parts_and_images_keep_their_order():
    parts = [
        {"type": "text", "text": "before"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "text", "text": "after"},
    ]
    result = [{"type": "image_url", "image_url": {"url": "data:second"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": ""}}
    prompt = render_chat(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": result},
        ]
    )
    assert "<｜User｜>before\n\n<｜deepseek_image｜>\n\nafter<｜Assistant｜>" in prompt.text
    assert "<tool_result><｜deepseek_image｜></tool_result>" in prompt.text
    assert [image.url for image in prompt.images] == [PNG, "data:second"]
    assert prompt.images[1].where == "messages[2].content[0]"


def test_images_follow_the_results_that_were_put_in_order():
    def look(call_id: str) -> dict:
        return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def picture(call_id: str) -> dict:
        content = [{"type": "image_url", "image_url": {"url": f"data:{call_id}"}}]
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    calls = {"role": "assistant", "content": "", "tool_calls": [look("a"), look("b")]}
    prompt = render_chat([{"role": "user"}, calls, picture("b"), picture("a")])
    assert [image.url for image in prompt.images] == ["data:a", "data:b"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_next_prompt_begins_with_the_stable_part_and_no_more(case):
    options = options_of(case)
    now = render_chat(case["messages"], options)
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}
    then = text_of([*case["messages"], answer, {"role": "user", "content": "?"}], options=options)
    assert then.startswith(now.text[: now.stable_chars])
    if now.stable_chars < len(now.text):
        assert not then.startswith(now.text[: now.stable_chars + len("<think>")])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ("hello", "list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "a"}], r"messages\[0\].role .* not None"),
        ([{"role": "user"}, {"role": "critic", "content": "a"}], r"messages\[1\].role .*'critic'"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content must be text"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] must be a part"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a url"),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}],
            "only a user message or a tool result",
        ),
        ([{"role": "tool", "content": "a"}], "tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\] .*function"),
        ([{"role": "assistant", "tool_calls": "run"}], "must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}],
            "id must be text",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": 'a"b'}}]}],
            "can't be a tool's name",
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "use tool_calls"),
        ([{"role": "system", "tools": {"name": "f"}}], r"messages\[0\].tools must be a list"),
        ([{"role": "system", "tools": [{"type": "function"}]}], r"tools\[0\] must be a function"),
        ([{"role": "system", "response_format": "json"}], "response_format must be an object"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(messages, says):
    with pytest.raises(ChatError, match=says):
        render_chat(messages)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 1}, "unknown chat option 'temperature'"),
        ({"reasoning_effort": 0}, "1–100"),
        ({"reasoning_effort": 101}, "101"),
        ({"reasoning_effort": "medium"}, "low, high, max, not 'medium'"),
        ({"reasoning_effort": True}, "True"),
        ({"reasoning_effort": 2.5}, "2.5"),
        ({"thinking": "yes"}, "thinking must be true or false"),
        ({"drop_thinking": None}, "drop_thinking must be true or false"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ChatError, match=says):
        ChatOptions.from_mapping(options)
