"""OpenAI messages, checked and brought to the turns that the format knows.

A conversation becomes a list of turns: system, user, assistant. Tool results have no turn of their
own: with the user messages beside them they make one user turn, the results in the order of the
calls that they answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any, Literal

from model_adapter.chat import tokens
from model_adapter.chat.dsml import ToolCall, tool_call
from model_adapter.errors import ChatError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ImageRef:
    """An image part of a message: `url` as the caller gave it, `where` it stands."""

    url: str
    where: str


@dataclass
class Part:
    """A piece of a user turn: a user's text, or the result of the call `call_id`."""

    text: str
    images: list[ImageRef]
    call_id: str | None = None


@dataclass
class Turn:
    """One turn. `parts` serve a user turn only, `text` the others."""

    role: Literal["system", "user", "assistant"]
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    response_format: Mapping[str, Any] | None = None


def to_turns(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> list[Turn]:
    """The turns of a conversation. Raises `ChatError`.

    `tools` and `response_format` may stand on a system message or be given beside the messages, as
    OpenAI's API has them; they then join the first message, or an empty system message put before
    it. `developer` is another name of `system`. A `response_format` of type `text` asks nothing.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ChatError("messages must be a list of at least one message")
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        _add(turns, message, f"messages[{i}]")
    form = _response_format(response_format, "response_format")
    functions = _functions(tools, "tools")
    if functions or form:
        if turns[0].role != "system":
            turns.insert(0, Turn("system"))
        turns[0].tools = turns[0].tools + functions
        turns[0].response_format = form or turns[0].response_format
    _order_results(turns)
    return turns


def _add(turns: list[Turn], message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} must be an object, not {shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise ChatError(f"{where}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    if role in ("user", "tool"):
        if not turns or turns[-1].role != "user":
            turns.append(Turn("user"))
        turns[-1].parts.append(_part(message, role, where))
    elif role == "assistant":
        turns.append(_assistant(message, where))
    else:
        turns.append(
            Turn(
                "system",
                _plain_text(message, "content", where),
                tools=_functions(message.get("tools"), f"{where}.tools"),
                response_format=_response_format(
                    message.get("response_format"), f"{where}.response_format"
                ),
            )
        )


def _part(message: Mapping[str, Any], role: str, where: str) -> Part:
    text, images = _content(message.get("content"), f"{where}.content")
    if role == "user":
        return Part(text, images)
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise ChatError(f"{where}.tool_call_id must name the call it answers, not {shown(call_id)}")
    return Part(text, images, call_id)


def _assistant(message: Mapping[str, Any], where: str) -> Turn:
    if message.get("function_call"):
        raise ChatError(f"{where}.function_call is not supported; use tool_calls")
    entries = message.get("tool_calls") or []
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ChatError(f"{where}.tool_calls must be a list, not {shown(entries)}")
    calls = [tool_call(entry, f"{where}.tool_calls[{i}]") for i, entry in enumerate(entries)]
    ids = [_call_id(entry.get("id"), f"{where}.tool_calls[{i}]") for i, entry in enumerate(entries)]
    reasoning = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    return Turn(
        "assistant",
        _plain_text(message, "content", where),
        reasoning=_plain_text(message, reasoning, where),
        calls=calls,
        call_ids=ids,
    )


def _call_id(value: Any, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ChatError(f"{where}.id must be text, not {shown(value)}")
    return value or ""


def _plain_text(message: Mapping[str, Any], key: str, where: str) -> str:
    text, images = _content(message.get(key), f"{where}.{key}")
    if images:
        raise ChatError(f"{images[0].where}: only a user message or a tool result holds images")
    return text


def _content(content: Any, where: str) -> tuple[str, list[ImageRef]]:
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, Sequence):
        raise ChatError(f"{where} must be text or a list of parts, not {shown(content)}")
    texts, images = [], []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url":
            images.append(ImageRef(_image_url(part.get("image_url"), at), at))
            texts.append(tokens.IMAGE)
        else:
            raise ChatError(f"{at} must be a part of type text or image_url, not {shown(part)}")
    return tokens.GAP.join(texts), images


def _image_url(value: Any, where: str) -> str:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ChatError(f"{where}.image_url must be an object with a url")
    return url


def _functions(tools: Any, where: str) -> list[Mapping[str, Any]]:
    if tools is None:
        return []
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ChatError(f"{where} must be a list of tools, not {shown(tools)}")
    functions = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(f"{where}[{i}] must be a function with a name, not {shown(tool)}")
        functions.append(function)
    return functions


def _response_format(value: Any, where: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise ChatError(f"{where} must be an object with a type, not {shown(value)}")
    return None if value["type"] == "text" else value


def _order_results(turns: list[Turn]) -> None:
    """Puts the results of each user turn in the order of the latest calls before it.

    A result that answers no known call counts as the first call's, as the released format has it.
    """
    rank: dict[str, int] = {}
    for turn in turns:
        if turn.call_ids:
            rank = {call_id: i for i, call_id in enumerate(turn.call_ids)}
        results = [part for part in turn.parts if part.call_id is not None]
        results.sort(key=lambda part: rank.get(part.call_id or "", 0))
        ordered = iter(results)
        turn.parts = [next(ordered) if p.call_id is not None else p for p in turn.parts]
