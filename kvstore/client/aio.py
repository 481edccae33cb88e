"""The client, asynchronous. `kvstore.client.sync` is the same with blocking calls."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from kvstore.block import (
    BlockData,
    BlockPut,
    Buffer,
    Durability,
    HbmBlock,
    Match,
    Outcome,
    Outlook,
    PutOutcome,
    Tier,
)
from kvstore.client import batching
from kvstore.client.arguments import (
    as_list,
    check_deadline,
    check_member,
    check_tier,
    check_ttl,
    check_wait,
)
from kvstore.client.lease import AsyncLease
from kvstore.client.namespaces import NamespaceHandle
from kvstore.client.transport import Arrived, BulkRead, Progress, Transport
from kvstore.client.windows import AsyncWindows
from kvstore.errors import (
    InvalidRequest,
    ReservationExpired,
    Unavailable,
    UnknownNamespace,
    WrongProcess,
)
from kvstore.namespace import Namespace
from kvstore.server.messages import check_digest, check_digests, check_some
from kvstore.server.port.sockets import room_for
from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    ReservationGrant,
    Stat,
    VerifyReport,
)

DEADLINE_S_DEFAULT = 30.0
VERIFY_DEADLINE_S_DEFAULT = 24 * 3600.0
LS_LIMIT_DEFAULT = 1000
_LS_LIMIT_MAX = (1 << 31) - 1
"""Of a message; the store lists `limits.ls_blocks_max` at most."""
_WAIT_S_MIN = 0.001
"""A message is sent all the same, and its deadline says what it says."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _left_s(ends_s: float) -> float:
    """Time until `ends_s` (monotonic)."""
    return max(ends_s - time.monotonic(), _WAIT_S_MIN)


def _check_reservation(reservation_id: int) -> None:
    if not 0 <= reservation_id < 1 << 64:
        raise ReservationExpired(f"reservation {reservation_id} was never granted")


class AsyncClient(AsyncWindows):
    """One store, whatever lies between. Made by `kvstore.connect_async`.

    Safe to use from any number of tasks. Every call ends within `deadline_s`, however many messages
    it takes; after that, or as soon as the daemon is known to be gone, it raises `Unavailable`. The
    next call tries again.

    It belongs to the process that made it: in one forked from that, `close` does nothing and every
    other call raises `WrongProcess`.
    """

    def __init__(self, transport: Transport, deadline_s: float = DEADLINE_S_DEFAULT) -> None:
        self._own_transport, self._pid = transport, os.getpid()
        self.deadline_s = check_deadline(deadline_s)
        self.corrupt_blocks = 0
        """Blocks that this client received with a wrong checksum; each was returned as a MISS."""
        self.corrupt_windows = 0
        self._opened: dict[bytes, Namespace] = {}

    @property
    def _transport(self) -> Transport:
        # two processes on one connection would take each other's answers
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"this client was opened in process {self._pid}, of which this one, {os.getpid()}, "
                "is a fork; call kvstore.connect here"
            )
        return self._own_transport

    async def open_namespace(self, namespace: Namespace) -> NamespaceHandle:
        """Open (and remember in the store) a namespace."""
        namespace_id = await self._transport.open_namespace(namespace, self.deadline_s)
        self._opened[namespace_id] = namespace
        return NamespaceHandle(namespace_id, namespace)

    async def _in(self, ns: NamespaceHandle, call: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call in a namespace, which a store without a disk forgets when it restarts."""
        try:
            return await call()
        except UnknownNamespace:
            namespace = self._opened.get(ns.id)
            if namespace is None:
                raise
            if await self._transport.open_namespace(namespace, self.deadline_s) != ns.id:
                raise
            return await call()

    async def match(self, ns: NamespaceHandle, keys: Sequence[bytes]) -> Match:
        """Which blocks of a prefix are there, where, and what fetching them would cost; and which
        window snapshots lie on it, for which a prompt shorter than a block may be asked too."""
        check_digests(keys, "key")
        return await self._in(ns, lambda: self._transport.match(ns.id, keys, self.deadline_s))

    async def wait_for(
        self, ns: NamespaceHandle, keys: Sequence[bytes], deadline_s: float
    ) -> Match:
        """A `match`, after waiting while the first block that is not READY is PENDING: until its
        writer commits or gives up, or `deadline_s` from now. A block that nobody has reserved is a
        MISS at once: reserve before the other side is told to wait."""
        batching.check_keys(keys)
        ends_s = time.monotonic() + check_wait(deadline_s)
        while True:
            found = await self._wait(ns, keys, max(0.0, ends_s - time.monotonic()))
            at = found.hit_blocks
            pending = at < len(keys) and found.outcomes[at] is Outcome.PENDING
            if not pending or time.monotonic() >= ends_s:
                return found

    async def _wait(self, ns: NamespaceHandle, keys: Sequence[bytes], wait_s: float) -> Match:
        return await self._in(
            ns, lambda: self._transport.wait_for(ns.id, keys, wait_s, self.deadline_s)
        )

    async def acquire(
        self, ns: NamespaceHandle, keys: Sequence[bytes], ttl_s: float | None = None
    ) -> AsyncLease:
        """Pin the READY prefix of `keys`; see `AsyncLease`."""
        batching.check_keys(keys)
        ttl_s = check_ttl(ttl_s)
        grant = await self._in(
            ns, lambda: self._transport.acquire(ns.id, keys, ttl_s, self.deadline_s)
        )
        return AsyncLease(self, ns, keys, grant)

    async def answered(
        self,
        ns: NamespaceHandle,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None = None,
    ) -> None:
        """Tell the store what is known of the next request when an answer has ended; it decides
        nothing but which blocks go first.

        `keys`: all blocks of the request and its answer, from the first on. `lasting_blocks`: how
        many of them the next request can have (all by default): a chat format that drops earlier
        reasoning lets those behind it die.
        """
        batching.check_keys(keys)
        check_member(Outlook, outlook, "outlook")
        if lasting_blocks is not None and not 0 <= lasting_blocks <= len(keys):
            raise InvalidRequest(f"lasting_blocks {lasting_blocks} of {len(keys)} keys")
        await self._in(
            ns,
            lambda: self._transport.answered(ns.id, keys, outlook, lasting_blocks, self.deadline_s),
        )

    async def end_session(self, ns: NamespaceHandle, keys: Sequence[bytes]) -> None:
        """No request will follow: `answered` with `Outlook.END_OF_SESSION`."""
        await self.answered(ns, keys, Outlook.END_OF_SESSION)

    async def read(
        self,
        lease: AsyncLease,
        keys: Sequence[bytes],
        sections: Sequence[int] | None = None,
        into: Buffer | None = None,
        verify: bool = True,
    ) -> list[BlockData]:
        """Blocks under a lease, in the order of `keys`; `sections` index the layout.

        Every section's checksum is verified here; a block with a wrong one is a MISS, counted in
        `corrupt_blocks` and reported to the store. Without `verify` that is left out for what is
        copied from memory shared with the daemon, which has checked those bytes itself. `into`:
        writable memory of at least all the sections' bytes, best aligned to 64; block i's lie in it
        from i times their sum on, one behind the other, and the answer's sections are views of it.
        Raises `LeaseExpired`.
        """
        batching.check_keys(keys)
        layout = lease.namespace.layout
        wanted = batching.check_sections(sections, layout)
        sizes = [layout.section_bytes[i] for i in wanted]
        stride = sum(sizes)
        if into is not None:
            into = batching.check_room(into, len(keys) * stride)
        ends_s = time.monotonic() + self.deadline_s
        if self._transport.moves_bulk:
            room = into if into is not None else room_for(len(keys) * stride)
            read = BulkRead(lease.id, keys, wanted, layout.section_bytes, room, verify)
            arrived = await self._transport.read_bulk(read, self.deadline_s)
            if arrived is not None:
                return await self._taken(lease.namespace, arrived)
        out: list[BlockData] = []
        per_batch = batching.blocks_per_batch(sizes, self._transport.message_bytes_max)
        for part in batching.batches(len(keys), per_batch):
            frames = await self._transport.read(lease.id, keys[part], wanted, _left_s(ends_s))
            out += [await self._verified(lease.namespace, block, sizes) for block in frames]
        return out if into is None else batching.moved_into(into, out, sizes)

    async def view(
        self, lease: AsyncLease, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> list[BlockData]:
        """Blocks under a lease where they lie: on the daemon's host, in its memory and without a
        copy, unverified and read-only; elsewhere as from `read`.

        The bytes are theirs while the lease lasts, and what was made of them counts only if
        `intact` says so *afterwards*; otherwise they were a miss. Raises `LeaseExpired`.
        """
        batching.check_keys(keys)
        layout = lease.namespace.layout
        wanted = batching.check_sections(sections, layout)
        if self._transport.moves_bulk:
            stride = sum(layout.section_bytes[i] for i in wanted)
            room = room_for(len(keys) * stride)
            read = BulkRead(lease.id, keys, wanted, layout.section_bytes, room)
            arrived = await self._transport.view_bulk(read, self.deadline_s)
            if arrived is not None:
                # what came as a copy is in `room`, which can be written
                shown = [b.key for b in arrived.blocks if b.sections and b.sections[0].readonly]
                lease._shown.update(shown)
                return await self._taken(lease.namespace, arrived)
        return await self.read(lease, keys, sections)

    async def open_hbm(self) -> str | None:
        """Open the daemon's device memory, on the same host: leases acquired from now on know what
        lies there, `read` takes that from there first, and `view_hbm` shows it. Returns its kind,
        "cuda" or "simulated"; None, and nothing changes, where there is none that can be opened.
        """
        return await self._transport.open_hbm(self.deadline_s)

    def view_hbm(
        self, lease: AsyncLease, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> list[HbmBlock | None]:
        """Blocks under a lease where they lie in a device's memory, None for one that was not there
        when the lease was acquired; after `open_hbm`. No checksum is looked at.

        As with `view`, what was made of the bytes counts only if `intact` says so *afterwards*:
        after the copies or kernels that read them are done, not after they were queued.
        """
        batching.check_keys(keys)
        layout = lease.namespace.layout
        wanted = batching.check_sections(sections, layout)
        read = BulkRead(lease.id, keys, wanted, layout.section_bytes, memoryview(b""))
        blocks = self._transport.view_hbm(read)
        lease._shown.update(block.key for block in blocks if block is not None)
        return blocks

    def intact(self, lease: AsyncLease, keys: Sequence[bytes]) -> bool:
        """Whether what `view` and `view_hbm` showed of these blocks was theirs up to now."""
        shown = [key for key in keys if key in lease._shown]
        return not shown or self._transport.intact(lease.id, shown)

    async def _taken(self, ns: NamespaceHandle, arrived: Arrived) -> list[BlockData]:
        """Blocks that the transport has verified."""
        for key in arrived.corrupt:
            await self._report(ns, key)
        return arrived.blocks

    async def _verified(
        self, ns: NamespaceHandle, block: BlockFrames, sizes: Sequence[int]
    ) -> BlockData:
        if block.outcome is not Outcome.HIT:
            return BlockData(block.key, block.outcome, (), block.tier)
        right = [len(s) for s in block.sections] == list(sizes)
        if right and batching.checksums_of(block.sections) == block.checksums:
            return BlockData(block.key, Outcome.HIT, block.sections, block.tier)
        await self._report(ns, block.key)
        return BlockData(block.key, Outcome.MISS)

    async def _report(self, ns: NamespaceHandle, key: bytes) -> None:
        self.corrupt_blocks += 1
        _log.warning("block %s arrived with a wrong checksum", key.hex())
        try:
            await self._transport.report_corrupt(ns.id, key, self.deadline_s)
        except Unavailable as e:
            _log.warning("block %s could not be reported: %s", key.hex(), e)

    async def put(
        self,
        ns: NamespaceHandle,
        blocks: Iterable[BlockPut],
        durability: Durability = Durability.ACCEPTED,
    ) -> list[PutOutcome]:
        """Store blocks, parents before children; one outcome per block.

        The whole list is checked before anything is sent; then it goes in batches, and an error on
        the way leaves the earlier batches stored. Raises `WrongSectionSize`, `BlockOutOfOrder`.
        """
        check_member(Durability, durability, "durability")
        blocks = as_list(blocks, BlockPut, "blocks")
        views = batching.check_blocks(blocks, ns.layout)
        ends_s = time.monotonic() + self.deadline_s
        if self._transport.moves_bulk:
            plain = [
                BlockPut(block.key, block.parent, own, block.checksums)
                for block, own in zip(blocks, views, strict=True)
            ]
            done = await self._in(
                ns, lambda: self._transport.put_bulk(ns.id, plain, durability, _left_s(ends_s))
            )
            if done is not None:
                return done
        outcomes: list[PutOutcome] = []
        durable = durability is Durability.DURABLE
        per_batch = batching.blocks_per_batch(
            ns.layout.section_bytes,
            self._transport.message_bytes_max,
            batching.DURABLE_BATCH_BYTES if durable else batching.BATCH_BYTES,
        )
        for part in batching.batches(len(blocks), per_batch):
            batch = [
                batching.with_checksums(block, sections)
                for block, sections in zip(blocks[part], views[part], strict=True)
            ]
            outcomes += await self._put_batch(ns, batch, durability, ends_s)
        return outcomes

    async def _put_batch(
        self, ns: NamespaceHandle, batch: Sequence[BlockPut], durability: Durability, ends_s: float
    ) -> list[PutOutcome]:
        return await self._in(
            ns, lambda: self._transport.put(ns.id, batch, durability, _left_s(ends_s))
        )

    async def reserve(
        self,
        ns: NamespaceHandle,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None = None,
    ) -> ReservationGrant:
        """Make room for blocks, each a key and its parent, and become their writer."""
        check_some(blocks, "blocks")
        check_digests([key for key, _ in blocks], "key of block")
        check_digests([parent for _, parent in blocks], "parent of block")
        batching.check_order(blocks)
        ttl_s = check_ttl(ttl_s)
        return await self._in(
            ns, lambda: self._transport.reserve(ns.id, blocks, ttl_s, self.deadline_s)
        )

    async def write(
        self,
        reservation_id: int,
        key: bytes,
        sections: Sequence[Buffer],
        checksums: Sequence[bytes] | None = None,
    ) -> None:
        """Deliver all sections of one reserved block. Raises `ReservationExpired`."""
        check_digest(key, "key")
        _check_reservation(reservation_id)
        views = [batching.section_view(section, "write") for section in sections]
        block = batching.with_checksums(BlockPut(key, b"", views, checksums), views)
        await self._transport.write(reservation_id, block, self.deadline_s)

    async def commit(
        self, reservation_id: int, durability: Durability = Durability.ACCEPTED
    ) -> list[PutOutcome]:
        """Make the delivered blocks READY; one without all sections is refused."""
        _check_reservation(reservation_id)
        check_member(Durability, durability, "durability")
        return await self._transport.commit(reservation_id, durability, self.deadline_s)

    async def abort(self, reservation_id: int) -> None:
        """Give the room back."""
        _check_reservation(reservation_id)
        await self._transport.abort(reservation_id, self.deadline_s)

    async def evict(
        self,
        ns: NamespaceHandle | bytes | None = None,
        keys: Sequence[bytes] | None = None,
        tier: Tier | None = None,
    ) -> int:
        """Drop blocks, leaf first; pinned ones stay. Returns how many left.

        Everything where nothing is named. `tier`: from this tier only.
        """
        check_tier(tier)
        if keys is not None:
            batching.check_keys(keys)
            if ns is None:
                raise InvalidRequest("keys are evicted from one namespace; name it")
        return await self._transport.evict(_id(ns), keys, tier, self.deadline_s)

    async def flush(self) -> None:
        """Returns when everything accepted so far is durable."""
        await self._transport.flush(self.deadline_s)

    async def verify(
        self, progress: Progress | None = None, deadline_s: float = VERIFY_DEADLINE_S_DEFAULT
    ) -> VerifyReport:
        """Read and check every frame of every tier."""
        return await self._transport.verify(progress, check_deadline(deadline_s))

    async def stat(self) -> Stat:
        """Sizes and counters now."""
        return await self._transport.stat(self.deadline_s)

    async def ls(
        self,
        ns: NamespaceHandle | bytes | None = None,
        limit: int = LS_LIMIT_DEFAULT,
        after: bytes | None = None,
    ) -> list[BlockInfo]:
        """Some blocks of the store; go on behind the last one's key with `after`."""
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidRequest(f"limit must be a whole number ≥ 1, not {limit!r}")
        if after is not None:
            check_digest(after, "after")
        asked = min(limit, _LS_LIMIT_MAX)
        return await self._transport.ls(_id(ns), asked, after, self.deadline_s)

    async def close(self) -> None:
        """Let go of the store; an embedded one writes back and closes. Idempotent."""
        if os.getpid() == self._pid:
            await self._transport.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _id(ns: NamespaceHandle | bytes | None) -> bytes | None:
    if isinstance(ns, bytes):
        check_digest(ns, "namespace id")
    return ns.id if isinstance(ns, NamespaceHandle) else ns
