"""From a conversation to the prompt text that the model reads (ds41f §6).

Where a header opens with `<think>` and where with `</think>`, and which reasoning stays, decides
how far the next prompt agrees with this one: `RenderedPrompt.stable_chars` says it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_adapter.chat import tokens
from model_adapter.chat.dsml import to_json, write_calls
from model_adapter.chat.messages import ImageRef, Turn, to_turns
from model_adapter.chat.options import ChatOptions
from model_adapter.errors import ChatError

_EFFORT = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
_TOOLS_HEAD = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "{tokens.CALLS_OPEN}" block like the following:

{tokens.CALLS_OPEN}
{tokens.INVOKE_OPEN}$TOOL_NAME">
{tokens.PARAMETER_OPEN}$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{tokens.PARAMETER_CLOSE}
...
{tokens.INVOKE_CLOSE}
{tokens.INVOKE_OPEN}$TOOL_NAME2">
...
{tokens.INVOKE_CLOSE}
{tokens.CALLS_CLOSE}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {tokens.THINK_OPEN}), you MUST output your complete \
reasoning inside {tokens.THINK_OPEN}...{tokens.THINK_CLOSE} BEFORE any tool calls or final response.

Otherwise, output directly after {tokens.THINK_CLOSE} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)
_RESPONSE_FORMAT = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt.

    `text`: what the model reads. `images`: the image parts in the order of their placeholders.
    `stable_chars`: the next turn's prompt begins with `text[:stable_chars]` whatever is answered,
    and in general with no more of it.
    """

    text: str
    images: tuple[ImageRef, ...]
    stable_chars: int


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """The prompt of a conversation in OpenAI's message form.

    A conversation that ends with a user turn or a tool result ends in the header of the answer;
    one that ends with an assistant turn ends behind it. Raises `ChatError`.
    """
    options = options or ChatOptions()
    turns = to_turns(messages, tools, response_format)
    drop = options.drop_thinking and not any(turn.tools for turn in turns)
    last = max((i for i, turn in enumerate(turns) if _asks(i, turn)), default=-1)
    out = [tokens.BOS]
    if options.thinking:
        out += [tokens.SYSTEM, _EFFORT.format(options.effort)]
    elif turns[0].role == "system":
        out.append(tokens.SYSTEM)
    stable = None
    for i, turn in enumerate(turns):
        open_thinking = options.thinking and (not drop or i >= last)
        if turn.role == "assistant":
            out.append(_assistant(turn, open_thinking))
            continue
        out.append(_user(turn) if turn.role == "user" else _system(turn, first=i == 0))
        if _asks(i, turn) and (i + 1 == len(turns) or turns[i + 1].role == "assistant"):
            out.append(tokens.ASSISTANT)
            if open_thinking and drop:
                stable = sum(map(len, out))
            out.append(tokens.THINK_OPEN if open_thinking else tokens.THINK_CLOSE)
    text = "".join(out)
    _check_text(text)
    images = tuple(image for turn in turns for part in turn.parts for image in part.images)
    return RenderedPrompt(text, images, len(text) if stable is None else stable)


def _asks(i: int, turn: Turn) -> bool:
    """A turn that an answer follows: a user's, or a system message within the conversation."""
    return turn.role == "user" or (turn.role == "system" and i > 0)


def _assistant(turn: Turn, thinking: bool) -> str:
    reasoning = turn.reasoning + tokens.THINK_CLOSE if thinking else ""
    calls = tokens.GAP + write_calls(turn.calls) if turn.calls else ""
    return reasoning + turn.text + calls + tokens.EOS


def _user(turn: Turn) -> str:
    return tokens.USER + tokens.GAP.join(
        part.text
        if part.call_id is None
        else tokens.TOOL_RESULT_OPEN + part.text + tokens.TOOL_RESULT_CLOSE
        for part in turn.parts
    )


def _system(turn: Turn, *, first: bool) -> str:
    # The first system mark stands before the reasoning effort, hence is written already.
    text = turn.text if first else tokens.SYSTEM + turn.text
    if turn.tools:
        schemas = "\n".join(to_json(dict(tool), "a tool's function") for tool in turn.tools)
        text += tokens.GAP + _TOOLS_HEAD + schemas + _TOOLS_TAIL
    if turn.response_format:
        text += _RESPONSE_FORMAT + to_json(dict(turn.response_format), "response_format")
    return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ChatError(f"the messages hold a lone surrogate, {text[e.start]!r}, no text") from e
