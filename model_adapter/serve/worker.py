"""The one thread that runs the model, and the requests that wait for it.

Handlers live on the event loop and hand in a `Task`; the thread runs one after the other, first
come, first served, and sends text back as it comes. How many tasks there may be is the handlers'
to bound (`Desk`); a handler that leaves takes its task with it: from the queue at once, from the
model at the next token or prefill chunk.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvstore import Outlook
from model_adapter.chat.tokens import CALLS_OPEN, THINK_CLOSE
from model_adapter.serve.errors import SERVER, ApiError
from model_adapter.serve.sampling import Choice
from model_adapter.serve.text import AnswerText
from model_adapter.session import CachedSession, RequestReport
from model_adapter.tokenizer import decode_answer
from model_adapter.vision import ImagePatches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What the model is to do. `token_ids`: the prompt. `choice`: how tokens are chosen.
    `stable_tokens`: of a conversation, see `Prompt`; None tells the store nothing."""

    id: str
    token_ids: npt.NDArray[np.integer]
    images: Sequence[ImagePatches]
    max_tokens: int
    choice: Choice
    stops: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    stable_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `reason`: `stop` or `length`, OpenAI's words."""

    reason: str
    report: RequestReport
    token_ids: list[int] = field(default_factory=list)


class Job:
    """A task on its way; a context manager, left by whoever no longer wants the answer."""

    def __init__(self, worker: "Worker", task: Task) -> None:
        self.task = task
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        # holds at most a piece per token of the answer: the model never waits for a client
        self._events: asyncio.Queue[str | Finished | Exception] = asyncio.Queue()
        self._left = threading.Event()

    def __enter__(self) -> "Job":
        self._worker.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._worker.discard(self)

    async def events(self, quiet_s: float | None = None) -> AsyncIterator[str | Finished | None]:
        """Pieces of text, then `Finished`; None where nothing came for `quiet_s` seconds.

        Raises what the model raised.
        """
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), quiet_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def run(self, session: CachedSession, tokenizer: Tokenizer) -> None:
        """Answer, on the model's thread; an error goes to the handler."""
        if self._left.is_set():
            return
        try:
            self._generate(session, tokenizer)
        except Exception as e:
            logger.exception("%s failed", self.task.id)
            self._emit(e)

    def fail(self, error: Exception) -> None:
        """Tell the handler that there will be no more of it, and stop."""
        self._emit(error)
        self._left.set()

    def _generate(self, session: CachedSession, tokenizer: Tokenizer) -> None:
        task = self.task
        text = AnswerText(tokenizer, task.stops, task.stop_ids)

        def on_token(token_id: int) -> None:
            if piece := text.feed(token_id):
                self._emit(piece)

        answer = session.generate(
            task.token_ids,
            task.max_tokens,
            task.stop_ids,
            on_token,
            images=task.images,
            decode=task.choice.decode,
            drafts=task.choice.drafts,
            stopped=lambda: text.stopped or self._left.is_set(),
        )
        if piece := text.finish():
            self._emit(piece)
        ended = bool(answer.token_ids) and answer.token_ids[-1] in task.stop_ids
        reason = "stop" if ended or text.stopped else "length"
        _log(task, reason, answer.report, self._left.is_set())
        self._emit(Finished(reason, answer.report, answer.token_ids))
        if reason == "stop" and task.stable_tokens is not None:
            _tell(session, tokenizer, task, answer.token_ids)

    def _emit(self, event: str | Finished | Exception) -> None:
        if not self._left.is_set():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """The model's thread. `close` ends it."""

    def __init__(self, session: CachedSession, tokenizer: Tokenizer) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether tasks are run."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Tasks that have not begun."""
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Queue it. Raises `ApiError` once the worker is closed."""
        with self._changed:
            if self._closed:
                raise closing()
            self._jobs.append(job)
            self._changed.notify()

    def discard(self, job: Job) -> None:
        """Take it from the queue, if it is still there."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)

    def close(self) -> None:
        """Turn all tasks away; returns when the model has come to rest."""
        with self._changed:
            self._closed = True
            left = [*self._jobs, *([self._running] if self._running else [])]
            self._jobs.clear()
            self._changed.notify()
        for job in left:
            job.fail(closing())
        self._thread.join()

    def _run(self) -> None:
        while job := self._next():
            job.run(self._session, self._tokenizer)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._running = self._jobs.popleft() if self._jobs else None
            return self._running


def closing() -> ApiError:
    """The server is going away."""
    return ApiError(503, "the server is shutting down; try another", kind=SERVER)


def reasoning_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """How many tokens of an answer that began with reasoning are reasoning, its end mark
    included."""
    close = tokenizer.token_to_id(THINK_CLOSE)
    return token_ids.index(close) + 1 if close in token_ids else len(token_ids)


def _tell(session: CachedSession, tokenizer: Tokenizer, task: Task, answer: Sequence[int]) -> None:
    """Tell the store what follows. A call's result comes behind all of the prompt and the answer;
    what a person says next, behind what the chat format keeps of them."""
    calls = CALLS_OPEN in decode_answer(tokenizer, list(answer))
    stable = task.stable_tokens or 0
    session.answered(
        [*task.token_ids.tolist(), *answer],
        Outlook.TOOL_CALL if calls else Outlook.USER_TURN,
        None if calls or stable >= len(task.token_ids) else stable,
        task.images,
    )


def _log(task: Task, reason: str, report: RequestReport, left: bool) -> None:
    logger.info(
        "%s %s: prompt %d, %s %d (%s), replayed %d, generated %d, first token %.3f s, all %.3f s%s",
        task.id,
        "left by its client" if left else reason,
        report.prompt_tokens,
        report.outcome.value,
        report.hit_tokens,
        report.tiers,
        report.replayed_tokens,
        report.generated_tokens,
        report.ttft_s,
        report.total_s,
        f"; store: {report.store_error}" if report.store_error else "",
    )
