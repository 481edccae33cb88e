"""What a client needs from a door to the store, whichever it is.

A transport is either *blocking* or *suspending*, and its methods are coroutines in both cases. A
blocking one finishes every coroutine without suspending, having blocked the calling thread; the
synchronous client runs it with `run_now`. That way all that a client knows is written once.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvstore.block import (
    BlockData,
    BlockPut,
    Durability,
    HbmBlock,
    Match,
    Outlook,
    PutOutcome,
    Tier,
)
from kvstore.namespace import Namespace
from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    VerifyReport,
    WindowPut,
)

Progress = Callable[[int, int], None]
"""Called with objects done and objects in all."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BulkRead:
    """Blocks of a lease. `sections`: indices into a layout whose sections have `section_bytes`.
    `into`: room for all of them, one behind the other. `verify`: also what is copied out of shared
    memory, where nothing but that copy was between the store's own check and the caller."""

    lease_id: int
    keys: Sequence[bytes]
    sections: Sequence[int]
    section_bytes: Sequence[int]
    into: memoryview
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a bulk read gave: one block per key, and the keys of those that arrived corrupt, which
    are a MISS among them."""

    blocks: list[BlockData]
    corrupt: list[bytes]


@dataclass(frozen=True, slots=True)
class ArrivedWindow:
    """The payload of an object of the window pool and its xxh3-128, not verified yet."""

    payload: bytes
    checksum: bytes


class NoBulk:
    """The part of a transport that moves everything in messages."""

    @property
    def moves_bulk(self) -> bool:
        return False

    async def read_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        return None

    async def view_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        return None

    def intact(self, lease_id: int, keys: Sequence[bytes]) -> bool:
        return True

    async def open_hbm(self, timeout_s: float) -> str | None:
        return None

    def view_hbm(self, read: BulkRead) -> list[HbmBlock | None]:
        return [None] * len(read.keys)

    async def put_bulk(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome] | None:
        return None


class Transport(Protocol):
    """One method per call of the store; `kvstore.store.Engine` says what each does.

    Every method raises the errors of `kvstore.errors`, and `Unavailable` once `timeout_s` has
    passed or as soon as the store is known to be gone. It never waits longer, and the transport
    finds the store again by itself when it comes back.

    `message_bytes_max`: bound of one `put`, `write` or `read`, overhead of the message included;
    the caller splits. None where there are no messages. `put` and `write` get blocks with their
    checksums set. The sections that `read` returns stay valid as long as they are referenced, and
    are not verified yet.
    """

    @property
    def message_bytes_max(self) -> int | None: ...

    @property
    def moves_bulk(self) -> bool:
        """Whether `read_bulk`, `view_bulk` and `put_bulk` may be called now; each may still answer
        None, and the caller goes on with messages."""
        ...

    async def open_namespace(self, namespace: Namespace, timeout_s: float) -> bytes: ...

    async def match(
        self, namespace_id: bytes, keys: Sequence[bytes], timeout_s: float
    ) -> Match: ...

    async def wait_for(
        self, namespace_id: bytes, keys: Sequence[bytes], wait_s: float, timeout_s: float
    ) -> Match:
        """The wait is `wait_s` at most, `timeout_s` what the call may take beyond it. May end
        earlier with a PENDING; the caller asks again."""
        ...

    async def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], ttl_s: float | None, timeout_s: float
    ) -> LeaseGrant: ...

    async def renew(self, lease_id: int, ttl_s: float | None, timeout_s: float) -> float: ...

    async def release(self, lease_id: int, timeout_s: float) -> None: ...

    async def read(
        self,
        lease_id: int,
        keys: Sequence[bytes],
        sections: Sequence[int] | None,
        timeout_s: float,
    ) -> list[BlockFrames]: ...

    async def read_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        """Any number of blocks into `read.into`, verified here. `timeout_s`: for each batch
        inside."""
        ...

    async def view_bulk(self, read: BulkRead, timeout_s: float) -> Arrived | None:
        """The blocks where they lie, unverified; what can't be had so is as from `read_bulk`."""
        ...

    def intact(self, lease_id: int, keys: Sequence[bytes]) -> bool:
        """Whether what `view_bulk` and `view_hbm` gave of these blocks is still theirs."""
        ...

    async def open_hbm(self, timeout_s: float) -> str | None:
        """Open the store's device pools, for leases from now on; their kind, or None."""
        ...

    def view_hbm(self, read: BulkRead) -> list[HbmBlock | None]:
        """Blocks of a lease where they lie in the opened pools; nothing of `read.into` is used."""
        ...

    async def put_bulk(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome] | None:
        """Any number of blocks, their sections memoryviews; missing checksums are made here."""
        ...

    async def put_window(self, namespace_id: bytes, put: WindowPut, timeout_s: float) -> PutOutcome:
        """`put.payload` is a memoryview."""
        ...

    async def get_window(
        self, namespace_id: bytes, name: bytes | str, timeout_s: float
    ) -> ArrivedWindow | None: ...

    async def wait_window(
        self, namespace_id: bytes, request_id: str, wait_s: float, timeout_s: float
    ) -> bool:
        """As `wait_for`; may end before `wait_s` with False."""
        ...

    async def drop_window(
        self, namespace_id: bytes, name: bytes | str, timeout_s: float
    ) -> bool: ...

    async def answered(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None,
        timeout_s: float,
    ) -> None: ...

    async def report_corrupt(self, namespace_id: bytes, key: bytes, timeout_s: float) -> None: ...

    async def put(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome]: ...

    async def reserve(
        self,
        namespace_id: bytes,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None,
        timeout_s: float,
    ) -> ReservationGrant: ...

    async def write(self, reservation_id: int, block: BlockPut, timeout_s: float) -> None: ...

    async def commit(
        self, reservation_id: int, durability: Durability, timeout_s: float
    ) -> list[PutOutcome]: ...

    async def abort(self, reservation_id: int, timeout_s: float) -> None: ...

    async def evict(
        self,
        namespace_id: bytes | None,
        keys: Sequence[bytes] | None,
        tier: Tier | None,
        timeout_s: float,
    ) -> int: ...

    async def flush(self, timeout_s: float) -> None: ...

    async def verify(self, progress: Progress | None, timeout_s: float) -> VerifyReport: ...

    async def stat(self, timeout_s: float) -> Stat: ...

    async def ls(
        self, namespace_id: bytes | None, limit: int, after: bytes | None, timeout_s: float
    ) -> list[BlockInfo]: ...

    async def close(self) -> None: ...


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a blocking transport to its end on this thread.

    Raises `RuntimeError` where it suspends, which a blocking transport never does.
    """
    try:
        coroutine.send(None)
    except StopIteration as e:
        result: T = e.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking transport suspended")
