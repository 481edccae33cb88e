"""The calls of `kvstore.store.Engine` that are about window snapshots and hand-over records."""

from kvstore.block import PutOutcome
from kvstore.store.driver import Driver
from kvstore.store.types import WindowFrame, WindowHead, WindowPut
from kvstore.store.windows import Windows, WindowWriter


class WindowCalls:
    """A part of `Engine`, which sets both fields."""

    _driver: Driver
    _windows: Windows

    @property
    def window_fill_s_max(self) -> float:
        """How long a payload that comes in pieces may take: `windows.fill_s_max`."""
        return self._driver.config.windows.fill_s_max

    async def put_window(self, namespace_id: bytes, put: WindowPut) -> PutOutcome:
        """A window snapshot or a hand-over record, in the place of one of the same name. NO_SPACE
        where the pool is full of what can't go, CORRUPT where the checksum is not the payload's.
        The payload MUST NOT change meanwhile.

        Raises `UnknownNamespace`, `InvalidRequest`, `MessageTooLarge`
        (`windows.payload_bytes_max`).
        """
        self._driver.enter()
        return await self._windows.put(namespace_id, put)

    def begin_window(self, namespace_id: bytes, head: WindowHead) -> WindowWriter | None:
        """`put_window`, for a payload that comes in pieces; None is NO_SPACE. Ends with the
        writer's `commit` or `abort`, one of which MUST be called. Raises what `put_window` does."""
        self._driver.enter()
        return self._windows.begin(namespace_id, head)

    async def get_window(self, namespace_id: bytes, name: bytes | str) -> WindowFrame | None:
        """The object of a name, verified; None for a miss. Its `done` MUST be called."""
        self._driver.enter()
        return await self._windows.get(namespace_id, name)

    async def wait_window(self, namespace_id: bytes, request_id: str, deadline_s: float) -> bool:
        """Whether the hand-over record of a request is there, after waiting for it until
        `deadline_s` from now (at most `limits.wait_s_max`). Raises `Overloaded` where too many
        wait."""
        self._driver.enter()
        return await self._windows.wait(namespace_id, request_id, deadline_s)

    def drop_window(self, namespace_id: bytes, name: bytes | str) -> bool:
        """Let the object of a name go; whether it was there."""
        self._driver.enter()
        return self._windows.drop(namespace_id, name)
