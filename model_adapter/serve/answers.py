"""Answers in OpenAI's form: whole, or as the chunks of a stream."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from model_adapter.chat import AnswerParser, Delta, ToolCall, new_call_id
from model_adapter.serve.worker import Finished, reasoning_tokens

Json = dict[str, Any]


def usage(finished: Finished, reasoning: int | None = None) -> Json:
    """Token counts. `cached_tokens`: those of the prompt whose global KV came from the store, those
    that a replay ran through the encoder again included."""
    report = finished.report
    counts: Json = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.generated_tokens,
        "total_tokens": report.prompt_tokens + report.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": report.hit_tokens},
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


@dataclass(kw_only=True)
class _Form:
    """What all objects of one answer share. `include_usage`: a stream ends in a chunk with it."""

    id: str
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, kind: str, **rest: Any) -> Json:
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return common | rest

    def _chunk(self, kind: str, choices: list[Json]) -> Json:
        # null in every chunk but the last, as OpenAI has it
        extra = {"usage": None} if self.include_usage else {}
        return self._object(kind, choices=choices) | extra

    def _last(self, kind: str, counts: Json) -> Iterator[Json]:
        if self.include_usage:
            yield self._object(kind, choices=[], usage=counts)


class CompletionAnswer(_Form):
    """Of `/v1/completions`."""

    KIND = "text_completion"

    def start(self) -> Iterator[Json]:
        """Nothing is said before there is text."""
        yield from ()

    def piece(self, text: str) -> Iterator[Json]:
        """A chunk with more text."""
        yield self._chunk(self.KIND, [self._choice(text, None)])

    def end(self, finished: Finished) -> Iterator[Json]:
        """The last chunks."""
        yield self._chunk(self.KIND, [self._choice("", finished.reason)])
        yield from self._last(self.KIND, usage(finished))

    def whole(self, pieces: list[str], finished: Finished) -> Json:
        """The answer that is not streamed."""
        choice = self._choice("".join(pieces), finished.reason)
        return self._object(self.KIND, choices=[choice], usage=usage(finished))

    @staticmethod
    def _choice(text: str, reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


@dataclass(kw_only=True)
class ChatAnswer(_Form):
    """Of `/v1/chat/completions`. `thinking`: the answer begins with reasoning. `tools`: calls are
    read from it; else they are content."""

    KIND = "chat.completion.chunk"

    tokenizer: Tokenizer
    thinking: bool
    tools: bool

    def __post_init__(self) -> None:
        self._parser = AnswerParser(thinking=self.thinking, tools=self.tools)
        self._calls = 0

    def start(self) -> Iterator[Json]:
        """The chunk that says who speaks."""
        yield self._delta({"role": "assistant", "content": ""})

    def piece(self, text: str) -> Iterator[Json]:
        """Chunks for what the text settles."""
        yield from map(self._delta, self._parts(self._parser.feed(text)))

    def end(self, finished: Finished) -> Iterator[Json]:
        """The last chunks."""
        yield from map(self._delta, self._parts(self._parser.finish()))
        yield self._delta({}, self._reason(finished))
        yield from self._last(self.KIND, self._usage(finished))

    def whole(self, pieces: list[str], finished: Finished) -> Json:
        """The answer that is not streamed."""
        deltas = [*map(self._parser.feed, pieces), self._parser.finish()]
        message: Json = {"role": "assistant", "content": "".join(d.content for d in deltas)}
        if reasoning := "".join(d.reasoning for d in deltas):
            message["reasoning_content"] = reasoning
        if calls := [call.message(new_call_id()) for d in deltas for call in d.calls]:
            message |= {"content": message["content"] or None, "tool_calls": calls}
            self._calls = len(calls)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(finished),
        }
        return self._object("chat.completion", choices=[choice], usage=self._usage(finished))

    def _parts(self, delta: Delta) -> Iterator[Json]:
        if delta.reasoning:
            yield {"reasoning_content": delta.reasoning}
        if delta.content:
            yield {"content": delta.content}
        if delta.calls:
            yield {"tool_calls": [self._call(call) for call in delta.calls]}

    def _call(self, call: ToolCall) -> Json:
        self._calls += 1
        return {"index": self._calls - 1} | call.message(new_call_id())

    def _delta(self, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk(self.KIND, [choice])

    def _reason(self, finished: Finished) -> str:
        return "tool_calls" if self._calls and finished.reason == "stop" else finished.reason

    def _usage(self, finished: Finished) -> Json:
        count = reasoning_tokens(self.tokenizer, finished.token_ids) if self.thinking else 0
        return usage(finished, count)


Answer = CompletionAnswer | ChatAnswer
