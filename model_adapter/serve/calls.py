"""From the JSON of a request to a task for the model and the form of its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tokenizers import Tokenizer

from model_adapter.serve.answers import Answer, ChatAnswer, CompletionAnswer
from model_adapter.serve.errors import ApiError, invalid
from model_adapter.serve.limits import ServeLimits
from model_adapter.serve.parameters import (
    COMPLETION_TOKENS_DEFAULT,
    ChatBody,
    Common,
    CompletionBody,
    parse,
)
from model_adapter.serve.prompts import Prompt, PromptMaker
from model_adapter.serve.sampling import Choice, Choosing
from model_adapter.serve.worker import Task
from model_adapter.session import CachedSession

Choose = Callable[[float, float, int | None], Choice]
"""From temperature, top_p and seed to a way of choosing tokens."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served. `name`: the model's, as requests have to spell it."""

    session: CachedSession
    tokenizer: Tokenizer
    name: str
    limits: ServeLimits = field(default_factory=ServeLimits)
    choose: Choose = field(default_factory=Choosing)


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is ready for the model."""

    task: Task
    answer: Answer
    stream: bool


class CallMaker:
    """Checks requests and makes calls of them; everything that can be wrong is found here."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._config = served.session.model.config
        self._prompts = PromptMaker(self._config, served.tokenizer, served.limits)

    def completion(self, body: Any) -> Call:
        """`/v1/completions`. Raises `ApiError`, `InputError`."""
        parsed = parse(CompletionBody, body, self._served.limits)
        self._check_model(parsed)
        prompt = self._prompts.completion(parsed)
        limit = parsed.max_tokens or COMPLETION_TOKENS_DEFAULT
        task = self._task("cmpl", parsed, prompt, limit)
        answer = CompletionAnswer(
            id=task.id,
            model=self._served.name,
            include_usage=parsed.stream_options.include_usage,
        )
        return Call(task, answer, parsed.stream)

    def chat(self, body: Any) -> Call:
        """`/v1/chat/completions`. Raises `ApiError`, `InputError`."""
        parsed = parse(ChatBody, body, self._served.limits)
        self._check_model(parsed)
        prompt = self._prompts.chat(parsed)
        limit = parsed.max_completion_tokens or parsed.max_tokens
        if limit is None:
            room = self._config.positions_max - len(prompt.token_ids) + 1
            limit = max(1, min(self._served.limits.answer_tokens_default, room))
        task = self._task("chatcmpl", parsed, prompt, limit)
        answer = ChatAnswer(
            id=task.id,
            model=self._served.name,
            include_usage=parsed.stream_options.include_usage,
            tokenizer=self._served.tokenizer,
            thinking=parsed.is_thinking,
            tools=parsed.tool_choice == "auto" and _has_tools(parsed),
        )
        return Call(task, answer, parsed.stream)

    def _task(self, kind: str, parsed: Common, prompt: Prompt, max_tokens: int) -> Task:
        positions, limit = len(prompt.token_ids) + max_tokens - 1, self._config.positions_max
        if positions > limit:
            raise invalid(
                f"this model has {limit} positions; the prompt has {len(prompt.token_ids)} tokens "
                f"and {max_tokens} are asked for",
                code="context_length_exceeded",
            )
        return Task(
            id=f"{kind}-{uuid4().hex}",
            token_ids=prompt.token_ids,
            images=prompt.images,
            stable_tokens=prompt.stable_tokens,
            max_tokens=max_tokens,
            choice=self._served.choose(parsed.temperature, parsed.top_p, parsed.seed),
            stops=parsed.stop_strings,
            stop_ids=(self._config.eos_token,),
        )

    def _check_model(self, parsed: Common) -> None:
        if parsed.model != self._served.name:
            raise unknown_model(parsed.model, self._served.name)


def unknown_model(asked: str, served: str) -> ApiError:
    """A model of another name."""
    return ApiError(
        404,
        f"the model {asked!r} is not served here; there is {served!r}",
        param="model",
        code="model_not_found",
    )


def _has_tools(parsed: ChatBody) -> bool:
    return bool(parsed.tools) or any(
        isinstance(message, Mapping) and message.get("tools") for message in parsed.messages
    )
