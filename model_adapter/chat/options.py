"""How a conversation is to be rendered."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from model_adapter.errors import ChatError

REASONING_EFFORT_MIN = 1
REASONING_EFFORT_MAX = 100
REASONING_EFFORT_NAMES = {"low": 50, "high": 75, "max": 100}


@dataclass(frozen=True)
class ChatOptions:
    """Options of one prompt. Raises `ChatError` for a value out of range.

    `thinking`: the answer begins with a reasoning part. `reasoning_effort`: 1–100, or `low` (50),
    `high` (75), `max` (100); it stands in the prompt in thinking mode only, behind the first
    system mark, so another effort is another prefix from there on. `drop_thinking`: the reasoning
    of assistant turns before the last user turn is left out; a conversation with tools always
    keeps it.
    """

    thinking: bool = False
    reasoning_effort: int | str = "high"
    drop_thinking: bool = True

    def __post_init__(self) -> None:
        for name in ("thinking", "drop_thinking"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ChatError(f"{name} must be true or false, not {value!r}")
        _effort(self.reasoning_effort)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "ChatOptions":
        """Options by name; an unknown name raises `ChatError` with the known ones."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ChatError(f"unknown chat option {name!r}; there are {', '.join(known)}")
        return cls(**options)

    @property
    def effort(self) -> int:
        """The numeric reasoning effort, 1–100."""
        return _effort(self.reasoning_effort)


def _effort(value: object) -> int:
    if isinstance(value, str) and value in REASONING_EFFORT_NAMES:
        return REASONING_EFFORT_NAMES[value]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and REASONING_EFFORT_MIN <= value <= REASONING_EFFORT_MAX:
        return value
    raise ChatError(
        f"reasoning_effort must be {REASONING_EFFORT_MIN}–{REASONING_EFFORT_MAX} or one of "
        f"{', '.join(REASONING_EFFORT_NAMES)}, not {value!r}"
    )
