"""From the text that the model writes back to OpenAI's message form, whole or as it comes.

Reading never fails: what is no well-formed block of calls is content. A block is handed out when
its closing tag is there, all calls at once, so that a call from half a block never runs; text that
may still turn out to be a tag is held back until it can't. `parse_answer` is the incremental parser
fed once, hence both agree on every text.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model_adapter.chat.dsml import MalformedCalls, ToolCall, read_calls
from model_adapter.chat.tokens import CALLS_CLOSE, CALLS_OPEN, EOS, GAP, THINK_CLOSE


def new_call_id() -> str:
    """An id for a tool call, unique in the world."""
    return f"call_{uuid.uuid4().hex}"


@dataclass
class Delta:
    """What a piece of text added. Concatenated, the deltas of an answer are the answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for an answer that ended by itself."""
        return "tool_calls" if self.calls else "stop"

    def message(self, call_id: Callable[[], str] = new_call_id) -> dict[str, Any]:
        """The answer as OpenAI's assistant message; empty parts are left out or null."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if not self.calls:
            message["content"] = self.content
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message(call_id()) for call in self.calls]
        return message


class AnswerParser:
    """Reads an answer piece by piece; pieces may end anywhere.

    `thinking`: the prompt ended in `<think>`, so the answer begins with reasoning. `tools`: calls
    are read; without, their block is content like any other text.
    """

    def __init__(self, *, thinking: bool, tools: bool = True) -> None:
        self._held = ""
        self._content_marks = (GAP + CALLS_OPEN, CALLS_OPEN, EOS) if tools else (EOS,)
        self._read: Callable[[Delta], bool] = self._reasoning if thinking else self._content
        self._calls_scanned = 0
        self._before_calls = ""
        self._behind_calls = False

    def feed(self, text: str) -> Delta:
        """What `text` settles. Anything behind the end-of-sentence mark is ignored."""
        self._held += text
        delta = Delta()
        while self._read(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """What was held back; the answer is over."""
        delta = Delta()
        text, self._held = self._before_calls + self._held, ""
        if self._read == self._reasoning:
            delta.reasoning = text
        elif self._read != self._over and not (self._behind_calls and text.isspace()):
            delta.content = text.partition(EOS)[0]
        self._read, self._before_calls = self._over, ""
        return delta

    # Each reader takes what it can from `_held`; True: another reader goes on with the rest.

    def _reasoning(self, delta: Delta) -> bool:
        before, mark = self._split(THINK_CLOSE, EOS)
        delta.reasoning += before
        self._read = {THINK_CLOSE: self._content, EOS: self._over}.get(mark, self._reasoning)
        return bool(mark)

    def _content(self, delta: Delta) -> bool:
        before, mark = self._split(*self._content_marks)
        if self._behind_calls:
            if not mark and not before.strip():
                self._held = before + self._held
                return False
            before = before if before.strip() else ""
        if before:
            delta.content += before
            self._behind_calls = False
        if mark == EOS:
            self._read = self._over
        elif mark:
            self._before_calls = mark.removesuffix(CALLS_OPEN)
            self._held = CALLS_OPEN + self._held
            self._calls_scanned = 0
            self._read = self._calls
        return bool(mark)

    def _calls(self, delta: Delta) -> bool:
        # A closing tag may stand within a value; each one is worth one look at the whole block.
        while (close := self._held.find(CALLS_CLOSE, self._calls_scanned)) >= 0:
            self._calls_scanned = close + len(CALLS_CLOSE)
            try:
                block = read_calls(self._held[: self._calls_scanned])
            except MalformedCalls:
                self._give_up(delta)
                return True
            if block is not None:
                calls, end = block
                delta.calls += calls
                self._held = self._held[end:]
                self._before_calls = ""
                self._behind_calls = True
                self._read = self._content
                return True
        self._calls_scanned = max(self._calls_scanned, len(self._held) - len(CALLS_CLOSE) + 1)
        return False

    def _give_up(self, delta: Delta) -> None:
        """The opening tag was just text; what stands behind it may hold a real block."""
        delta.content += self._before_calls + CALLS_OPEN
        self._held = self._held[len(CALLS_OPEN) :]
        self._before_calls = ""
        self._behind_calls = False
        self._read = self._content

    def _over(self, delta: Delta) -> bool:
        self._held = ""
        return False

    def _split(self, *marks: str) -> tuple[str, str]:
        """Takes the text before the first of `marks`, and the mark.

        Without one, takes what can't be the beginning of a mark; the mark is then empty. Marks that
        begin at one place are told apart by their order in `marks`.
        """
        found = [(self._held.find(mark), i) for i, mark in enumerate(marks)]
        found = [(at, i) for at, i in found if at >= 0]
        if found:
            at, i = min(found)
            before, self._held = self._held[:at], self._held[at + len(marks[i]) :]
            return before, marks[i]
        keep = max(_overlap(self._held, mark) for mark in marks)
        cut = len(self._held) - keep
        before, self._held = self._held[:cut], self._held[cut:]
        return before, ""


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that `mark` may begin with."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def parse_answer(text: str, *, thinking: bool) -> Answer:
    """The answer in `text`; see `AnswerParser` for `thinking`."""
    parser = AnswerParser(thinking=thinking)
    deltas = [parser.feed(text), parser.finish()]
    return Answer(
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        tuple(call for d in deltas for call in d.calls),
    )
