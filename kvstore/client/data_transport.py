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

from kvstore.block import BlockData, BlockPut, Durability, HbmBlock, Outcome, PutOutcome, Tier
from kvstore.client import batching, port_windows
from kvstore.client.port_pool import PortPool
from kvstore.client.port_stream import PortStream, PortUnreachable, StreamLost
from kvstore.client.remote import Carrier, RemoteTransport
from kvstore.client.shared_arena import Copied, LocatedLease, Pieces, SharedArenaView, places_by_key
from kvstore.client.shared_hbm import SharedHbmView, open_shared
from kvstore.client.transport import Arrived, ArrivedWindow, BulkRead
from kvstore.client.url import StoreURL
from kvstore.errors import KVStoreError, MessageTooLarge, Unavailable
from kvstore.namespace import Namespace
from kvstore.server import messages, wire
from kvstore.server.port.frames import NUMBER_OF_METHOD
from kvstore.store.types import LeaseGrant, WindowPut
from kvstore.tiers.hbm.device import DeviceError
from kvstore.v1 import kvstore_pb2 as pb

AHEAD = 2
"""Batches asked for or sent before the answer to the first is waited for."""
PIECE_BYTES = 1 << 20
"""What is received before it is verified, while the socket's buffers fill again."""
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
        start: Callable[["_Reading"], list[int]],
        read: BulkRead,
        timeout_s: float,
    ) -> Arrived | None:
        reading = _Reading(read, self._located(read.lease_id), timeout_s)
        left = await self._do(start, reading) if reading.lease is not None else reading.all
        if left:
            limits = self._pool.frame_bytes_max, self._message_bytes_max
            try:
                await self._bulk_over_port(lambda s: reading.fetch(s, left, limits), timeout_s)
            except PortUnreachable as e:
                self._check_fallback(e)
                return None
        return reading.result()

    def _read(self, reading: "_Reading") -> list[int]:
        return reading.copy(reading.copy_hbm(reading.all))

    def _view(self, reading: "_Reading") -> list[int]:
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
        putting = _Putting(namespace_id, blocks, durability, timeout_s, limits)
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


class _Reading:
    """One bulk read on its way, within `timeout_s` however many messages it takes. `lease`: where
    its blocks lie, if that is known."""

    def __init__(self, read: BulkRead, lease: LocatedLease | None, timeout_s: float) -> None:
        self._read, self.lease = read, lease
        self._ends_s = time.monotonic() + timeout_s
        self._pieces = Pieces.of(tuple(read.section_bytes), tuple(read.sections))
        self._blocks: list[BlockData | None] = [None] * len(read.keys)
        self._corrupt: list[bytes] = []
        self.all = list(range(len(read.keys)))
        if lease is not None and tuple(lease.section_bytes) != tuple(read.section_bytes):
            self.lease = None

    def result(self) -> Arrived:
        """What became of every key."""
        blocks = [
            block or BlockData(key, Outcome.MISS)
            for key, block in zip(self._read.keys, self._blocks, strict=True)
        ]
        return Arrived(blocks, self._corrupt)

    def _hit(self, i: int, tier: Tier) -> BlockData:
        pieces, start = self._pieces, i * self._pieces.stride
        block = self._read.into[start : start + pieces.stride]
        sections = tuple(map(block.__getitem__, pieces.slices))
        return BlockData(self._read.keys[i], Outcome.HIT, sections, tier)

    # hbm

    def copy_hbm(self, wanted: Sequence[int]) -> list[int]:
        """Copy out what lies in HBM, where that is open; returns which blocks did not."""
        lease = self.lease
        if lease is None or lease.hbm is None:
            return list(wanted)
        read, stride = self._read, self._pieces.stride
        there = [i for i in wanted if read.keys[i] in lease.in_hbm]
        keys = [read.keys[i] for i in there]
        places, starts = [lease.in_hbm[key] for key in keys], [i * stride for i in there]
        try:
            copied = lease.hbm.copy(keys, places, self._pieces, read.into, starts, read.verify)
        except DeviceError as e:
            _log.warning("reading by way of the host, since hbm can't be read: %s", e)
            return list(wanted)
        for i, outcome in zip(there, copied, strict=True):
            if outcome is Copied.GOOD:
                self._blocks[i] = self._hit(i, Tier.HBM)
            elif outcome is Copied.CORRUPT:
                self._corrupt.append(read.keys[i])
        gone = {i for i, o in zip(there, copied, strict=True) if o is Copied.GONE}
        return [i for i in wanted if i in gone or read.keys[i] not in lease.in_hbm]

    # the arena

    def _known(self, wanted: Sequence[int]) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Which of these blocks have a place, the places, and which have none."""
        assert self.lease is not None
        known, keys = self.lease.known, self._read.keys
        places = [known.get(keys[i]) for i in wanted]
        there = [place for place in places if place is not None]
        if len(there) == len(places):
            return list(wanted), there, []
        pairs = list(zip(wanted, places, strict=True))
        return (
            [i for i, place in pairs if place is not None],
            there,
            [i for i, place in pairs if place is None],
        )

    def copy(self, wanted: Sequence[int], tier: Tier = Tier.DRAM) -> list[int]:
        """Copy out what lies in the arena; returns which blocks did not."""
        assert self.lease is not None
        there, places, left = self._known(wanted)
        read, stride = self._read, self._pieces.stride
        copied = self.lease.arena.copy(
            [read.keys[i] for i in there],
            places,
            self._pieces,
            read.into,
            [i * stride for i in there],
            read.verify,
        )
        for i, outcome in zip(there, copied, strict=True):
            if outcome is Copied.GOOD:
                self._blocks[i] = self._hit(i, tier)
            elif outcome is Copied.CORRUPT:
                self._corrupt.append(read.keys[i])
            else:
                left.append(i)
        return left

    def look(self, wanted: Sequence[int], tier: Tier = Tier.DRAM) -> list[int]:
        """Show what lies in the arena; returns which blocks do not."""
        assert self.lease is not None
        arena, pieces = self.lease.arena, self._pieces
        there, places, left = self._known(wanted)
        starts = [(at, at + length) for at, length in pieces.in_frame()]
        for i, (offset, generation) in zip(there, places, strict=True):
            frame = arena.frame(offset, pieces.end)
            if frame is None or not arena.holds(offset, generation):
                left.append(i)
                continue
            self.lease.shown[self._read.keys[i]] = (offset, generation)
            sections = tuple([frame[a:b] for a, b in starts])
            self._blocks[i] = BlockData(self._read.keys[i], Outcome.HIT, sections, tier)
        return left

    # the stream

    def fetch(self, stream: PortStream, wanted: Sequence[int], limits: tuple[int, int]) -> None:
        """Ask the daemon for blocks, some batches ahead, and verify each while the next comes."""
        sizes = [b - a for a, b in self._pieces.spans]
        size = batching.bulk_blocks(sizes, batching.BULK_READ_BYTES, *limits)
        batches = [wanted[part] for part in batching.batches(len(wanted), size)]
        locate = self.lease is not None
        again: list[int] = []
        for n, batch in enumerate(batches):
            if n < AHEAD:
                self._ask(stream, batch, locate)
        for n, batch in enumerate(batches):
            self._receive(stream, batch, again)
            if n + AHEAD < len(batches):
                self._ask(stream, batches[n + AHEAD], locate)
        if again and locate:
            # places that were outrun: now by the stream
            self.lease = None
            self.fetch(stream, again, limits)

    def _ask(self, stream: PortStream, batch: Sequence[int], locate: bool) -> None:
        request = pb.BulkReadRequest(
            lease_id=self._read.lease_id,
            keys=messages.pack_keys([self._read.keys[i] for i in batch]),
            sections=self._read.sections,
            locate=locate,
        )
        stream.send("BulkRead", request.SerializeToString(), [], self._ends_s)

    def _receive(self, stream: PortStream, batch: Sequence[int], again: list[int]) -> None:
        """Take one answer, and verify what comes on the stream while the rest comes."""
        head, message = stream.receive(self._ends_s)
        reply = pb.BulkReadReply.FromString(message)
        if not len(reply.outcomes) == len(reply.tiers) == len(batch):
            raise StreamLost("an answer to another read", answered=True)
        hits = [i for i, n in zip(batch, reply.outcomes, strict=True) if n == Outcome.HIT.value]
        expected = [self._read.section_bytes[i] for i in self._read.sections]
        if hits and list(reply.section_bytes) != expected:
            raise StreamLost("sections of another layout", answered=True)
        tier_of = {i: Tier(n) for i, n in zip(batch, reply.tiers, strict=True)}
        sent = hits
        if self.lease is not None and reply.arena_id == self.lease.arena.instance_id:
            places = np.frombuffer(reply.slots, "<u8").reshape(-1, 2)
            self.lease.learn([self._read.keys[i] for i in batch], places)
            there, _, sent = self._known(hits)
            for tier in set(map(tier_of.__getitem__, there)):
                again += self.copy([i for i in there if tier_of[i] is tier], tier)
        stride, step = self._pieces.stride, wire.CHECKSUM_BYTES * len(self._pieces.spans)
        if head.body_bytes != len(sent) * stride or len(reply.checksums) != len(sent) * step:
            raise StreamLost("a body of another size", answered=True)
        at = 0
        for first, last in _runs(sent, max(1, PIECE_BYTES // stride)):
            stream.receive_body(self._read.into[first * stride : (last + 1) * stride], self._ends_s)
            for i in range(first, last + 1):
                self._verify(i, reply.checksums[at : at + step], tier_of[i])
                at += step

    def _verify(self, i: int, checksums: bytes, tier: Tier) -> None:
        hit = self._hit(i, tier)
        if b"".join(batching.checksums_of(hit.sections)) == checksums:
            self._blocks[i] = hit
        else:
            self._corrupt.append(hit.key)


def _runs(numbers: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers, none of more than `longest`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1 and n - runs[-1][0] < longest:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs


class _Putting:
    """One bulk put on its way."""

    def __init__(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
        limits: tuple[int, int],
    ) -> None:
        self._namespace_id, self._blocks = namespace_id, blocks
        self._durability, self._timeout_s = durability, timeout_s
        self._frame_bytes_max, self._message_bytes_max = limits
        self._sizes = [len(section) for section in blocks[0].sections]
        self._stride = sum(self._sizes)
        self._outcomes: list[PutOutcome] = []

    def run(self, stream: PortStream) -> list[PutOutcome]:
        """Send batch after batch, the next while the daemon works at the last."""
        self._outcomes = []
        staging = stream.staging
        # half of the area is filled while the daemon reads the other
        room = len(staging) // AHEAD if staging is not None else self._frame_bytes_max
        staged = staging is not None and room >= self._stride
        size = batching.bulk_blocks(
            self._sizes,
            batching.BULK_PUT_BYTES,
            room if staged else self._frame_bytes_max,
            self._message_bytes_max,
        )
        under_way = 0
        for n, part in enumerate(batching.batches(len(self._blocks), size)):
            if under_way == AHEAD:
                self._receive(stream)
                under_way -= 1
            if staged and staging is not None:
                at = n % AHEAD * room
                self._send(stream, self._blocks[part], staging[at : at + room], at)
            else:
                self._send(stream, self._blocks[part], None, 0)
            under_way += 1
        for _ in range(under_way):
            self._receive(stream)
        return self._outcomes

    def _send(
        self,
        stream: PortStream,
        blocks: Sequence[BlockPut],
        staging: memoryview | None,
        offset: int,
    ) -> None:
        sections: list[Any] = [block.sections for block in blocks]
        if staging is not None:
            self._stage(sections, staging)
        checksums = [
            block.checksums if block.checksums is not None else batching.checksums_of(own)
            for block, own in zip(blocks, sections, strict=True)
        ]
        request = pb.BulkPutRequest(
            namespace_id=self._namespace_id,
            durability=pb.Durability.Name(self._durability.value),
            keys=messages.pack_keys([block.key for block in blocks]),
            parents=messages.pack_keys([block.parent for block in blocks]),
            section_bytes=self._sizes,
            checksums=b"".join([c for own in checksums for c in own]),
        )
        body: wire.Parts = []
        if staging is None:
            body = [section for own in sections for section in own]
        else:
            request.staging_offset = offset
        deadline = time.monotonic() + self._timeout_s
        stream.send("BulkPut", request.SerializeToString(), body, deadline)

    def _stage(self, sections: Sequence[Sequence[memoryview]], staging: memoryview) -> None:
        area = np.frombuffer(staging, np.uint8)
        at = 0
        for own in sections:
            for section in own:
                np.copyto(area[at : at + len(section)], np.frombuffer(section, np.uint8))
                at += len(section)

    def _receive(self, stream: PortStream) -> None:
        _, message = stream.receive(time.monotonic() + self._timeout_s)
        self._outcomes += messages.unpack_put_outcomes(pb.PutReply.FromString(message).outcomes)
