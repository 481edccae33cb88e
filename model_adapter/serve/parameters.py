"""The bodies of requests: which parameters there are, and what each may be.

A parameter that would change the answer and is not known here is refused, not ignored.
"""

from collections.abc import Mapping
from reprlib import repr as shown
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_adapter.serve.errors import ApiError, invalid
from model_adapter.serve.limits import ServeLimits

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's, for a completion that sets no limit."""
REASONING_EFFORTS: Mapping[str | int | None, str] = {
    "minimal": "low",
    "medium": "high",
    "xhigh": "max",
}
"""OpenAI's words that the chat format does not have, and the next ones that it has."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
}
"""Parameters that are known and not done: the values that ask for nothing."""
_NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Parameters that change no answer."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    """`include_obfuscation` has no effect: nothing here is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Thinking(_Body):
    """DeepSeek's switch."""

    type: Literal["enabled", "disabled"]


class Common(_Body):
    """What both kinds of requests have. `stop`: at most `ServeLimits.stop_strings_max`."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stop_strings(self) -> list[str]:
        """As a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(Common):
    """`POST /v1/completions`. `prompt`: text, or token ids, or a list of one of them."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def one_prompt(self) -> str | list[int]:
        """Text or token ids. Raises `ApiError` for several prompts."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        first, *rest = prompt or [[]]
        if isinstance(first, int):
            return [first, *(i for i in rest if isinstance(i, int))]
        if rest:
            raise invalid(f"{len(prompt)} prompts; send one per request", "prompt")
        return first


class ChatBody(Common):
    """`POST /v1/chat/completions`. Messages, tools and format are the chat format's to check."""

    messages: list[Any]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Any] = []
    tool_choice: Literal["none", "auto"] = "auto"
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | int | None = None
    thinking: Thinking | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether the answer begins with reasoning: as `thinking` says, else where an effort is
        asked for."""
        if self.thinking is not None:
            return self.thinking.type == "enabled"
        return self.reasoning_effort not in (None, "none")

    @property
    def effort(self) -> str | int:
        """The effort in the chat format's words."""
        asked = self.reasoning_effort
        if asked is None or asked == "none":
            return "high"
        return REASONING_EFFORTS.get(asked, asked)


_AnyBody = TypeVar("_AnyBody", bound=Common)


def parse(kind: type[_AnyBody], body: Any, limits: ServeLimits) -> _AnyBody:
    """The checked parameters of a request's JSON; null is as good as absent. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, not {shown(body)}")
    given = {k: v for k, v in body.items() if v is not None and k not in _NO_EFFECT}
    for name in _NEUTRAL.keys() & given.keys():
        value = given.pop(name)
        if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise _unsupported(name, value)
    choice = given.get("tool_choice", "auto")
    if choice not in ("none", "auto"):
        raise _unsupported("tool_choice", choice, "none or auto")
    try:
        parsed = kind.model_validate(given)
    except ValidationError as e:
        raise _explained(e, kind) from None
    _check_stops(parsed.stop_strings, limits)
    return parsed


def _same(a: Any, b: Any) -> bool:
    """Equal in JSON, where false is not 0 but 0.0 is."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _unsupported(name: str, value: Any, allowed: str | None = None) -> ApiError:
    if allowed is None:
        allowed = " or ".join(map(repr, _NEUTRAL[name])) or "nothing"
    return invalid(
        f"{name} = {shown(value)} is not supported here; leave it out or set it to {allowed}",
        param=name,
        code="unsupported_value",
    )


def _explained(error: ValidationError, kind: type[Common]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    # behind the name of a parameter of several types stands the type that was tried
    name = path[0] if path else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        where = ".".join(path)
        return invalid(
            f"unknown parameter {where!r}; there are {known}", where, "unknown_parameter"
        )
    if first["type"] == "missing":
        where = ".".join(path)
        return invalid(f"the parameter {where!r} is missing", where, "missing_required_parameter")
    return invalid(f"{name}: {first['msg']}; it is {shown(first['input'])}", name, "invalid_value")


def _check_stops(stops: list[str], limits: ServeLimits) -> None:
    if len(stops) > limits.stop_strings_max:
        raise invalid(
            f"stop has {len(stops)} strings; {limits.stop_strings_max} at most", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.stop_chars_max:
            raise invalid(
                f"a stop string has 1 to {limits.stop_chars_max} characters, not {len(stop)}",
                param="stop",
            )
