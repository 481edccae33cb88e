"""Every call of the service: the message in, the engine's answer out, and nothing else."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from kvstore.block import Durability, Outlook, Tier
from kvstore.errors import InvalidRequest, MessageTooLarge, Unavailable
from kvstore.namespace import Namespace
from kvstore.server import messages, wire
from kvstore.server.messages import parse
from kvstore.server.waits import unless
from kvstore.server.windows import WindowService
from kvstore.store import Engine
from kvstore.store.types import VerifyReport
from kvstore.v1 import kvstore_pb2 as pb

VERIFY_PROGRESS_S = 0.5
"""How often a running verify tells how far it is."""

Handler = Callable[[bytes], Coroutine[Any, Any, wire.Parts]]
StreamHandler = Callable[[bytes], AsyncGenerator[wire.Parts, None]]
CollectHandler = Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, wire.Parts]]


def parse_durability(number: int) -> Durability:
    """Raises `InvalidRequest`."""
    try:
        return Durability(number)
    except ValueError:
        raise InvalidRequest(f"durability {number} is unknown") from None


def parse_keys(packed: bytes) -> list[bytes]:
    """At least one key. Raises `InvalidRequest`."""
    keys = messages.unpack_keys(packed)
    messages.check_some(keys, "keys")
    return keys


def _tier(number: int) -> Tier | None:
    if number not in (Tier.NONE, Tier.HBM, Tier.DRAM, Tier.SSD):
        raise InvalidRequest(f"{number} is no tier")
    return Tier(number) or None


def _ttl(request: Any) -> float | None:
    return request.ttl_s if request.HasField("ttl_s") else None


def _encoded(reply: Any) -> wire.Parts:
    return [reply.SerializeToString()]


class Service:
    """Answers calls from `engine`.

    Handlers take and return encoded messages and raise the errors of `kvstore.errors`; who carries
    the messages is not their business. `hello` makes what the daemon says of itself. `arena_id`:
    names the arena to those who map it; empty where nobody can.
    """

    def __init__(
        self,
        engine: Engine,
        hello: Callable[[], Any],
        message_bytes_max: int,
        arena_id: bytes = b"",
    ) -> None:
        self.arena_id = arena_id
        self._engine = engine
        self._hello = hello
        self._message_bytes_max = message_bytes_max
        self._draining = asyncio.Event()
        self.windows = WindowService(engine, message_bytes_max, self._draining)

    def unary(self) -> dict[str, Handler]:
        """Handlers of the calls with one message each way, by method name."""
        return {
            "Hello": self._say_hello,
            "OpenNamespace": self._open_namespace,
            "Match": self._match,
            "WaitFor": self._wait_for,
            "Acquire": self._acquire,
            "Renew": self._renew,
            "Release": self._release,
            "Read": self._read,
            "ReportCorrupt": self._report_corrupt,
            "Answered": self._answered,
            "Put": self._put,
            "Reserve": self._reserve,
            "Write": self._write,
            "Commit": self._commit,
            "Abort": self._abort,
            "WaitWindow": self.windows.wait,
            "DropWindow": self.windows.drop,
            "Evict": self._evict,
            "Flush": self._flush,
            "Stat": self._stat,
            "Ls": self._ls,
        }

    def streamed(self) -> dict[str, StreamHandler]:
        """Handlers of the calls that answer with a stream."""
        return {"Verify": self._verify, "GetWindow": self.windows.get}

    def collected(self) -> dict[str, CollectHandler]:
        """Handlers of the calls that take a stream."""
        return {"PutWindow": self.windows.put}

    def drain(self) -> None:
        """End the calls that only wait."""
        self._draining.set()

    async def _say_hello(self, data: bytes) -> wire.Parts:
        return _encoded(self._hello())

    async def _open_namespace(self, data: bytes) -> wire.Parts:
        request = parse(pb.OpenNamespaceRequest, data)
        namespace = Namespace.from_json(request.canonical_json)
        return _encoded(pb.OpenNamespaceReply(namespace_id=self._engine.open_namespace(namespace)))

    async def _match(self, data: bytes) -> wire.Parts:
        request = parse(pb.MatchRequest, data)
        # a prompt shorter than one block has no keys, but it may have snapshots
        keys = messages.unpack_keys(request.keys)
        return _encoded(messages.match_to_pb(self._engine.match(request.namespace_id, keys)))

    async def _wait_for(self, data: bytes) -> wire.Parts:
        request = parse(pb.WaitForRequest, data)
        keys = parse_keys(request.keys)
        match = await unless(
            self._draining,
            self._engine.wait_for(request.namespace_id, keys, request.deadline_s),
        )
        return _encoded(messages.match_to_pb(match))

    async def _acquire(self, data: bytes) -> wire.Parts:
        request = parse(pb.AcquireRequest, data)
        keys = parse_keys(request.keys)
        grant = await self._engine.acquire(request.namespace_id, keys, _ttl(request))
        reply = messages.lease_to_pb(grant)
        if request.locate and self.arena_id:
            self.locate(reply, grant.lease_id, None)
            if request.locate_hbm:
                places = self._engine.locate_hbm(grant.lease_id)
                reply.hbm_slots = places.astype("<u8", copy=False).tobytes()
        return _encoded(reply)

    def locate(self, reply: Any, lease_id: int, keys: Sequence[bytes] | None) -> Any:
        """Write the places of blocks into a reply that has room for them, and return them; see
        `Engine.locate`."""
        places = self._engine.locate(lease_id, keys)
        reply.slots = places.astype("<u8", copy=False).tobytes()
        reply.arena_id = self.arena_id
        return places

    async def _renew(self, data: bytes) -> wire.Parts:
        request = parse(pb.RenewRequest, data)
        ttl_s = await self._engine.renew(request.lease_id, _ttl(request))
        return _encoded(pb.RenewReply(ttl_s=ttl_s))

    async def _release(self, data: bytes) -> wire.Parts:
        await self._engine.release(parse(pb.ReleaseRequest, data).lease_id)
        return _encoded(pb.ReleaseReply())

    async def _read(self, data: bytes) -> wire.Parts:
        request = parse(pb.ReadRequest, data)
        keys = parse_keys(request.keys)
        sections = list(request.sections) or None
        # The reader verifies what arrives, which covers the way from DRAM too.
        blocks = await self._engine.read(request.lease_id, keys, sections, verify=False)
        try:
            # Joined while the blocks are pinned: the bytes leave the arena here.
            return [self._bounded(wire.encode_read_reply(blocks))]
        finally:
            for block in blocks:
                block.done()

    def _bounded(self, reply: wire.Parts) -> bytes:
        size = wire.parts_bytes(reply)
        if size > self._message_bytes_max:
            raise MessageTooLarge(
                f"the answer of {size} B passes the {self._message_bytes_max} B of one message; "
                "ask for fewer blocks or sections at a time"
            )
        return b"".join(reply)

    async def _report_corrupt(self, data: bytes) -> wire.Parts:
        request = parse(pb.ReportCorruptRequest, data)
        await self._engine.report_corrupt(
            request.namespace_id, messages.check_digest(request.key, "key")
        )
        return _encoded(pb.ReportCorruptReply())

    async def _answered(self, data: bytes) -> wire.Parts:
        request = parse(pb.AnsweredRequest, data)
        keys = parse_keys(request.keys)
        try:
            outlook = Outlook(request.outlook)
        except ValueError:
            raise InvalidRequest(f"outlook {request.outlook} is unknown") from None
        lasting = request.lasting_blocks if request.HasField("lasting_blocks") else None
        await self._engine.answered(request.namespace_id, keys, outlook, lasting)
        return _encoded(pb.AnsweredReply())

    async def _put(self, data: bytes) -> wire.Parts:
        request = wire.decode_put(data)
        messages.check_some(request.blocks, "blocks")
        messages.check_digests([block.key for block in request.blocks], "key of block")
        messages.check_digests([block.parent for block in request.blocks], "parent of block")
        outcomes = await self._engine.put(request.namespace_id, request.blocks, request.durability)
        return _encoded(pb.PutReply(outcomes=messages.pack_put_outcomes(outcomes)))

    async def _reserve(self, data: bytes) -> wire.Parts:
        request = parse(pb.ReserveRequest, data)
        keys = parse_keys(request.keys)
        parents = messages.unpack_keys(request.parents)
        if len(keys) != len(parents):
            raise InvalidRequest(f"{len(keys)} keys with {len(parents)} parents")
        blocks = list(zip(keys, parents, strict=True))
        grant = await self._engine.reserve(request.namespace_id, blocks, _ttl(request))
        return _encoded(messages.reservation_to_pb(grant))

    async def _write(self, data: bytes) -> wire.Parts:
        request = wire.decode_write(data)
        block = request.block
        await self._engine.write(
            request.reservation_id,
            messages.check_digest(block.key, "key"),
            block.sections,
            block.checksums or (),
        )
        return _encoded(pb.WriteReply())

    async def _commit(self, data: bytes) -> wire.Parts:
        request = parse(pb.CommitRequest, data)
        outcomes = await self._engine.commit(
            request.reservation_id, parse_durability(request.durability)
        )
        return _encoded(pb.CommitReply(outcomes=messages.pack_put_outcomes(outcomes)))

    async def _abort(self, data: bytes) -> wire.Parts:
        await self._engine.abort(parse(pb.AbortRequest, data).reservation_id)
        return _encoded(pb.AbortReply())

    async def _evict(self, data: bytes) -> wire.Parts:
        request = parse(pb.EvictRequest, data)
        keys: Sequence[bytes] | None = None
        if request.HasField("keys"):
            keys = parse_keys(request.keys)
        tier = _tier(request.tier)
        blocks = await self._engine.evict(request.namespace_id or None, keys, tier)
        return _encoded(pb.EvictReply(blocks=blocks))

    async def _flush(self, data: bytes) -> wire.Parts:
        await self._engine.flush()
        return _encoded(pb.FlushReply())

    async def _stat(self, data: bytes) -> wire.Parts:
        return _encoded(messages.stat_to_pb(self._engine.stat()))

    async def _ls(self, data: bytes) -> wire.Parts:
        request = parse(pb.LsRequest, data)
        blocks = self._engine.ls(request.namespace_id or None, request.limit, request.after or None)
        return _encoded(pb.LsReply(blocks=[messages.info_to_pb(info) for info in blocks]))

    async def _verify(self, data: bytes) -> AsyncGenerator[wire.Parts, None]:
        parse(pb.VerifyRequest, data)
        at, told = (0, 0), (-1, -1)

        def progress(done: int, total: int) -> None:
            nonlocal at
            at = (done, total)

        running = asyncio.create_task(self._engine.verify(progress))
        draining = asyncio.create_task(self._draining.wait())
        try:
            while not running.done():
                if draining.done():
                    raise Unavailable("the daemon is draining")
                if at != told:
                    told = at
                    yield _encoded(pb.VerifyReply(done=at[0], total=at[1]))
                await asyncio.wait(
                    (running, draining),
                    timeout=VERIFY_PROGRESS_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            report: VerifyReport = running.result()
            yield _encoded(
                pb.VerifyReply(done=at[0], total=at[1], report=messages.report_to_pb(report))
            )
        finally:
            running.cancel()
            draining.cancel()
