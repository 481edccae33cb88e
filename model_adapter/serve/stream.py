"""Answers as they come: server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from model_adapter.serve.answers import Answer
from model_adapter.serve.errors import api_error
from model_adapter.serve.worker import Finished, Job

MEDIA_TYPE = "text/event-stream"
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients skip."""


def event(data: dict[str, Any]) -> str:
    """One event. A chunk is one line, as JSON escapes line ends."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def events(job: Job, answer: Answer, keep_alive_s: float) -> AsyncIterator[str]:
    """An answer's chunks. An error that comes when the status is sent already is the last event."""
    try:
        for chunk in answer.start():
            yield event(chunk)
        async for said in job.events(keep_alive_s):
            if said is None:
                yield KEEP_ALIVE
                continue
            for chunk in answer.end(said) if isinstance(said, Finished) else answer.piece(said):
                yield event(chunk)
    except Exception as e:
        yield event(api_error(e).body())
        return
    yield DONE
