"""Server-sent events, to a client that reads them or is given up."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients skip."""

logger = logging.getLogger(__name__)


def event(data: dict[str, Any]) -> str:
    """One event. A chunk is one line, as JSON escapes line ends."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """`events` as they come. A client that takes nothing for `send_s_max` seconds is given up;
    one that goes away ends the response."""

    def __init__(self, events: AsyncIterator[str], headers: dict[str, str], send_s_max: float):
        super().__init__(
            events,
            media_type="text/event-stream",
            headers=headers | {"cache-control": "no-cache"},
        )
        self._send_s_max = send_s_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(self._send_s_max):
                await send(message)

        try:
            await super().__call__(scope, receive, bounded)
        except TimeoutError:
            logger.warning("a client took nothing for %g s; it is given up", self._send_s_max)
