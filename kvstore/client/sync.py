"""The client, blocking: `kvstore.client.aio.AsyncClient` call by call over a blocking transport."""

import logging
from collections.abc import Iterable, Sequence
from types import TracebackType

from kvstore.block import (
    BlockData,
    BlockPut,
    Buffer,
    Durability,
    HbmBlock,
    Match,
    Outlook,
    PutOutcome,
    Tier,
)
from kvstore.client.aio import (
    DEADLINE_S_DEFAULT,
    LS_LIMIT_DEFAULT,
    VERIFY_DEADLINE_S_DEFAULT,
    AsyncClient,
)
from kvstore.client.lease import AsyncLease
from kvstore.client.namespaces import NamespaceHandle
from kvstore.client.transport import Progress, Transport, run_now
from kvstore.namespace import Namespace
from kvstore.prefix_hash import ImageSpan, TokenIds
from kvstore.store.types import BlockInfo, ReservationGrant, Stat, VerifyReport

_log = logging.getLogger(__name__)


class Lease:
    """A client's time-bounded right to the blocks of a prefix; a context manager.

    `blocks`: how many of `keys`, from the first on, are pinned. `match`: what the lookup found.
    """

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease
        self.namespace = lease.namespace
        self.id = lease.id
        self.keys = lease.keys
        self.blocks = lease.blocks
        self.match = lease.match

    @property
    def ttl_s(self) -> float:
        """Seconds granted last."""
        return self._lease.ttl_s

    def renew(self, ttl_s: float | None = None) -> float:
        """Hold it for `ttl_s` from now on; returns what was granted. Raises `LeaseExpired`."""
        return run_now(self._lease.renew(ttl_s))

    def release(self) -> None:
        """Give it back. One that has expired is as good as given back."""
        run_now(self._lease.release())

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run_now(self._lease.__aexit__(kind, error, trace))


class Client:
    """One store, whatever lies between. Made by `kvstore.connect`; a context manager.

    Safe to use from any number of threads. Deadlines and errors as in `AsyncClient`, which also
    says what each call does.
    """

    def __init__(self, transport: Transport, deadline_s: float = DEADLINE_S_DEFAULT) -> None:
        self._client = AsyncClient(transport, deadline_s)

    @property
    def deadline_s(self) -> float:
        """Of every call."""
        return self._client.deadline_s

    @property
    def corrupt_blocks(self) -> int:
        """Blocks received with a wrong checksum; each was returned as a MISS."""
        return self._client.corrupt_blocks

    def open_namespace(self, namespace: Namespace) -> NamespaceHandle:
        """Open (and remember in the store) a namespace."""
        return run_now(self._client.open_namespace(namespace))

    def match(self, ns: NamespaceHandle, keys: Sequence[bytes]) -> Match:
        """Which blocks of a prefix are there, where, and what fetching them would cost; and which
        window snapshots lie on it, for which a prompt shorter than a block may be asked too."""
        return run_now(self._client.match(ns, keys))

    def wait_for(self, ns: NamespaceHandle, keys: Sequence[bytes], deadline_s: float) -> Match:
        """A `match`, after waiting while the first block that is not READY is PENDING: until its
        writer commits or gives up, or `deadline_s` from now. A block that nobody has reserved is a
        MISS at once: reserve before the other side is told to wait."""
        return run_now(self._client.wait_for(ns, keys, deadline_s))

    def acquire(
        self, ns: NamespaceHandle, keys: Sequence[bytes], ttl_s: float | None = None
    ) -> Lease:
        """Pin the READY prefix of `keys`; see `Lease`."""
        return Lease(run_now(self._client.acquire(ns, keys, ttl_s)))

    def answered(
        self,
        ns: NamespaceHandle,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None = None,
    ) -> None:
        """Tell the store what is known of the next request when an answer has ended."""
        run_now(self._client.answered(ns, keys, outlook, lasting_blocks))

    def end_session(self, ns: NamespaceHandle, keys: Sequence[bytes]) -> None:
        """No request will follow: the blocks that are this session's alone go first."""
        run_now(self._client.end_session(ns, keys))

    def read(
        self,
        lease: Lease,
        keys: Sequence[bytes],
        sections: Sequence[int] | None = None,
        into: Buffer | None = None,
        verify: bool = True,
    ) -> list[BlockData]:
        """Blocks under a lease, verified, in the order of `keys`."""
        return run_now(self._client.read(lease._lease, keys, sections, into, verify))

    def view(
        self, lease: Lease, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> list[BlockData]:
        """Blocks under a lease where they lie; count on them only if `intact` after use."""
        return run_now(self._client.view(lease._lease, keys, sections))

    def open_hbm(self) -> str | None:
        """Open the daemon's device memory for leases from now on; its kind, or None."""
        return run_now(self._client.open_hbm())

    def view_hbm(
        self, lease: Lease, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> list[HbmBlock | None]:
        """Blocks under a lease in device memory; count on them only if `intact` after use."""
        return self._client.view_hbm(lease._lease, keys, sections)

    def intact(self, lease: Lease, keys: Sequence[bytes]) -> bool:
        """Whether what `view` and `view_hbm` showed of these blocks was theirs up to now."""
        return self._client.intact(lease._lease, keys)

    def put(
        self,
        ns: NamespaceHandle,
        blocks: Iterable[BlockPut],
        durability: Durability = Durability.ACCEPTED,
    ) -> list[PutOutcome]:
        """Store blocks, parents before children; one outcome per block."""
        return run_now(self._client.put(ns, blocks, durability))

    def reserve(
        self,
        ns: NamespaceHandle,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None = None,
    ) -> ReservationGrant:
        """Make room for blocks, each a key and its parent, and become their writer."""
        return run_now(self._client.reserve(ns, blocks, ttl_s))

    def write(
        self,
        reservation_id: int,
        key: bytes,
        sections: Sequence[Buffer],
        checksums: Sequence[bytes] | None = None,
    ) -> None:
        """Deliver all sections of one reserved block. Raises `ReservationExpired`."""
        run_now(self._client.write(reservation_id, key, sections, checksums))

    def commit(
        self, reservation_id: int, durability: Durability = Durability.ACCEPTED
    ) -> list[PutOutcome]:
        """Make the delivered blocks READY; one without all sections is refused."""
        return run_now(self._client.commit(reservation_id, durability))

    def abort(self, reservation_id: int) -> None:
        """Give the room back."""
        run_now(self._client.abort(reservation_id))

    @property
    def corrupt_windows(self) -> int:
        """Payloads received with a wrong checksum; each was returned as a miss."""
        return self._client.corrupt_windows

    def put_snapshot(
        self,
        ns: NamespaceHandle,
        token_ids: TokenIds,
        payload: Buffer,
        *,
        images: Sequence[ImageSpan] = (),
        ttl_s: float | None = None,
    ) -> PutOutcome:
        """Store the window snapshot behind exactly these tokens, in the place of an earlier one."""
        return run_now(
            self._client.put_snapshot(ns, token_ids, payload, images=images, ttl_s=ttl_s)
        )

    def get_window(self, ns: NamespaceHandle, key: bytes) -> bytes | None:
        """The payload of a window snapshot, verified; None for a miss."""
        return run_now(self._client.get_window(ns, key))

    def put_handover(
        self, ns: NamespaceHandle, request_id: str, payload: Buffer, *, ttl_s: float | None = None
    ) -> PutOutcome:
        """Store the hand-over record of a request, in the place of an earlier one."""
        return run_now(self._client.put_handover(ns, request_id, payload, ttl_s=ttl_s))

    def wait_handover(
        self, ns: NamespaceHandle, request_id: str, deadline_s: float
    ) -> bytes | None:
        """The payload of a hand-over record, verified, as soon as it is there; None where it did
        not come within `deadline_s` from now. Reading does not consume it."""
        return run_now(self._client.wait_handover(ns, request_id, deadline_s))

    def drop_handover(self, ns: NamespaceHandle, request_id: str) -> bool:
        """Let a hand-over record go; whether it was there."""
        return run_now(self._client.drop_handover(ns, request_id))

    def evict(
        self,
        ns: NamespaceHandle | bytes | None = None,
        keys: Sequence[bytes] | None = None,
        tier: Tier | None = None,
    ) -> int:
        """Drop blocks, leaf first; pinned ones stay. Returns how many left."""
        return run_now(self._client.evict(ns, keys, tier))

    def flush(self) -> None:
        """Returns when everything accepted so far is durable."""
        run_now(self._client.flush())

    def verify(
        self, progress: Progress | None = None, deadline_s: float = VERIFY_DEADLINE_S_DEFAULT
    ) -> VerifyReport:
        """Read and check every frame of every tier."""
        return run_now(self._client.verify(progress, deadline_s))

    def stat(self) -> Stat:
        """Sizes and counters now."""
        return run_now(self._client.stat())

    def ls(
        self,
        ns: NamespaceHandle | bytes | None = None,
        limit: int = LS_LIMIT_DEFAULT,
        after: bytes | None = None,
    ) -> list[BlockInfo]:
        """Some blocks of the store; go on behind the last one's key with `after`."""
        return run_now(self._client.ls(ns, limit, after))

    def close(self) -> None:
        """Let go of the store; an embedded one writes back and closes. Idempotent."""
        run_now(self._client.close())

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
