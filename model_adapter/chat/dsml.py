"""Tool calls in the DSML tags: written from OpenAI's form, and read back.

The format escapes nothing. A value that itself holds a closing parameter tag ends there for every
reader, so `read_calls(write_calls(x)) == x` holds for values without one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from model_adapter.chat.tokens import (
    CALLS_CLOSE,
    CALLS_OPEN,
    INVOKE_CLOSE,
    INVOKE_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
)
from model_adapter.errors import ChatError

_HEADER_END = '">'
_STRING, _JSON = '" string="true">', '" string="false">'
_NAME_FORBIDDEN = '"<>\n'


def to_json(value: Any, where: str) -> str:
    """`value` as the prompt spells JSON: `", "` and `": "` between parts, letters as they are."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatError(f"{where} is not JSON: {e}") from e


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments`: parameter name → JSON value, in the order of the text."""

    name: str
    arguments: Mapping[str, Any]

    def message(self, call_id: str) -> dict[str, Any]:
        """The call as an entry of OpenAI's `tool_calls`; its `arguments` are ASCII JSON."""
        arguments = json.dumps(dict(self.arguments))
        function = {"name": self.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


def tool_call(entry: Any, where: str) -> ToolCall:
    """An entry of OpenAI's `tool_calls`, checked.

    `arguments` is JSON text or an object; text that is no JSON object becomes the one string
    parameter `arguments`, which is how the released format keeps such a call. Raises `ChatError`.
    """
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"{where} must be an object with a function, not {shown(entry)}")
    name = function.get("name")
    if not isinstance(name, str) or not name or any(c in name for c in _NAME_FORBIDDEN):
        raise ChatError(f"{where}.function.name can't be a tool's name: {shown(name)}")
    arguments = function.get("arguments", "")
    if isinstance(arguments, Mapping):
        return ToolCall(name, arguments)
    if not isinstance(arguments, str):
        raise ChatError(f"{where}.function.arguments must be JSON text, not {shown(arguments)}")
    if not arguments.strip():
        return ToolCall(name, {})
    try:
        value = _load(arguments)
    except ValueError:
        value = None
    return ToolCall(name, value if isinstance(value, dict) else {"arguments": arguments})


def write_calls(calls: Sequence[ToolCall]) -> str:
    """The block of calls, from its opening to its closing tag."""
    invokes = [
        f"{INVOKE_OPEN}{call.name}{_HEADER_END}\n{_write_arguments(call)}\n{INVOKE_CLOSE}"
        for call in calls
    ]
    return "\n".join([CALLS_OPEN, *invokes, CALLS_CLOSE])


def _write_arguments(call: ToolCall) -> str:
    lines = []
    for name, value in call.arguments.items():
        if isinstance(value, str):
            kind, text = _STRING, value
        else:
            kind, text = _JSON, to_json(value, f"argument {name!r} of {call.name}")
        lines.append(f"{PARAMETER_OPEN}{name}{kind}{text}{PARAMETER_CLOSE}")
    return "\n".join(lines)


class MalformedCalls(Exception):
    """The text can't become a block of calls, whatever follows it."""


def read_calls(text: str) -> tuple[list[ToolCall], int] | None:
    """The block of calls that `text` begins with, and where it ends in `text`.

    None: the text stops inside the block. Raises `MalformedCalls` where no continuation can make a
    block of it: a tag out of place, no call at all, a parameter twice, a value that is not JSON.
    """
    reader = _Reader(text)
    try:
        reader.expect(CALLS_OPEN)
        calls = [reader.invoke()]
        while not reader.takes(CALLS_CLOSE):
            calls.append(reader.invoke())
    except _Incomplete:
        return None
    return calls, reader.at


class _Incomplete(Exception):
    """The text ends before the block does."""


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def takes(self, tag: str) -> bool:
        """Skips white space, then `tag` if it stands there."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.text.startswith(tag, self.at):
            self.at += len(tag)
            return True
        rest = self.text[self.at :]
        if len(rest) < len(tag) and tag.startswith(rest):
            raise _Incomplete
        return False

    def expect(self, tag: str) -> None:
        if not self.takes(tag):
            raise MalformedCalls(f"{tag} expected at character {self.at}")

    def until(self, tag: str) -> str:
        end = self.text.find(tag, self.at)
        if end < 0:
            raise _Incomplete
        found, self.at = self.text[self.at : end], end + len(tag)
        return found

    def invoke(self) -> ToolCall:
        self.expect(INVOKE_OPEN)
        name = self.until(_HEADER_END)
        if not name or any(c in name for c in _NAME_FORBIDDEN):
            raise MalformedCalls(f"{name!r} can't be a tool's name")
        arguments: dict[str, Any] = {}
        while not self.takes(INVOKE_CLOSE):
            key, value = self.parameter()
            if key in arguments:
                raise MalformedCalls(f"parameter {key!r} stands twice in one call of {name}")
            arguments[key] = value
        return ToolCall(name, arguments)

    def parameter(self) -> tuple[str, Any]:
        self.expect(PARAMETER_OPEN)
        header = self.until(_HEADER_END) + _HEADER_END
        text = self.until(PARAMETER_CLOSE)
        if header.endswith(_STRING):
            return header.removesuffix(_STRING), text
        if not header.endswith(_JSON):
            raise MalformedCalls(f"a parameter must say string=true or false: {header!r}")
        try:
            return header.removesuffix(_JSON), _load(text)
        except ValueError as e:
            raise MalformedCalls(f"a parameter's value is not JSON: {text!r}") from e


def _load(text: str) -> Any:
    """JSON as the standard has it: no NaN, no number beyond a double. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as e:
        raise ValueError("JSON nested too deeply") from e


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number that a double holds")
    return value
