"""Chat completions by the official client."""

import json

import openai
import pytest
from serving import NAME, chatting, scripted, tokenizer

from model_adapter.chat import ToolCall
from model_adapter.chat.dsml import write_calls

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLS = [ToolCall("weather", {"place": "Bonn", "days": 3}), ToolCall("weather", {"place": "Köln"})]
CALLING = "Let me look.\n\n" + write_calls(CALLS)


@pytest.fixture(scope="module")
def api():
    """A server without a store, whose model says what it likes."""
    with chatting() as api:
        yield api


def ask(api, messages=HELLO, **options):
    options = {"max_tokens": 20, "temperature": 0} | options
    return api.chat.completions.create(model=NAME, messages=messages, **options)


def streamed(api, messages=HELLO, **options):
    return list(ask(api, messages, stream=True, **options))


def joined(chunks, part: str) -> str:
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    return "".join(getattr(d, part, None) or "" for d in deltas)


def test_a_stream_adds_up_to_the_whole_answer(api):
    whole = ask(api)
    chunks = streamed(api)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert joined(chunks, "content") == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = whole.usage
    assert 1 <= usage.completion_tokens <= 20
    assert usage.total_tokens == usage.completion_tokens + usage.prompt_tokens


def test_usage_comes_in_a_chunk_of_its_own_where_asked_for(api):
    whole = ask(api)
    *chunks, last = streamed(api, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == whole.usage
    assert [c.usage for c in chunks] == [None] * len(chunks)


def test_reasoning_stands_apart():
    said = "First this, then that.</think>The answer."
    with chatting(choose=scripted(said, said, said, said)) as api:
        whole = ask(api, reasoning_effort="low")
        chunks = streamed(api, reasoning_effort="low")
        switched = ask(api, extra_body={"thinking": {"type": "enabled"}})
        plain = ask(api, reasoning_effort="none")
    for message in (whole.choices[0].message, switched.choices[0].message):
        assert message.reasoning_content == "First this, then that."
        assert message.content == "The answer."
    assert joined(chunks, "reasoning_content") == "First this, then that."
    assert joined(chunks, "content") == "The answer."
    assert plain.choices[0].message.content == said
    reasoning = len(tokenizer().encode("First this, then that.</think>").ids)
    assert whole.usage.completion_tokens_details.reasoning_tokens == reasoning
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    # another effort is another prompt, and none is a shorter one
    assert plain.usage.prompt_tokens < whole.usage.prompt_tokens


def test_tool_calls_are_read_from_the_answer():
    with chatting(choose=scripted(CALLING, CALLING)) as api:
        whole = ask(api, tools=[WEATHER], max_tokens=900)
        chunks = streamed(api, tools=[WEATHER], max_tokens=900)
    choice = whole.choices[0]
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert choice.message.content == joined(chunks, "content") == "Let me look."
    deltas = [c.choices[0].delta.tool_calls or [] for c in chunks]
    pieces = [call for delta in deltas for call in delta]
    assert [call.index for call in pieces] == [0, 1]
    for calls in (choice.message.tool_calls, pieces):
        assert [c.function.name for c in calls] == [c.name for c in CALLS]
        assert [json.loads(c.function.arguments) for c in calls] == [c.arguments for c in CALLS]
        assert len({c.id for c in calls}) == 2


def test_a_tool_result_goes_back_into_the_conversation():
    with chatting(choose=scripted(CALLING, "Rain in both.")) as api:
        first = ask(api, tools=[WEATHER], max_tokens=900).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in first.tool_calls
        ]
        messages = [*HELLO, first.to_dict(), *results]
        second = ask(api, messages, tools=[WEATHER])
    assert second.choices[0].message.content == "Rain in both."
    assert second.choices[0].finish_reason == "stop"


def test_calls_are_text_where_none_are_wanted():
    with chatting(choose=scripted(CALLING, CALLING, CALLING)) as api:
        told = ask(api, tools=[WEATHER], tool_choice="none", max_tokens=900)
        free = ask(api, tools=[WEATHER], max_tokens=900)
        without = ask(api, max_tokens=900)
    for answer in (told, without):
        assert answer.choices[0].message.content == CALLING
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
    # the prompt keeps its tools, so that the prefix stays the same
    assert told.usage.prompt_tokens == free.usage.prompt_tokens > without.usage.prompt_tokens


def test_a_call_cut_off_by_the_limit_is_text():
    cut = len(tokenizer().encode(CALLING).ids) - 2
    with chatting(choose=scripted(CALLING)) as api:
        answer = ask(api, tools=[WEATHER], max_tokens=cut)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content.startswith("Let me look.\n\n<｜DSML｜ calls>")


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it():
    said = "one two three four"
    with chatting(choose=scripted(said, said, said)) as api:
        whole = ask(api, stop=["never", "o th"])
        chunks = streamed(api, stop="three")
        missed = ask(api, stop="fourth")
    assert whole.choices[0].message.content == "one tw"
    assert joined(chunks, "content") == "one two "
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens < missed.usage.completion_tokens
    assert missed.choices[0].message.content == said


def test_the_end_token_ends_the_answer():
    with chatting(choose=scripted("Done.")) as api:
        answer = ask(api)
    assert answer.choices[0].message.content == "Done."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokenizer().encode("Done.").ids) + 1


def test_a_seed_makes_a_sampled_answer_repeatable(api):
    def say(seed, **options):
        return (
            ask(api, temperature=1.5, seed=seed, max_tokens=8, **options).choices[0].message.content
        )

    assert say(1) == say(1) != say(2)
    assert say(None) != say(None)
    # the likeliest token alone
    assert say(3, top_p=1e-9) == ask(api, max_tokens=8).choices[0].message.content


def test_response_format_stands_in_the_prompt(api):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    asked = ask(api, response_format=form)
    plain = ask(api, response_format={"type": "text"})
    assert asked.usage.prompt_tokens > plain.usage.prompt_tokens


def test_an_answer_without_a_limit_has_the_server_s():
    from model_adapter.serve import ServeLimits

    limits = ServeLimits(answer_tokens_default=5, shutdown_s_max=2)
    with chatting(limits=limits) as api:
        answer = api.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
        newer = ask(api, max_tokens=None, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 5
    assert newer.usage.completion_tokens == 3


def test_the_models_are_listed(api):
    assert [m.id for m in api.models.list()] == [NAME]
    assert api.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError, match="not served here; there is 'tiny'"):
        api.models.retrieve("gpt-x")
