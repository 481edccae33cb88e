"""The calls of the data port: the service's own, and reads and puts whose bytes travel beside the
message."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.block import Outcome, Tier
from kvstore.errors import InvalidRequest, MessageTooLarge
from kvstore.server import messages
from kvstore.server.messages import parse
from kvstore.server.port.frames import METHODS
from kvstore.server.port.peer import NO_BYTES, Peer
from kvstore.server.service import Service, parse_durability, parse_keys
from kvstore.server.windows import window_head, window_name
from kvstore.store import Engine
from kvstore.store.core import NOT_IN_DRAM
from kvstore.store.types import BlockFrames, Gathered, PackedBlocks, WindowPut
from kvstore.v1 import kvstore_pb2 as pb

AT_ONCE = frozenset({"Match", "Acquire", "Renew", "Release"})
"""Calls that the engine answers without waiting for anything."""
READ_AT_ONCE_BLOCKS = 128
"""More are not looked at on the event loop's own time."""


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Reply:
    """An answer. `release` MUST be called once `body` has been sent or given up."""

    message: bytes
    body: Sequence[memoryview] = ()
    release: Callable[[], None] = _nothing


@dataclass(slots=True)
class Request:
    """A call as it came in. `body` stays unchanged until the call is answered."""

    message: bytes
    peer: Peer = field(default_factory=Peer)
    body: memoryview = NO_BYTES


Answer = Callable[[Request], Coroutine[Any, Any, Reply]]


class Calls:
    """Answers by method name; errors are those of `kvstore.errors`."""

    def __init__(self, service: Service, engine: Engine, frame_bytes_max: int) -> None:
        self._engine, self._service = engine, service
        self._frame_bytes_max = frame_bytes_max
        own = {
            "BulkRead": self._read,
            "BulkPut": self._put,
            "PutWindow": self._put_window,
            "GetWindow": self._get_window,
        }
        known = service.unary()
        self.by_name: dict[str, Answer] = {
            name: own[name] if name in own else self._of_service(known[name]) for name in METHODS
        }

    def _of_service(self, handler: Any) -> Answer:
        async def answer(request: Request) -> Reply:
            if len(request.body):
                raise InvalidRequest(f"{len(request.body)} B behind a message that has no body")
            parts = await handler(request.message)
            return Reply(bytes(parts[0]) if len(parts) == 1 else b"".join(parts))

        return answer

    def read_at_once(self, request: Request) -> Reply | None:
        """A read that DRAM can serve; None where it has to be waited for."""
        message = parse(pb.BulkReadRequest, request.message)
        keys = parse_keys(message.keys)
        if len(keys) > READ_AT_ONCE_BLOCKS:
            return None
        gathered = self._engine.gather(message.lease_id, keys, list(message.sections) or None)
        if gathered is None:
            return None
        try:
            return self._gathered_reply(message, keys, gathered, request.peer.shares)
        except BaseException:
            gathered.release()
            raise

    def _gathered_reply(
        self, message: Any, keys: Sequence[bytes], gathered: Gathered, shares: bool
    ) -> Reply:
        outcomes = bytes([outcome.value for outcome in gathered.outcomes])
        hits = outcomes.count(Outcome.HIT.value)
        reply = pb.BulkReadReply(
            outcomes=outcomes, tiers=bytes((Tier.DRAM,)) * len(keys), checksums=gathered.checksums
        )
        reply.section_bytes.extend(gathered.section_bytes)
        body = gathered.body
        if message.locate and shares:
            self._service.locate(reply, message.lease_id, keys)
            reply.checksums, body = b"", []
        self._check_body(hits, body)
        return Reply(reply.SerializeToString(), body, gathered.release)

    async def _read(self, request: Request) -> Reply:
        message = parse(pb.BulkReadRequest, request.message)
        keys = parse_keys(message.keys)
        sections = list(message.sections) or None
        # the reader verifies what arrives, which covers the way from DRAM too
        blocks = await self._engine.read(message.lease_id, keys, sections, verify=False)
        return self._read_reply(message, keys, blocks, request.peer.shares)

    def _read_reply(
        self, message: Any, keys: Sequence[bytes], blocks: Sequence[BlockFrames], shares: bool
    ) -> Reply:
        try:
            return self._compose(message, keys, blocks, shares)
        except BaseException:
            _done(blocks)
            raise

    def _compose(
        self, message: Any, keys: Sequence[bytes], blocks: Sequence[BlockFrames], shares: bool
    ) -> Reply:
        reply = pb.BulkReadReply(
            outcomes=bytes([block.outcome.value for block in blocks]),
            tiers=bytes([block.tier.value for block in blocks]),
        )
        sent = [block for block in blocks if block.outcome is Outcome.HIT]
        if sent:
            reply.section_bytes.extend(map(len, sent[0].sections))
        if message.locate and shares:
            places = self._service.locate(reply, message.lease_id, keys)
            in_dram = (places[:, 0] != NOT_IN_DRAM).tolist()
            sent = [
                block
                for block, there in zip(blocks, in_dram, strict=True)
                if block.outcome is Outcome.HIT and not there
            ]
        body = [section for block in sent for section in block.sections]
        self._check_body(len(sent), body)
        reply.checksums = b"".join([c for block in sent for c in block.checksums])
        return Reply(reply.SerializeToString(), body, lambda: _done(blocks))

    def _check_body(self, blocks: int, body: Sequence[memoryview]) -> None:
        size = sum(map(len, body))
        if size > self._frame_bytes_max:
            raise MessageTooLarge(
                f"{blocks} blocks have {size} B, and one frame carries {self._frame_bytes_max} B "
                "(server.data_port.frame_bytes_max); ask for fewer at a time"
            )

    async def _put(self, request: Request) -> Reply:
        message = parse(pb.BulkPutRequest, request.message)
        keys = parse_keys(message.keys)
        parents = messages.unpack_keys(message.parents)
        if len(keys) != len(parents):
            raise InvalidRequest(f"{len(keys)} keys with {len(parents)} parents")
        sizes = list(message.section_bytes)
        payload = _payload(message, request, len(keys) * sum(sizes))
        blocks = PackedBlocks(keys, parents, payload, sizes, message.checksums)
        durability = parse_durability(message.durability)
        outcomes = await self._engine.put_packed(message.namespace_id, blocks, durability)
        packed = messages.pack_put_outcomes(outcomes)
        return Reply(pb.PutReply(outcomes=packed).SerializeToString())

    async def _put_window(self, request: Request) -> Reply:
        message = parse(pb.PutWindowRequest, request.message)
        put = WindowPut(window_head(message), request.body)
        outcome = await self._engine.put_window(message.namespace_id, put)
        reply = pb.PutWindowReply(outcome=pb.PutOutcome.Name(outcome.value))
        return Reply(reply.SerializeToString())

    async def _get_window(self, request: Request) -> Reply:
        message = parse(pb.GetWindowRequest, request.message)
        if len(request.body):
            raise InvalidRequest(f"{len(request.body)} B behind a message that has no body")
        frame = await self._engine.get_window(message.namespace_id, window_name(message))
        if frame is None:
            return Reply(pb.GetWindowReply().SerializeToString())
        size = len(frame.payload)
        if size > self._frame_bytes_max:
            frame.done()
            raise MessageTooLarge(
                f"the payload has {size} B, and one frame carries {self._frame_bytes_max} B "
                "(server.data_port.frame_bytes_max); get it over gRPC"
            )
        reply = pb.GetWindowReply(found=True, payload_bytes=size, checksum=frame.checksum)
        return Reply(reply.SerializeToString(), [frame.payload], frame.done)


def _done(blocks: Sequence[BlockFrames]) -> None:
    for block in blocks:
        block.done()


def _payload(message: Any, request: Request, size: int) -> memoryview:
    """The sections' bytes: the frame's body, or a piece of the staging area."""
    if not message.HasField("staging_offset"):
        if len(request.body) != size:
            raise InvalidRequest(f"sections of {size} B in all, and a body of {len(request.body)}")
        return request.body
    at, area = message.staging_offset, request.peer.staging
    if len(request.body) or at + size > len(area):
        raise InvalidRequest(
            f"{size} B from {at} on leave the staging area of {len(area)} B, or came with a body"
        )
    return area[at : at + size]
