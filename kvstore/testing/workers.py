"""`kvstore.migration.workers.Workers` without threads, in an order that a seed decides."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from kvstore.migration.workers import Lane

T = TypeVar("T")


class SimulatedWorkers:
    """Work runs on the loop's own thread, some time after it was handed in: up to `latency_s` of
    the loop's clock, drawn from `random`. What goes to the log keeps its order; the rest overtakes
    freely."""

    def __init__(self, random: Random, latency_s: float = 0.001) -> None:
        self.random, self.latency_s = random, latency_s
        self._log: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._log_busy = False

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if lane is Lane.LOG:
            self._log.append((future, work))
            self._next_of_log()
        else:
            loop.call_later(self._delay(), self._execute, future, work)
        return await future

    def _delay(self) -> float:
        return self.random.random() * self.latency_s

    def _next_of_log(self) -> None:
        if self._log and not self._log_busy:
            self._log_busy = True
            asyncio.get_running_loop().call_later(self._delay(), self._execute_log)

    def _execute_log(self) -> None:
        future, work = self._log.popleft()
        self._log_busy = False
        self._execute(future, work)
        self._next_of_log()

    @staticmethod
    def _execute(future: "asyncio.Future[T]", work: Callable[[], T]) -> None:
        # executed even where nobody waits any more, as a thread would
        try:
            result = work()
        except Exception as e:
            if not future.done():
                future.set_exception(e)
        else:
            if not future.done():
                future.set_result(result)

    def close(self) -> None:
        self._log.clear()
