"""The routes. What OpenAI's API says of a route is not said again here; `docs/endpoint.md` has what
differs.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from model_adapter.errors import InputError
from model_adapter.serve.answers import Answer, Json
from model_adapter.serve.calls import Call, CallMaker, Served, unknown_model
from model_adapter.serve.desk import Desk, in_time, unless_gone
from model_adapter.serve.errors import INVALID, SERVER, ApiError, api_error
from model_adapter.serve.stream import MEDIA_TYPE, events
from model_adapter.serve.worker import Finished, Job, Worker

PREPARE_THREADS_MAX = 2
"""Requests that are rendered and tokenised, and whose pictures are read, at one time."""
OWNED_BY = "local"


class House:
    """What all routes share: the model's thread, and who is let in to it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.limits = served.limits
        self.desk = Desk(served.limits)
        self.worker = Worker(served.session, served.tokenizer)
        self.threads = anyio.CapacityLimiter(PREPARE_THREADS_MAX)
        self.started = int(time.time())

    def card(self) -> Json:
        """The model as `/v1/models` shows it."""
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.started,
            "owned_by": OWNED_BY,
        }

    async def health(self, request: Request) -> Response:
        """Whether requests are answered, and how many are here."""
        counts = {"requests": self.desk.inside, "waiting": self.worker.waiting}
        if not self.worker.alive:
            return JSONResponse({"status": "stopped"} | counts, 503)
        return JSONResponse({"status": "ok"} | counts)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self.card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        if name != self.served.name:
            raise unknown_model(name, self.served.name)
        return JSONResponse(self.card())


class Endpoint:
    """An ASGI application that answers requests with the model. `prepare`: of `CallMaker`."""

    def __init__(self, house: House, prepare: Callable[[Any], Call]) -> None:
        self._house = house
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._house.desk.place(), suppress(ClientDisconnect):
            await self._respond(scope, receive, in_time(send, self._house.limits.send_s_max))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        house = self._house
        body = await house.desk.body(Request(scope, receive))
        call = await anyio.to_thread.run_sync(self._prepare, body, limiter=house.threads)
        with Job(house.worker, call.task) as job:
            if response := await self._answer(job, call, receive):
                await response(scope, receive, send)

    async def _answer(self, job: Job, call: Call, receive: Receive) -> Response | None:
        headers = {"x-request-id": call.task.id}
        if call.stream:
            chunks = events(job, call.answer, self._house.limits.keep_alive_s)
            headers["cache-control"] = "no-cache"
            return StreamingResponse(chunks, media_type=MEDIA_TYPE, headers=headers)
        content = await unless_gone(receive, _whole(job, call.answer))
        return None if content is None else JSONResponse(content, headers=headers)


async def _whole(job: Job, answer: Answer) -> Json:
    pieces: list[str] = []
    async for said in job.events():
        if isinstance(said, Finished):
            return answer.whole(pieces, said)
        pieces.append(said or "")
    raise AssertionError("a job's events end with Finished")


async def _refused(request: Request, error: Exception) -> Response:
    shown = api_error(error)
    return JSONResponse(shown.body(), shown.status, headers=shown.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    kind = INVALID if error.status_code < 500 else SERVER
    shown = ApiError(error.status_code, message, kind=kind)
    return JSONResponse(shown.body(), shown.status, headers=error.headers)


def create_app(served: Served, hosts: list[str] | None = None) -> Starlette:
    """The application; its model thread runs from now on until the application's shutdown.

    `hosts`: the names by which requests may call this server, all where None. A web page that has
    its own name point to this address is refused by it.
    """
    house = House(served)
    make = CallMaker(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(house.worker.close)

    return Starlette(
        routes=[
            Route("/health", house.health),
            Route("/v1/models", house.models),
            Route("/v1/models/{name:path}", house.model),
            Route("/v1/completions", Endpoint(house, make.completion), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(house, make.chat), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, hosts, False)] if hosts else [],
        exception_handlers={
            ApiError: _refused,
            InputError: _refused,
            HTTPException: _no_route,
            Exception: _refused,
        },
        lifespan=lifespan,
    )
