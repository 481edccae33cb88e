"""What every call passes: limits, deadline, error table, counters.

A call's work runs as a task of its own. A client that goes away or whose deadline passes stops
waiting for it, but the work runs to its end, so that no step of the store is cut in half; draining
waits for such tasks too.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import grpc

from kvstore.config import ServerConfig
from kvstore.errors import KVStoreError, MessageTooLarge, Unavailable
from kvstore.server.messages import SERVICE
from kvstore.server.metrics import CallMetrics
from kvstore.server.service import CollectHandler, Handler, Service, StreamHandler
from kvstore.server.status import to_status
from kvstore.server.wire import Parts

_log = logging.getLogger(__name__)
_GONE = "caller gone"
_UNLIMITED = frozenset({"Verify"})
"""Streams that take as long as they take."""
_INTERNAL = "the daemon failed; its log has the reason"


class Gate:
    """The service's handlers as gRPC wants them."""

    def __init__(self, service: Service, config: ServerConfig, metrics: CallMetrics) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Parts]] = set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Messages pass as bytes: decoding is the service's, where its errors are the table's."""
        unary = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(name, handler))
            for name, handler in self._service.unary().items()
        }
        streamed = {
            name: grpc.unary_stream_rpc_method_handler(self._streamed(name, handler))
            for name, handler in self._service.streamed().items()
        }
        collected = {
            name: grpc.stream_unary_rpc_method_handler(self._collected(name, handler))
            for name, handler in self._service.collected().items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, {**unary, **streamed, **collected})

    async def settle(self, timeout_s: float) -> None:
        """Wait for work whose caller has left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _timeout_s(self, context: Any) -> float:
        left: float | None = context.time_remaining()
        asked = self._config.deadline_s_default if left is None else left
        return min(asked, self._config.deadline_s_max)

    def _check_size(self, name: str, data: bytes) -> None:
        if len(data) > self._config.message_bytes_max:
            raise MessageTooLarge(
                f"a {name} message of {len(data)} B passes server.message_bytes_max = "
                f"{self._config.message_bytes_max} B; send less at a time"
            )

    async def _finish(self, work: Coroutine[Any, Any, Parts], timeout_s: float) -> bytes:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        if not done:
            raise _late(timeout_s)
        parts = task.result()
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _forget(self, task: asyncio.Task[Parts]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Takes note of the error of an abandoned call, which nobody is left to hear.
            task.exception()

    async def _abort(self, name: str, error: Exception, context: Any) -> str:
        """Fail the call. Raises what ends it."""
        if isinstance(error, KVStoreError):
            code, details, metadata = to_status(error)
            _log.debug("%s: %s: %s", name, type(error).__name__, error)
            await context.abort(code, details, metadata)
        _log.error("%s failed", name, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, _INTERNAL)
        raise AssertionError("abort returned")

    def _unary(self, name: str, handler: Handler) -> Any:
        async def call(data: bytes, context: Any) -> bytes:
            started_s, result = time.perf_counter(), _GONE
            try:
                self._check_size(name, data)
                reply = await self._finish(handler(data), self._timeout_s(context))
                result = "ok"
                return reply
            except Exception as e:
                result = type(e).__name__
                await self._abort(name, e, context)
                raise
            finally:
                self._metrics.observe(name, result, time.perf_counter() - started_s)

        return call

    def _streamed(self, name: str, handler: StreamHandler) -> Any:
        async def call(data: bytes, context: Any) -> None:
            started_s, result = time.perf_counter(), _GONE
            limit_s = None if name in _UNLIMITED else self._timeout_s(context)
            try:
                self._check_size(name, data)
                async with asyncio.timeout(limit_s), aclosing(handler(data)) as replies:
                    async for parts in replies:
                        await context.write(b"".join(parts))
                result = "ok"
            except TimeoutError:
                result = Unavailable.__name__
                await self._abort(name, _late(limit_s), context)
            except Exception as e:
                result = type(e).__name__
                await self._abort(name, e, context)
            finally:
                self._metrics.observe(name, result, time.perf_counter() - started_s)

        return call

    def _collected(self, name: str, handler: CollectHandler) -> Any:
        async def checked(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for data in requests:
                self._check_size(name, data)
                yield data

        async def call(requests: AsyncIterator[bytes], context: Any) -> bytes:
            started_s, result = time.perf_counter(), _GONE
            limit_s = self._timeout_s(context)
            try:
                async with asyncio.timeout(limit_s):
                    reply = b"".join(await handler(checked(requests)))
                result = "ok"
                return reply
            except TimeoutError:
                result = Unavailable.__name__
                await self._abort(name, _late(limit_s), context)
                raise
            except Exception as e:
                result = type(e).__name__
                await self._abort(name, e, context)
                raise
            finally:
                self._metrics.observe(name, result, time.perf_counter() - started_s)

        return call


def _late(timeout_s: float | None) -> Unavailable:
    return Unavailable(f"no answer within the deadline of {timeout_s:.3g} s")
