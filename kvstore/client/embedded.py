"""The transport to a store inside this process.

The engine runs on one event loop: the caller's own (suspending), or a private one on a thread of
its own (blocking). Every call is one task on that loop, whichever thread or loop it comes from; a
caller that stops waiting, because its time is up or because it was cancelled, leaves the task to
run to its end, so no step of the store is cut in half.

What `read` returns are copies: they outlive leases, evictions and the store itself. What `view_hbm`
shows lies in the store's own pools, and MUST be gone before the client is closed.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.block import BlockPut, Durability, HbmBlock, Match, Outlook, PutOutcome, Tier
from kvstore.client.shared_arena import places_by_key
from kvstore.client.shared_hbm import HbmLease, SharedHbmView
from kvstore.client.transport import ArrivedWindow, BulkRead, NoBulk, Progress
from kvstore.config import StoreConfig
from kvstore.errors import Unavailable
from kvstore.namespace import Namespace
from kvstore.store import Engine
from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    VerifyReport,
    WindowPut,
)
from kvstore.tiers.hbm.device import DeviceError

_log = logging.getLogger(__name__)

CLOSE_GRACE_S = 30.0
"""Beyond the engine's own bound on closing."""
_T = TypeVar("_T")


class LoopRunner:
    """Runs the engine's calls on the event loop that is running now; awaits them from any loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Future[Any]] = set()

    async def run(self, call: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Raises `Unavailable` after `timeout_s`."""
        if self._loop.is_closed():
            call.close()
            raise Unavailable("the event loop of this store is closed")
        task: asyncio.Future[_T]
        if asyncio.get_running_loop() is self._loop:
            task = self._loop.create_task(call)
        else:
            task = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            raise _late(timeout_s)
        return task.result()

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Takes note of the error of an abandoned call, which nobody is left to hear.
            task.exception()

    def stop(self) -> None:
        """Nothing to stop: the loop is the caller's."""


class ThreadRunner:
    """Runs the engine's calls on a private loop and thread, and blocks until they are done."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvstore-engine", daemon=True
        )
        self._thread.start()

    async def run(self, call: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Raises `Unavailable` after `timeout_s`."""
        if self._loop.is_closed():
            call.close()
            raise Unavailable("this client is closed")
        future: Future[_T] = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            raise _late(timeout_s) from None

    def stop(self) -> None:
        """End the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Runner = LoopRunner | ThreadRunner


def _late(timeout_s: float) -> Unavailable:
    return Unavailable(f"the embedded store did not answer within {timeout_s:g} s")


def _copied(block: BlockFrames) -> BlockFrames:
    return BlockFrames(
        key=block.key,
        outcome=block.outcome,
        tier=block.tier,
        sections=tuple([memoryview(bytes(section)) for section in block.sections]),
        checksums=block.checksums,
    )


class EmbeddedTransport(NoBulk):
    """`kvstore.client.transport.Transport` over an engine of this process."""

    def __init__(self, engine: Engine, runner: Runner, config: StoreConfig) -> None:
        self._engine = engine
        self._runner = runner
        self._config = config
        self._closed = False
        self._hbm: SharedHbmView | None = None
        self._leases: dict[int, HbmLease] = {}
        """Of those acquired since `open_hbm`, in the order of entry."""

    @classmethod
    async def open(
        cls, config: StoreConfig, runner: Runner, timeout_s: float
    ) -> "EmbeddedTransport":
        """Raises what `Engine.open` does."""
        try:
            engine = await runner.run(Engine.open(config), timeout_s)
        except BaseException:
            runner.stop()
            raise
        return cls(engine, runner, config)

    @property
    def message_bytes_max(self) -> int | None:
        return None

    async def _run(self, call: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
        if self._closed:
            raise Unavailable("this client is closed")

        async def task() -> _T:
            return await call()

        return await self._runner.run(task(), timeout_s)

    async def _ask(self, call: Callable[[], _T], timeout_s: float) -> _T:
        """A call that the engine answers without waiting."""

        async def answer() -> _T:
            return call()

        return await self._run(answer, timeout_s)

    async def open_namespace(self, namespace: Namespace, timeout_s: float) -> bytes:
        return await self._ask(lambda: self._engine.open_namespace(namespace), timeout_s)

    async def match(self, namespace_id: bytes, keys: Sequence[bytes], timeout_s: float) -> Match:
        return await self._ask(lambda: self._engine.match(namespace_id, keys), timeout_s)

    async def wait_for(
        self, namespace_id: bytes, keys: Sequence[bytes], wait_s: float, timeout_s: float
    ) -> Match:
        wait_s = min(wait_s, self._config.limits.wait_s_max)
        return await self._run(
            lambda: self._engine.wait_for(namespace_id, keys, wait_s), wait_s + timeout_s
        )

    async def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], ttl_s: float | None, timeout_s: float
    ) -> LeaseGrant:
        async def acquire() -> LeaseGrant:
            grant = await self._engine.acquire(namespace_id, keys, ttl_s)
            if self._hbm is not None:
                slots = self._engine.locate_hbm(grant.lease_id)
                self._keep(grant, HbmLease(self._hbm, places_by_key(keys, slots.tobytes()), 0.0))
            return grant

        return await self._run(acquire, timeout_s)

    def _keep(self, grant: LeaseGrant, lease: HbmLease) -> None:
        now_s = time.monotonic()
        for lease_id, other in list(self._leases.items()):
            if other.expires_s < now_s:
                self._leases.pop(lease_id, None)
        lease.expires_s = now_s + grant.ttl_s
        self._leases[grant.lease_id] = lease

    async def renew(self, lease_id: int, ttl_s: float | None, timeout_s: float) -> float:
        granted_s = await self._run(lambda: self._engine.renew(lease_id, ttl_s), timeout_s)
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.expires_s = time.monotonic() + granted_s
        return granted_s

    async def release(self, lease_id: int, timeout_s: float) -> None:
        self._leases.pop(lease_id, None)
        await self._run(lambda: self._engine.release(lease_id), timeout_s)

    def intact(self, lease_id: int, keys: Sequence[bytes]) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.intact(keys)

    async def open_hbm(self, timeout_s: float) -> str | None:
        if self._hbm is None:
            try:
                pools = await self._ask(self._engine.view_hbm, timeout_s)
            except DeviceError as e:
                _log.warning("hbm can't be read in place: %s", e)
                return None
            self._hbm = None if pools is None else SharedHbmView(pools)
        return None if self._hbm is None else self._hbm.kind

    def view_hbm(self, read: BulkRead) -> list[HbmBlock | None]:
        lease = self._leases.get(read.lease_id)
        if lease is None or lease.expires_s <= time.monotonic():
            return [None] * len(read.keys)
        return lease.blocks(read)

    async def read(
        self,
        lease_id: int,
        keys: Sequence[bytes],
        sections: Sequence[int] | None,
        timeout_s: float,
    ) -> list[BlockFrames]:
        async def read() -> list[BlockFrames]:
            frames = await self._engine.read(lease_id, keys, sections, verify=False)
            try:
                return [_copied(block) for block in frames]
            finally:
                for block in frames:
                    block.done()

        return await self._run(read, timeout_s)

    async def put_window(self, namespace_id: bytes, put: WindowPut, timeout_s: float) -> PutOutcome:
        return await self._run(lambda: self._engine.put_window(namespace_id, put), timeout_s)

    async def get_window(
        self, namespace_id: bytes, name: bytes | str, timeout_s: float
    ) -> ArrivedWindow | None:
        async def get() -> ArrivedWindow | None:
            frame = await self._engine.get_window(namespace_id, name)
            if frame is None:
                return None
            try:
                return ArrivedWindow(bytes(frame.payload), frame.checksum)
            finally:
                frame.done()

        return await self._run(get, timeout_s)

    async def wait_window(
        self, namespace_id: bytes, request_id: str, wait_s: float, timeout_s: float
    ) -> bool:
        wait_s = min(wait_s, self._config.limits.wait_s_max)
        return await self._run(
            lambda: self._engine.wait_window(namespace_id, request_id, wait_s), wait_s + timeout_s
        )

    async def drop_window(self, namespace_id: bytes, name: bytes | str, timeout_s: float) -> bool:
        return await self._ask(lambda: self._engine.drop_window(namespace_id, name), timeout_s)

    async def answered(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None,
        timeout_s: float,
    ) -> None:
        await self._run(
            lambda: self._engine.answered(namespace_id, keys, outlook, lasting_blocks), timeout_s
        )

    async def report_corrupt(self, namespace_id: bytes, key: bytes, timeout_s: float) -> None:
        await self._run(lambda: self._engine.report_corrupt(namespace_id, key), timeout_s)

    async def put(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome]:
        return await self._run(
            lambda: self._engine.put(namespace_id, blocks, durability), timeout_s
        )

    async def reserve(
        self,
        namespace_id: bytes,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None,
        timeout_s: float,
    ) -> ReservationGrant:
        return await self._run(lambda: self._engine.reserve(namespace_id, blocks, ttl_s), timeout_s)

    async def write(self, reservation_id: int, block: BlockPut, timeout_s: float) -> None:
        await self._run(
            lambda: self._engine.write(
                reservation_id, block.key, block.sections, block.checksums or ()
            ),
            timeout_s,
        )

    async def commit(
        self, reservation_id: int, durability: Durability, timeout_s: float
    ) -> list[PutOutcome]:
        return await self._run(lambda: self._engine.commit(reservation_id, durability), timeout_s)

    async def abort(self, reservation_id: int, timeout_s: float) -> None:
        await self._run(lambda: self._engine.abort(reservation_id), timeout_s)

    async def evict(
        self,
        namespace_id: bytes | None,
        keys: Sequence[bytes] | None,
        tier: Tier | None,
        timeout_s: float,
    ) -> int:
        return await self._run(lambda: self._engine.evict(namespace_id, keys, tier), timeout_s)

    async def flush(self, timeout_s: float) -> None:
        await self._run(self._engine.flush, timeout_s)

    async def verify(self, progress: Progress | None, timeout_s: float) -> VerifyReport:
        return await self._run(lambda: self._engine.verify(progress), timeout_s)

    async def stat(self, timeout_s: float) -> Stat:
        return await self._ask(self._engine.stat, timeout_s)

    async def ls(
        self, namespace_id: bytes | None, limit: int, after: bytes | None, timeout_s: float
    ) -> list[BlockInfo]:
        return await self._ask(lambda: self._engine.ls(namespace_id, limit, after), timeout_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._leases.clear()
        if self._hbm is not None:
            self._hbm.close()
        try:
            await self._runner.run(
                self._engine.close(), self._config.limits.drain_s_max + CLOSE_GRACE_S
            )
        finally:
            self._runner.stop()
