"""The shipped transcripts as conversations (see `transcripts/README.md`)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

Message = dict[str, str]
"""`role` and `content`, as OpenAI's messages have them."""
_INSTRUCTIONS = "<instructions>"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session. `prompts[k]`: the messages of its k-th call, each a prefix of the next."""

    name: str
    prompts: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that the last call sees."""
        return self.prompts[-1]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content.strip()}


def parse_conversation(lines: str) -> Conversation:
    """A conversation from one transcript file's text.

    Raises `ValueError` where a call's input does not go on from the call before it.
    """
    calls = sorted(map(json.loads, lines.splitlines()), key=lambda call: call["timestamp"])
    task, tag, instructions = calls[0]["input"].partition(_INSTRUCTIONS)
    messages = [_message("system", tag + instructions), _message("user", task)]
    prompts = [tuple(messages)]
    for before, call in pairwise(calls):
        if not call["input"].startswith(before["input"]):
            raise ValueError(f"session {call['session_id']}: a call does not go on from the last")
        result = call["input"][len(before["input"]) :]
        messages += [_message("assistant", before["output"]), _message("user", result)]
        prompts.append(tuple(messages))
    return Conversation(calls[0]["session_id"][:8], tuple(prompts))


def load_conversations() -> list[Conversation]:
    """The shipped sessions, in order of name."""
    folder = resources.files("model_adapter.demo") / "transcripts"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    return [parse_conversation(f.read_text(encoding="utf-8")) for f in files]


def training_texts() -> Iterator[str]:
    """Every message of the shipped sessions, for a tokenizer to learn from."""
    for conversation in load_conversations():
        for message in conversation.messages:
            yield message["content"]
