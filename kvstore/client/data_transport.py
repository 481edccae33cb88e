"""The transport to a daemon that has a data port: hot calls and bytes over it, the rest over gRPC.

On one host the arena is mapped, and `read` is a copy out of it without any message, `put` a copy
into the staging area and a short message. Between hosts, bytes follow their message on the stream.
Where the data port can't be reached, everything goes over gRPC, unless the URL forbids that.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.block import BlockPut, Durability, HbmBlock, PutOutcome
from kvstore.client import port_windows
from kvstore.client.port_pool import PortPool
from kvstore.client.port_puts import Putting
from kvstore.client.port_reads import AHEAD, Reading
from kvstore.client.port_stream import PortStream, PortUnreachable, StreamLost
from kvstore.client.remote import Carrier, RemoteTransport
from kvstore.client.shared_arena import LocatedLease, Pieces, SharedArenaView, places_by_key
from kvstore.client.shared_hbm import SharedHbmView, open_shared
from kvstore.client.transport import Arrived, ArrivedWindow, BulkRead
from kvstore.client.url import StoreURL
from kvstore.errors import KVStoreError, MessageTooLarge, Unavailable
from kvstore.namespace import Namespace
from kvstore.server import messages, wire
from kvstore.server.port.frames import NUMBER_OF_METHOD
from kvstore.store.types import LeaseGrant, WindowPut
from kvstore.tiers.hbm.device import DeviceError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class DataTransport(RemoteTransport):
    """See the module. `blocking`: work on the calling thread, or beside the event loop."""

    def __init__(self, carrier: Carrier, url: StoreURL, blocking: bool) -> None:
        super().__init__(carrier, url.text)
        self._pool = PortPool(url)
        self._data, self._blocking = url.data, blocking
        self._layouts: dict[bytes, tuple[int, ...]] = {}
        self._leases: dict[int, LocatedLease] = {}
        self._arena: SharedArenaView | None = None
        self._arena_lock = threading.Lock()
        self._hbm_wanted = False
        self._hbm: tuple[bytes, SharedHbmView | None] | None = None
        """The instance whose pools were asked for, and what came of it."""

    # streams

    def _met(self, hello: Any) -> None:
        has_port = hello.HasField("data_port") and self._data != "grpc"
        self._pool.announce(hello.data_port if has_port else None)

    async def _do(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run something that blocks."""
        if self._blocking:
            return function(*args)
        return await asyncio.to_thread(function, *args)

    async def meet(self, timeout_s: float) -> None:
        """Reach the daemon by the way that the URL demands. Raises `Unavailable`."""
        await self.hello(timeout_s)
        if self._data not in ("port", "shared"):
            return
        try:
            stream = await self._stream(timeout_s)
        except PortUnreachable as e:
            raise Unavailable(f"{self._peer}: the data port can't be reached: {e}") from e
        self._pool.give(stream)
        if self._data == "shared" and self._arena is None:
            raise Unavailable(
                f"{self._peer}: the daemon shares no memory (server.data_port.share, or it runs "
                "as another user)"
            )

    async def _stream(self, timeout_s: float) -> PortStream:
        """A stream for one call. Raises `PortUnreachable`."""
        stream = self._pool.idle()
        if stream is not None:
            return stream
        if self._pool.needs_token:
            await self.hello(timeout_s)
        return await self._do(self._open_stream, timeout_s)

    def _open_stream(self, timeout_s: float) -> PortStream:
        stream = self._pool.open(timeout_s)
        fd, stream.arena_fd = stream.arena_fd, -1
        if fd < 0:
            return stream
        try:
            with self._arena_lock:
                arena = self._arena
                same = arena is not None and arena.instance_id == stream.opened.instance_id
                if not same or arena is None or not arena.alive:
                    self._arena = SharedArenaView(stream, fd)
        except (OSError, ValueError) as e:
            _log.warning("the arena can't be mapped: %s", e)
        finally:
            os.close(fd)
        return stream

    @property
    def _port_wanted(self) -> bool:
        return not self._pool.closed and (self._pool.usable or self._pool.forced)

    async def _over_port(self, call: Callable[[PortStream], _T], timeout_s: float) -> _T:
        """Run a call on a stream; once more on a new one where an idle one had been closed.

        Raises `PortUnreachable` where nothing was asked, the daemon's errors, and `Unavailable`.
        """
        while True:
            stream = await self._stream(timeout_s)
            reused = stream.used
            try:
                result = await self._do(call, stream)
            except StreamLost as e:
                stream.close()
                self._pool.drop_idle()
                if reused and not e.answered:
                    continue
                raise Unavailable(f"{self._peer}: the data port's connection ended: {e}") from e
            except KVStoreError as e:
                if isinstance(e, Unavailable) or stream.unanswered:
                    stream.close()
                else:
                    self._pool.give(stream)
                raise
            except BaseException:
                stream.close()
                raise
            self._pool.give(stream)
            return result

    async def _bulk_over_port(self, call: Callable[[PortStream], _T], timeout_s: float) -> _T:
        try:
            return await self._over_port(call, timeout_s)
        except MessageTooLarge:
            # the daemon was started again with other limits; the next call will know them
            await self.hello(timeout_s)
            raise

    async def _carry(self, name: str, request: wire.Parts, timeout_s: float) -> bytes:
        if name not in NUMBER_OF_METHOD or not self._port_wanted:
            return await super()._carry(name, request, timeout_s)
        deadline = time.monotonic() + timeout_s
        message = request[0] if len(request) == 1 else b"".join(request)

        def call(stream: PortStream) -> bytes:
            return stream.call(name, bytes(message), [], deadline)

        try:
            return await self._over_port(call, timeout_s)
        except PortUnreachable as e:
            self._check_fallback(e)
            return await super()._carry(name, request, timeout_s)

    def _check_fallback(self, why: PortUnreachable) -> None:
        if self._pool.forced:
            raise Unavailable(f"{self._peer}: the data port can't be reached: {why}") from why
        _log.info(
            "%s: over gRPC for now, since the data port can't be reached: %s", self._peer, why
        )

    # leases

    async def open_namespace(self, namespace: Namespace, timeout_s: float) -> bytes:
        namespace_id = await super().open_namespace(namespace, timeout_s)
        self._layouts[namespace_id] = namespace.layout.section_bytes
        return namespace_id

    async def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], ttl_s: float | None, timeout_s: float
    ) -> LeaseGrant:
        asked_s = time.monotonic()
        arena, sizes = self._arena, self._layouts.get(namespace_id)
        locate = arena is not None and sizes is not None and self._port_wanted
        hbm = self._open_hbm() if locate and self._hbm_wanted else None
        reply = await self._acquire(
            namespace_id, keys, ttl_s, timeout_s, locate, locate_hbm=hbm is not None
        )
        grant = messages.lease_from_pb(reply)
        arena = self._arena
        if arena is not None and sizes is not None and reply.arena_id == arena.instance_id:
            self._forget_lapsed(asked_s)
            places = np.frombuffer(reply.slots, "<u8").reshape(-1, 2)
            lease = LocatedLease(arena, keys, places, sizes, asked_s + grant.ttl_s)
            if hbm is not None and self._hbm == (arena.instance_id, hbm):
                lease.hbm = hbm
                lease.in_hbm = places_by_key(keys, reply.hbm_slots)
            self._leases[grant.lease_id] = lease
        return grant

    def _forget_lapsed(self, now_s: float) -> None:
        # dicts keep the order of entry, so what lapsed first is at the front, or nearly so
        for lease_id, lease in list(self._leases.items())[:AHEAD]:
            if lease.expires_s < now_s:
                self._leases.pop(lease_id, None)

    async def renew(self, lease_id: int, ttl_s: float | None, timeout_s: float) -> float:
        asked_s = time.monotonic()
        granted_s = await super().renew(lease_id, ttl_s, timeout_s)
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.expires_s = asked_s + granted_s
        return granted_s

    async def release(self, lease_id: int, timeout_s: float) -> None:
        self._leases.pop(lease_id, None)
        await super().release(lease_id, timeout_s)

    def _located(self, lease_id: int) -> LocatedLease | None:
        """A lease that holds, as far as this side can know, in an arena that is there."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_s <= time.monotonic() or not lease.arena.alive:
            return None
        return lease

    # reads

    @property
    def moves_bulk(self) -> bool:
        return self._port_wanted

    async def read_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        return await self._bulk(self._read, read, timeout_s)

    async def view_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        return await self._bulk(self._view, read, timeout_s)

    async def _bulk(
        self,
        start: Callable[[Reading], list[int]],
        read: BulkRead,
        timeout_s: float,
    ) -> Arrived | None:
        reading = Reading(read, self._located(read.lease_id), timeout_s)
        left = await self._do(start, reading) if reading.lease is not None else reading.all
        if left:
            limits = self._pool.frame_bytes_max, self._message_bytes_max
            try:
                await self._bulk_over_port(lambda s: reading.fetch(s, left, limits), timeout_s)
            except PortUnreachable as e:
                self._check_fallback(e)
                return None
        return reading.result()

    def _read(self, reading: Reading) -> list[int]:
        return reading.copy(reading.copy_hbm(reading.all))

    def _view(self, reading: Reading) -> list[int]:
        return reading.look(reading.all)

    def intact(self, lease_id: int, keys: Sequence[bytes]) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.intact(keys)

    # hbm

    async def open_hbm(self, timeout_s: float) -> str | None:
        self._hbm_wanted = True
        if self._arena is None and self._port_wanted:
            with contextlib.suppress(PortUnreachable):
                self._pool.give(await self._stream(timeout_s))
        hbm = await self._do(self._open_hbm)
        return None if hbm is None else hbm.kind

    def _open_hbm(self) -> SharedHbmView | None:
        """The pools of the daemon that is there now; None where they can't be had."""
        arena = self._arena
        if arena is None or not arena.alive:
            return None
        with self._arena_lock:
            if self._hbm is None or self._hbm[0] != arena.instance_id:
                try:
                    found = open_shared(arena.opened)
                except DeviceError as e:
                    _log.warning("%s: hbm can't be opened: %s", self._peer, e)
                    found = None
                self._hbm = (arena.instance_id, found)
            return self._hbm[1]

    def view_hbm(self, read: BulkRead) -> list[HbmBlock | None]:
        lease = self._located(read.lease_id)
        if lease is None or lease.hbm is None:
            return [None] * len(read.keys)
        pieces = Pieces.of(tuple(read.section_bytes), tuple(read.sections))
        blocks: list[HbmBlock | None] = []
        for key in read.keys:
            place = lease.in_hbm.get(key)
            block = None if place is None else lease.hbm.block(key, place, pieces)
            if block is not None and place is not None:
                lease.shown_in_hbm[key] = place
            blocks.append(block)
        return blocks

    # puts

    async def put_bulk(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome] | None:
        limits = self._pool.frame_bytes_max, self._message_bytes_max
        putting = Putting(namespace_id, blocks, durability, timeout_s, limits)
        try:
            return await self._bulk_over_port(putting.run, timeout_s)
        except PortUnreachable as e:
            self._check_fallback(e)
            return None

    # windows

    async def put_window(self, namespace_id: bytes, put: WindowPut, timeout_s: float) -> PutOutcome:
        if self._port_wanted and put.head.payload_bytes <= self._pool.frame_bytes_max:
            try:
                return await self._bulk_over_port(
                    lambda s: port_windows.put_window(s, namespace_id, put, timeout_s), timeout_s
                )
            except PortUnreachable as e:
                self._check_fallback(e)
        return await super().put_window(namespace_id, put, timeout_s)

    async def get_window(
        self, namespace_id: bytes, name: bytes | str, timeout_s: float
    ) -> ArrivedWindow | None:
        if self._port_wanted:
            try:
                return await self._over_port(
                    lambda s: port_windows.get_window(s, namespace_id, name, timeout_s), timeout_s
                )
            except MessageTooLarge:
                _log.debug("%s: the payload passes a frame, it comes over gRPC", self._peer)
            except PortUnreachable as e:
                self._check_fallback(e)
        return await super().get_window(namespace_id, name, timeout_s)

    async def close(self) -> None:
        self._pool.close()
        self._arena = None
        self._leases.clear()
        if self._hbm is not None and self._hbm[1] is not None:
            self._hbm[1].close()
        self._hbm = None
        await super().close()
