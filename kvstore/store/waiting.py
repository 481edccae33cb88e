"""Bounded waits on the event loop: for bytes of a budget, for a key to settle, for any change."""

import asyncio
from collections import deque
from collections.abc import Iterable

from kvstore.errors import Overloaded


async def wait_until(future: "asyncio.Future[None]", deadline_s: float) -> bool:
    """Whether the future was done before `deadline_s` (on the loop's clock); cancelled if not."""
    timeout_s = deadline_s - asyncio.get_running_loop().time()
    try:
        if timeout_s > 0:
            await asyncio.wait((future,), timeout=timeout_s)
        return future.done()
    finally:
        future.cancel()


class ByteBudget:
    """So many bytes at a time, first come, first served. A request for more than there are in all
    gets its turn alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = self._free = capacity_bytes
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int, deadline_s: float) -> bool:
        """Whether the bytes were granted before `deadline_s` (on the loop's clock)."""
        size_bytes = min(size_bytes, self._capacity)
        if not self._queue and size_bytes <= self._free:
            self._free -= size_bytes
            return True
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size_bytes, turn))
        try:
            granted = await wait_until(turn, deadline_s)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back(size_bytes)
            raise
        if not granted:
            self._serve()
        return granted

    def give_back(self, size_bytes: int) -> None:
        """What `take` granted is free again."""
        self._free += min(size_bytes, self._capacity)
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            size_bytes, turn = self._queue[0]
            if turn.done():
                self._queue.popleft()
            elif size_bytes <= self._free:
                self._queue.popleft()
                self._free -= size_bytes
                turn.set_result(None)
            else:
                return

    @property
    def taken_bytes(self) -> int:
        """Bytes that are out now."""
        return self._capacity - self._free


class KeyWaiters:
    """Who waits for something to happen to a key; at most `waiters_max` in all."""

    def __init__(self, waiters_max: int) -> None:
        self._max = waiters_max
        self._waiting = 0
        self._by_key: dict[bytes, list[asyncio.Future[None]]] = {}

    async def wait(self, key: bytes, deadline_s: float) -> bool:
        """Whether `wake` named the key before `deadline_s`. Raises `Overloaded`."""
        if self._waiting >= self._max:
            raise Overloaded(f"{self._max} calls wait already (limits.waiters_max)")
        future = asyncio.get_running_loop().create_future()
        waiters = self._by_key.setdefault(key, [])
        waiters.append(future)
        self._waiting += 1
        try:
            return await wait_until(future, deadline_s)
        finally:
            self._waiting -= 1
            waiters.remove(future)
            if not waiters and self._by_key.get(key) is waiters:
                del self._by_key[key]

    def wake(self, keys: Iterable[bytes]) -> None:
        """Something happened to these keys."""
        for key in keys:
            for future in self._by_key.get(key, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        """Nothing will happen any more."""
        self.wake(list(self._by_key))
