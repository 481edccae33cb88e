"""How a request comes in: its place in the house, its body, and the end of its connection."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from model_adapter.serve.errors import SERVER, ApiError, invalid
from model_adapter.serve.limits import ServeLimits

_RETRY_AFTER_S = "1"
_JSON = "application/json"
T = TypeVar("T")


class Desk:
    """Lets at most `requests_max` requests in. Lives on the event loop."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self.inside = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place, held until the answer is sent. Raises `ApiError` 503 where there is none."""
        if self.inside >= self._limits.requests_max:
            raise ApiError(
                503,
                f"{self.inside} requests are here already, and no more wait; try again later",
                kind=SERVER,
                code="overloaded",
                headers={"retry-after": _RETRY_AFTER_S},
            )
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def body(self, request: Request) -> Any:
        """The request's JSON. Raises `ApiError` where it is none, too large or too slow to come."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:
            # a web page can send other types to this address without asking
            raise ApiError(415, f"the content type must be {_JSON}, not {kind!r}")
        try:
            async with asyncio.timeout(self._limits.body_s_max):
                data = await self._read(request)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._limits.body_s_max:g} s"
            ) from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise invalid(f"the body is not JSON: {e}") from e

    async def _read(self, request: Request) -> bytes:
        limit = self._limits.body_bytes_max
        data = bytearray()
        async with aclosing(request.stream()) as stream:
            async for part in stream:
                data += part
                if len(data) > limit:
                    raise ApiError(413, f"the body has more than {limit} bytes")
        return bytes(data)


def in_time(send: Send, send_s_max: float) -> Send:
    """`send`, but a client that takes nothing for `send_s_max` seconds counts as gone."""

    async def bounded(message: Message) -> None:
        try:
            async with asyncio.timeout(send_s_max):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None

    return bounded


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None as soon as the client has closed its connection. The request's body
    has to be read already."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[0] if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
