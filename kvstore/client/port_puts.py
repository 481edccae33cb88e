"""A bulk put on its way: batches staged in shared memory, or behind their messages."""

import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import xxhash

from kvstore.block import BlockPut, Durability, PutOutcome
from kvstore.client import batching
from kvstore.client.port_reads import AHEAD
from kvstore.client.port_stream import PortStream
from kvstore.server import messages, wire
from kvstore.v1 import kvstore_pb2 as pb

_COPY_HELD_BYTES = 256 << 10
"""So few bytes are copied sooner than the GIL is let go and got back."""


class Putting:
    """One bulk put on its way, within `timeout_s` however many messages it takes."""

    def __init__(
        self,
        namespace_id: bytes,
        blocks: Sequence[BlockPut],
        durability: Durability,
        timeout_s: float,
        limits: tuple[int, int],
    ) -> None:
        self._namespace_id, self._blocks = namespace_id, blocks
        self._durability, self._ends_s = durability, time.monotonic() + timeout_s
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
        checksums = self._stage(blocks, staging)
        request = pb.BulkPutRequest(
            namespace_id=self._namespace_id,
            durability=pb.Durability.Name(self._durability.value),
            keys=messages.pack_keys([block.key for block in blocks]),
            parents=messages.pack_keys([block.parent for block in blocks]),
            section_bytes=self._sizes,
            checksums=checksums,
        )
        body: wire.Parts = []
        if staging is None:
            body = [section for block in blocks for section in self._views(block)]
        else:
            request.staging_offset = offset
        stream.send("BulkPut", request.SerializeToString(), body, self._ends_s)

    def _stage(self, blocks: Sequence[BlockPut], staging: memoryview | None) -> bytes:
        """The sections' checksums. Each section goes into `staging`, where there is any, right
        after it was summed: it is in the processor's cache then, and need not be fetched twice."""
        digests: list[bytes] = []
        at = 0
        for block in blocks:
            digests += block.checksums or ()
            for section in self._views(block):
                if block.checksums is None:
                    digests.append(xxhash.xxh3_128_digest(section))
                if staging is not None:
                    end = at + len(section)
                    _copy(staging[at:end], section)
                    at = end
        return b"".join(digests)

    def _views(self, block: BlockPut) -> Sequence[memoryview]:
        return cast(Sequence[memoryview], block.sections)

    def _receive(self, stream: PortStream) -> None:
        _, message = stream.receive(self._ends_s)
        self._outcomes += messages.unpack_put_outcomes(pb.PutReply.FromString(message).outcomes)


def _copy(to: memoryview, section: memoryview) -> None:
    if len(section) <= _COPY_HELD_BYTES:
        to[:] = section
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(section, np.uint8))
