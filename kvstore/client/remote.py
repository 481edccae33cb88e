"""The transport to a daemon: the store's calls as protobuf messages, whoever carries them."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from kvstore.block import BlockPut, Durability, Match, Outlook, PutOutcome, Tier
from kvstore.client.transport import ArrivedWindow, NoBulk, Progress
from kvstore.errors import InvalidRequest, KVStoreError, MessageTooLarge
from kvstore.namespace import Namespace
from kvstore.server import messages, wire
from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    VerifyReport,
    WindowPut,
)
from kvstore.v1 import kvstore_pb2 as pb

HELLO_BYTES_MAX = 64 << 10
"""What any daemon takes before its own limit is known."""
WAIT_S_MAX = 1.0
"""Of one wait, before it is known how long the daemon lets a call last."""


class Carrier(Protocol):
    """Takes encoded messages to the daemon and brings its answers back.

    Blocking or suspending as `kvstore.client.transport` has it. Raises the daemon's errors, and
    `Unavailable` once `timeout_s` has passed or the daemon is gone.
    """

    async def unary(self, name: str, request: wire.Parts, timeout_s: float) -> bytes:
        """One message there, one back. `name`: the method's."""
        ...

    def stream(
        self, name: str, request: wire.Parts, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """One message there, any number back."""
        ...

    async def collect(self, name: str, requests: Iterator[bytes], timeout_s: float) -> bytes:
        """Any number of messages there, one back. `requests` may be asked for on any thread."""
        ...

    async def close(self) -> None: ...


def _ttl(ttl_s: float | None) -> dict[str, Any]:
    return {} if ttl_s is None else {"ttl_s": ttl_s}


class RemoteTransport(NoBulk):
    """`kvstore.client.transport.Transport` over a carrier. `peer`: the URL, for errors."""

    def __init__(self, carrier: Carrier, peer: str) -> None:
        self._carrier = carrier
        self._peer = peer
        self._message_bytes_max = HELLO_BYTES_MAX
        self._wait_s_max = WAIT_S_MAX

    @property
    def message_bytes_max(self) -> int | None:
        return self._message_bytes_max

    async def hello(self, timeout_s: float) -> None:
        """Reach the daemon and learn its limits. Raises `Unavailable`."""
        reply = await self._ask("Hello", pb.HelloRequest(), pb.HelloReply, timeout_s)
        self._message_bytes_max = reply.message_bytes_max
        self._wait_s_max = reply.deadline_s_max / 2
        self._met(reply)

    def _met(self, hello: Any) -> None:
        """The daemon has said what it is."""

    async def _send(self, name: str, request: wire.Parts, timeout_s: float) -> bytes:
        size = wire.parts_bytes(request)
        if size > self._message_bytes_max:
            raise MessageTooLarge(
                f"a {name} message of {size} B passes the {self._message_bytes_max} B that "
                f"{self._peer} takes; send less at a time or raise server.message_bytes_max"
            )
        try:
            return await self._carry(name, request, timeout_s)
        except MessageTooLarge:
            # The daemon was started again with another limit; the next call will know it.
            await self.hello(timeout_s)
            raise

    async def _carry(self, name: str, request: wire.Parts, timeout_s: float) -> bytes:
        return await self._carrier.unary(name, request, timeout_s)

    def _decoded(self, name: str, decode: Callable[[bytes], Any], reply: bytes) -> Any:
        try:
            return decode(reply)
        except (DecodeError, InvalidRequest, LookupError) as e:
            raise KVStoreError(f"{self._peer}: the answer to {name} can't be read: {e}") from e

    async def _ask(self, name: str, request: Any, reply: Any, timeout_s: float) -> Any:
        data = await self._send(name, [request.SerializeToString()], timeout_s)
        return self._decoded(name, reply.FromString, data)

    async def open_namespace(self, namespace: Namespace, timeout_s: float) -> bytes:
        request = pb.OpenNamespaceRequest(canonical_json=namespace.canonical_json())
        reply = await self._ask("OpenNamespace", request, pb.OpenNamespaceReply, timeout_s)
        namespace_id: bytes = reply.namespace_id
        return namespace_id

    async def match(self, namespace_id: bytes, keys: Sequence[bytes], timeout_s: float) -> Match:
        request = pb.MatchRequest(namespace_id=namespace_id, keys=messages.pack_keys(keys))
        reply = await self._ask("Match", request, pb.MatchReply, timeout_s)
        return messages.match_from_pb(reply)

    async def wait_for(
        self, namespace_id: bytes, keys: Sequence[bytes], wait_s: float, timeout_s: float
    ) -> Match:
        wait_s = min(wait_s, self._wait_s_max)
        request = pb.WaitForRequest(
            namespace_id=namespace_id, keys=messages.pack_keys(keys), deadline_s=wait_s
        )
        reply = await self._ask("WaitFor", request, pb.MatchReply, wait_s + timeout_s)
        return messages.match_from_pb(reply)

    async def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], ttl_s: float | None, timeout_s: float
    ) -> LeaseGrant:
        reply = await self._acquire(namespace_id, keys, ttl_s, timeout_s)
        return messages.lease_from_pb(reply)

    async def _acquire(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        ttl_s: float | None,
        timeout_s: float,
        locate: bool = False,
        locate_hbm: bool = False,
    ) -> Any:
        request = pb.AcquireRequest(
            namespace_id=namespace_id,
            keys=messages.pack_keys(keys),
            locate=locate,
            locate_hbm=locate_hbm,
            **_ttl(ttl_s),
        )
        return await self._ask("Acquire", request, pb.AcquireReply, timeout_s)

    async def renew(self, lease_id: int, ttl_s: float | None, timeout_s: float) -> float:
        request = pb.RenewRequest(lease_id=lease_id, **_ttl(ttl_s))
        granted: float = (await self._ask("Renew", request, pb.RenewReply, timeout_s)).ttl_s
        return granted

    async def release(self, lease_id: int, timeout_s: float) -> None:
        await self._ask("Release", pb.ReleaseRequest(lease_id=lease_id), pb.ReleaseReply, timeout_s)

    async def read(
        self,
        lease_id: int,
        keys: Sequence[bytes],
        sections: Sequence[int] | None,
        timeout_s: float,
    ) -> list[BlockFrames]:
        request = pb.ReadRequest(
            lease_id=lease_id, keys=messages.pack_keys(keys), sections=sections or ()
        )
        data = await self._send("Read", [request.SerializeToString()], timeout_s)
        blocks: list[BlockFrames] = self._decoded(
            "Read", lambda reply: wire.decode_read_reply(reply, keys), data
        )
        return blocks

    async def put_window(self, namespace_id: bytes, put: WindowPut, timeout_s: float) -> PutOutcome:
        messages_out = _window_messages(
            namespace_id, put, wire.chunk_bytes(self._message_bytes_max)
        )
        data = await self._carrier.collect("PutWindow", messages_out, timeout_s)
        reply = self._decoded("PutWindow", pb.PutWindowReply.FromString, data)
        return PutOutcome(reply.outcome)

    async def get_window(
        self, namespace_id: bytes, name: bytes | str, timeout_s: float
    ) -> ArrivedWindow | None:
        request = messages.named_to_pb(pb.GetWindowRequest, namespace_id, name)
        parts: wire.Parts = [request.SerializeToString()]
        payload, head = bytearray(), None
        async with aclosing(self._carrier.stream("GetWindow", parts, timeout_s)) as replies:
            async for data in replies:
                reply = self._decoded("GetWindow", pb.GetWindowReply.FromString, data)
                head = head or reply
                payload += reply.chunk
                if len(payload) > head.payload_bytes:
                    break
        if head is None or len(payload) != head.payload_bytes:
            raise KVStoreError(f"{self._peer}: the answer to GetWindow is of another size")
        return ArrivedWindow(bytes(payload), head.checksum) if head.found else None

    async def wait_window(
        self, namespace_id: bytes, request_id: str, wait_s: float, timeout_s: float
    ) -> bool:
        wait_s = min(wait_s, self._wait_s_max)
        request = pb.WaitWindowRequest(
            namespace_id=namespace_id, request_id=request_id, deadline_s=wait_s
        )
        reply = await self._ask("WaitWindow", request, pb.WaitWindowReply, wait_s + timeout_s)
        found: bool = reply.found
        return found

    async def drop_window(self, namespace_id: bytes, name: bytes | str, timeout_s: float) -> bool:
        request = messages.named_to_pb(pb.DropWindowRequest, namespace_id, name)
        found: bool = (await self._ask("DropWindow", request, pb.DropWindowReply, timeout_s)).found
        return found

    async def answered(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        outlook: Outlook,
        lasting_blocks: int | None,
        timeout_s: float,
    ) -> None:
        only = {} if lasting_blocks is None else {"lasting_blocks": lasting_blocks}
        request = pb.AnsweredRequest(
            namespace_id=namespace_id,
            keys=messages.pack_keys(keys),
            outlook=pb.Outlook.Name(int(outlook)),
            **only,
        )
        await self._ask("Answered", request, pb.AnsweredReply, timeout_s)

    async def report_corrupt(self, namespace_id: bytes, key: bytes, timeout_s: float) -> None:
        request = pb.ReportCorruptRequest(namespace_id=namespace_id, key=key)
        await self._ask("ReportCorrupt", request, pb.ReportCorruptReply, timeout_s)

    async def put(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
    ) -> list[PutOutcome]:
        request = wire.encode_put(namespace_id, durability, blocks)
        data = await self._send("Put", request, timeout_s)
        reply = self._decoded("Put", pb.PutReply.FromString, data)
        return messages.unpack_put_outcomes(reply.outcomes)

    async def reserve(
        self,
        namespace_id: bytes,
        blocks: Sequence[tuple[bytes, bytes]],
        ttl_s: float | None,
        timeout_s: float,
    ) -> ReservationGrant:
        request = pb.ReserveRequest(
            namespace_id=namespace_id,
            keys=messages.pack_keys([key for key, _ in blocks]),
            parents=messages.pack_keys([parent for _, parent in blocks]),
            **_ttl(ttl_s),
        )
        return messages.reservation_from_pb(
            await self._ask("Reserve", request, pb.ReserveReply, timeout_s)
        )

    async def write(self, reservation_id: int, block: BlockPut, timeout_s: float) -> None:
        await self._send("Write", wire.encode_write(reservation_id, block), timeout_s)

    async def commit(
        self, reservation_id: int, durability: Durability, timeout_s: float
    ) -> list[PutOutcome]:
        request = pb.CommitRequest(
            reservation_id=reservation_id, durability=pb.Durability.Name(durability.value)
        )
        reply = await self._ask("Commit", request, pb.CommitReply, timeout_s)
        return messages.unpack_put_outcomes(reply.outcomes)

    async def abort(self, reservation_id: int, timeout_s: float) -> None:
        request = pb.AbortRequest(reservation_id=reservation_id)
        await self._ask("Abort", request, pb.AbortReply, timeout_s)

    async def evict(
        self,
        namespace_id: bytes | None,
        keys: Sequence[bytes] | None,
        tier: Tier | None,
        timeout_s: float,
    ) -> int:
        only = {} if keys is None else {"keys": messages.pack_keys(keys)}
        request = pb.EvictRequest(namespace_id=namespace_id or b"", tier=int(tier or 0), **only)
        blocks: int = (await self._ask("Evict", request, pb.EvictReply, timeout_s)).blocks
        return blocks

    async def flush(self, timeout_s: float) -> None:
        await self._ask("Flush", pb.FlushRequest(), pb.FlushReply, timeout_s)

    async def verify(self, progress: Progress | None, timeout_s: float) -> VerifyReport:
        request: wire.Parts = [pb.VerifyRequest().SerializeToString()]
        async with aclosing(self._carrier.stream("Verify", request, timeout_s)) as replies:
            async for data in replies:
                reply = self._decoded("Verify", pb.VerifyReply.FromString, data)
                if reply.HasField("report"):
                    return messages.report_from_pb(reply.report)
                if progress is not None:
                    progress(reply.done, reply.total)
        raise KVStoreError(f"{self._peer}: verify ended without its report")

    async def stat(self, timeout_s: float) -> Stat:
        return messages.stat_from_pb(
            await self._ask("Stat", pb.StatRequest(), pb.StatReply, timeout_s)
        )

    async def ls(
        self, namespace_id: bytes | None, limit: int, after: bytes | None, timeout_s: float
    ) -> list[BlockInfo]:
        request = pb.LsRequest(namespace_id=namespace_id or b"", limit=limit, after=after or b"")
        reply = await self._ask("Ls", request, pb.LsReply, timeout_s)
        return [messages.info_from_pb(m) for m in reply.blocks]

    async def close(self) -> None:
        await self._carrier.close()


def _window_messages(namespace_id: bytes, put: WindowPut, chunk: int) -> Iterator[bytes]:
    payload = wire.byte_view(put.payload)
    request = messages.put_window_to_pb(namespace_id, put.head)
    for at in range(0, max(1, len(payload)), chunk):
        request.chunk = bytes(payload[at : at + chunk])
        yield request.SerializeToString()
        request = pb.PutWindowRequest()
