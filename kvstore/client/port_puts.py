"""A bulk put on its way: batches staged in shared memory, or behind their messages."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.block import BlockPut, Durability, PutOutcome
from kvstore.client import batching
from kvstore.client.port_reads import AHEAD
from kvstore.client.port_stream import PortStream
from kvstore.server import messages, wire
from kvstore.v1 import kvstore_pb2 as pb


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
        stream.send("BulkPut", request.SerializeToString(), body, self._ends_s)

    def _stage(self, sections: Sequence[Sequence[memoryview]], staging: memoryview) -> None:
        area = np.frombuffer(staging, np.uint8)
        at = 0
        for own in sections:
            for section in own:
                np.copyto(area[at : at + len(section)], np.frombuffer(section, np.uint8))
                at += len(section)

    def _receive(self, stream: PortStream) -> None:
        _, message = stream.receive(self._ends_s)
        self._outcomes += messages.unpack_put_outcomes(pb.PutReply.FromString(message).outcomes)
