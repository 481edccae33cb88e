"""The calls for window snapshots and hand-over records: messages in, the engine's answers out.

A payload may be larger than a message, so over gRPC it comes and goes as a stream of them; on the
data port it is the body of one frame.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from kvstore.block import PutOutcome, SnapshotPlace, check_window_name
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.server import wire
from kvstore.server.messages import parse
from kvstore.server.waits import unless
from kvstore.store import Engine
from kvstore.store.types import WindowHead
from kvstore.v1 import kvstore_pb2 as pb


def window_name(request: Any) -> bytes | str:
    """The name in a message. Raises `InvalidRequest`."""
    which = request.WhichOneof("name")
    if which is None:
        raise InvalidRequest("the message names neither a key nor a request id")
    name: bytes | str = getattr(request, which)
    check_window_name(name)
    return name


def window_head(request: Any) -> WindowHead:
    """What a `PutWindowRequest` says before its bytes. Raises `InvalidRequest`."""
    place = None
    if request.HasField("place"):
        p = request.place
        place = SnapshotPlace(p.parent, p.blocks, p.tail_tokens)
    ttl_s = request.ttl_s if request.HasField("ttl_s") else None
    return WindowHead(window_name(request), place, request.payload_bytes, request.checksum, ttl_s)


class WindowService:
    """Handlers as `kvstore.server.service.Service` has them. `draining`: ends what only waits."""

    def __init__(self, engine: Engine, message_bytes_max: int, draining: asyncio.Event) -> None:
        self._engine, self._draining = engine, draining
        self._chunk_bytes = wire.chunk_bytes(message_bytes_max)

    async def put(self, requests: AsyncIterator[bytes]) -> wire.Parts:
        """A payload that comes in chunks goes to its place in the pool as it comes."""
        limit_s = self._engine.window_fill_s_max
        try:
            async with asyncio.timeout(limit_s):
                outcome = await self._take(requests)
        except TimeoutError:
            raise Unavailable(
                f"the payload did not come within {limit_s:g} s (windows.fill_s_max)"
            ) from None
        reply = pb.PutWindowReply(outcome=pb.PutOutcome.Name(outcome.value))
        return [reply.SerializeToString()]

    async def _take(self, requests: AsyncIterator[bytes]) -> PutOutcome:
        data = await anext(requests, None)
        if data is None:
            raise InvalidRequest("a put without any message")
        request = parse(pb.PutWindowRequest, data)
        writer = self._engine.begin_window(request.namespace_id, window_head(request))
        if writer is None:
            return PutOutcome.NO_SPACE
        try:
            writer.append(request.chunk)
            async for data in requests:
                writer.append(parse(pb.PutWindowRequest, data).chunk)
        except BaseException:
            writer.abort()
            raise
        return await writer.commit()

    async def get(self, data: bytes) -> AsyncGenerator[wire.Parts, None]:
        """The payload in chunks; it stays in the pool until the last is taken."""
        request = parse(pb.GetWindowRequest, data)
        frame = await self._engine.get_window(request.namespace_id, window_name(request))
        if frame is None:
            yield [pb.GetWindowReply().SerializeToString()]
            return
        try:
            reply = pb.GetWindowReply(
                found=True, payload_bytes=len(frame.payload), checksum=frame.checksum
            )
            for at in range(0, max(1, len(frame.payload)), self._chunk_bytes):
                reply.chunk = bytes(frame.payload[at : at + self._chunk_bytes])
                yield [reply.SerializeToString()]
                reply = pb.GetWindowReply()
        finally:
            frame.done()

    async def wait(self, data: bytes) -> wire.Parts:
        """Until the record is there, or the time is up."""
        request = parse(pb.WaitWindowRequest, data)
        found = await unless(
            self._draining,
            self._engine.wait_window(request.namespace_id, request.request_id, request.deadline_s),
        )
        return [pb.WaitWindowReply(found=found).SerializeToString()]

    async def drop(self, data: bytes) -> wire.Parts:
        """Whether there was one."""
        request = parse(pb.DropWindowRequest, data)
        found = self._engine.drop_window(request.namespace_id, window_name(request))
        return [pb.DropWindowReply(found=found).SerializeToString()]
