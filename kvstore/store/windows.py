"""The order of steps for window snapshots and hand-over records.

A put makes room, copies and checksums what then lies there on a worker, and only then the object
exists; so a reader never meets half of one, and one of the same name stays until its successor is
whole. A copy that has begun runs to its end, whoever stops waiting for it: its memory is in use
till then.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.block import Buffer, Match, PutOutcome, SnapshotPlace, check_window_name
from kvstore.errors import InvalidRequest, MessageTooLarge
from kvstore.migration.workers import Lane, as_bytes
from kvstore.namespace import DIGEST_BYTES
from kvstore.store.driver import Driver
from kvstore.store.types import WindowFrame, WindowHead, WindowPut
from kvstore.tiers.frame import CHECKSUM_BYTES
from kvstore.windows import Held, Name, Room

Payload = npt.NDArray[np.uint8]


class Windows:
    """See the module. Belongs to the event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._core = driver.core
        self._pool = driver.core.windows
        self._config = driver.config.windows

    # puts

    async def put(self, namespace_id: bytes, put: WindowPut) -> PutOutcome:
        """See `Engine.put_window`."""
        payload = _payload(put.payload, put.head.payload_bytes)
        writer = self.begin(namespace_id, put.head)
        if writer is None:
            return PutOutcome.NO_SPACE
        return await writer.commit(payload)

    def begin(self, namespace_id: bytes, head: WindowHead) -> "WindowWriter | None":
        """See `Engine.begin_window`."""
        number = self._core.namespaces.number(namespace_id)
        ttl_s = self._check(number, head)
        room = self._pool.reserve(head.payload_bytes, self._driver.now_s())
        if room is None:
            self._core.metrics.add("windows_refused")
            return None
        return WindowWriter(self, namespace_id, number, head, ttl_s, room)

    def _check(self, number: int, head: WindowHead) -> float:
        """What the object's life will be."""
        check_window_name(head.name)
        if len(head.checksum) != CHECKSUM_BYTES:
            raise InvalidRequest(
                f"a payload's checksum has {CHECKSUM_BYTES} bytes, not {len(head.checksum)}"
            )
        limit = self._config.payload_bytes_max
        if not 0 <= head.payload_bytes <= limit:
            raise MessageTooLarge(
                f"a payload of {head.payload_bytes} B passes windows.payload_bytes_max ({limit} B)"
            )
        if (head.place is None) != isinstance(head.name, str):
            raise InvalidRequest("a snapshot has a key and a place, a hand-over a request id")
        if head.place is not None:
            self._check_place(number, head.place)
        if head.ttl_s is None:
            return self._config.ttl_s_default
        if not head.ttl_s > 0:
            raise InvalidRequest(f"ttl_s must be above 0, not {head.ttl_s!r}")
        return min(head.ttl_s, self._config.ttl_s_max)

    def _check_place(self, number: int, place: SnapshotPlace) -> None:
        tokens = self._core.namespaces.layout(number).block_tokens
        if len(place.parent) != DIGEST_BYTES:
            raise InvalidRequest(
                f"a snapshot's parent has {DIGEST_BYTES} bytes, not {len(place.parent)}"
            )
        if place.blocks < 0 or not 0 <= place.tail_tokens < tokens:
            raise InvalidRequest(
                f"a snapshot lies behind ≥ 0 blocks and fewer than {tokens} tokens, not "
                f"{place.blocks} and {place.tail_tokens}"
            )
        if not place.blocks and place.parent != self._core.namespaces.ids[number]:
            raise InvalidRequest(
                "the parent of a snapshot before the first block's end is the namespace id, not "
                f"{place.parent.hex()}"
            )

    def settle(self, writer: "WindowWriter", right: bool) -> PutOutcome:
        """The payload is there, and is or is not what its checksum says."""
        head = writer.head
        if not right:
            self._pool.discard(writer.room)
            self._core.metrics.add("corrupt_windows")
            return PutOutcome.CORRUPT
        expires_s = self._driver.now_s() + writer.ttl_s
        self._pool.put(writer.room, writer.number, head.name, head.place, head.checksum, expires_s)
        self._core.metrics.add("windows_stored")
        if isinstance(head.name, str):
            self._driver.settled.wake((_waited_for(writer.namespace_id, head.name),))
        return PutOutcome.STORED

    def discard(self, writer: "WindowWriter") -> None:
        """The payload will not come."""
        self._pool.discard(writer.room)

    async def fill(self, writer: "WindowWriter", payload: Payload | None) -> PutOutcome:
        """Copy, where it is not there yet, and check on a worker; what began ends."""
        return await asyncio.shield(self._driver.loop.create_task(self._fill(writer, payload)))

    async def _fill(self, writer: "WindowWriter", payload: Payload | None) -> PutOutcome:
        view = self._pool.room_view(writer.room)
        right = False
        try:
            work = partial(_copied_right, view, payload, writer.head.checksum)
            right = await self._driver.workers.run(Lane.BYTES, work)
        except BaseException:
            self.discard(writer)
            raise
        return self.settle(writer, right)

    def room_view(self, writer: "WindowWriter") -> memoryview:
        """Where the payload goes."""
        return self._pool.room_view(writer.room)

    # gets

    async def get(self, namespace_id: bytes, name: Name) -> WindowFrame | None:
        """See `Engine.get_window`."""
        check_window_name(name)
        number = self._core.namespaces.number(namespace_id)
        held = self._pool.peek(number, name, self._driver.now_s())
        if held is None:
            self._core.metrics.add("windows_miss")
            return None
        view = self._pool.use(held)
        try:
            work = partial(xxhash.xxh3_128_digest, view)
            digest = await self._driver.workers.run(Lane.BYTES, work)
        except BaseException:
            self._pool.end_use(held)
            raise
        if digest != held.checksum:
            self._quarantine(held)
            return None
        self._core.metrics.add("windows_hit")
        return WindowFrame(view, held.checksum, partial(self._pool.end_use, held))

    def _quarantine(self, held: Held) -> None:
        if held.live:
            self._pool.remove(held)
        self._pool.end_use(held)
        self._core.metrics.add("corrupt_windows")
        self._core.metrics.add("windows_miss")

    async def wait(self, namespace_id: bytes, request_id: str, deadline_s: float) -> bool:
        """See `Engine.wait_window`."""
        check_window_name(request_id)
        number = self._core.namespaces.number(namespace_id)
        limit_s = self._driver.config.limits.wait_s_max
        deadline = self._driver.deadline(min(deadline_s, limit_s))
        key = _waited_for(namespace_id, request_id)
        while self._pool.peek(number, request_id, self._driver.now_s()) is None:
            if not await self._driver.settled.wait(key, deadline):
                return False
            self._driver.enter()
        return True

    def drop(self, namespace_id: bytes, name: Name) -> bool:
        """See `Engine.drop_window`."""
        check_window_name(name)
        number = self._core.namespaces.number(namespace_id)
        return self._pool.drop(number, name, self._driver.now_s())

    # lookups

    def shown(self, namespace_id: bytes, keys: Sequence[bytes], match: Match) -> Match:
        """The match with the snapshots on its chain."""
        number = self._core.namespaces.number(namespace_id)
        snapshots = self._pool.on_chain(number, namespace_id, keys, self._driver.now_s())
        return replace(match, snapshots=snapshots) if snapshots else match


class WindowWriter:
    """One object on its way in: `append` until all of it came, then `commit`; or `abort`."""

    def __init__(
        self,
        windows: Windows,
        namespace_id: bytes,
        number: int,
        head: WindowHead,
        ttl_s: float,
        room: Room,
    ) -> None:
        self._windows = windows
        self.namespace_id, self.number = namespace_id, number
        self.head, self.ttl_s, self.room = head, ttl_s, room
        self._have = 0
        self._ended = False

    def append(self, piece: Buffer) -> None:
        """The next bytes, copied here and now. Raises `InvalidRequest` for too many."""
        data = as_bytes(piece)
        if self._have + data.size > self.head.payload_bytes:
            raise InvalidRequest(
                f"more than the {self.head.payload_bytes} B of payload that were announced"
            )
        view = self._windows.room_view(self)
        np.copyto(np.frombuffer(view, np.uint8)[self._have : self._have + data.size], data)
        self._have += data.size

    async def commit(self, payload: Payload | None = None) -> PutOutcome:
        """All of it came, in pieces or as `payload`. Raises `InvalidRequest` where it did not."""
        if payload is None and self._have != self.head.payload_bytes:
            self.abort()
            raise InvalidRequest(
                f"{self._have} B of payload came, {self.head.payload_bytes} B were announced"
            )
        self._ended = True
        return await self._windows.fill(self, payload)

    def abort(self) -> None:
        """Give the room back; nothing after the end."""
        if not self._ended:
            self._ended = True
            self._windows.discard(self)


def _waited_for(namespace_id: bytes, request_id: str) -> bytes:
    """What a waiter for a hand-over waits for: longer than any block's key."""
    return namespace_id + request_id.encode()


def _payload(buffer: Buffer, size: int) -> Payload:
    try:
        data = as_bytes(buffer)
    except (TypeError, ValueError, BufferError) as e:
        raise InvalidRequest(f"a payload is a contiguous buffer: {e}") from e
    if data.size != size:
        raise InvalidRequest(f"a payload of {data.size} B was announced with {size} B")
    return data


def _copied_right(view: memoryview, payload: Payload | None, checksum: bytes) -> bool:
    """Copy, and whether what then lies there has the checksum."""
    if payload is not None:
        np.copyto(np.frombuffer(view, np.uint8), payload)
    return xxhash.xxh3_128_digest(view) == checksum
