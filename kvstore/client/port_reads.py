"""A bulk read on its way: out of HBM and the arena where those are mapped, else over a stream."""

import logging
import time
from collections.abc import Sequence

import numpy as np

from kvstore.block import BlockData, Outcome, Tier
from kvstore.client import batching
from kvstore.client.port_stream import PortStream, StreamLost
from kvstore.client.shared_arena import Copied, LocatedLease, Pieces
from kvstore.client.transport import Arrived, BulkRead
from kvstore.server import messages, wire
from kvstore.tiers.hbm.device import DeviceError
from kvstore.v1 import kvstore_pb2 as pb

AHEAD = 2
"""Batches asked for or sent before the answer to the first is waited for."""
PIECE_BYTES = 1 << 20
"""What is received before it is verified, while the socket's buffers fill again."""
_HIT = bytes((Outcome.HIT.value,))
_log = logging.getLogger(__name__)


class Reading:
    """One bulk read on its way, within `timeout_s` however many messages it takes. `lease`: where
    its blocks lie, if that is known."""

    def __init__(self, read: BulkRead, lease: LocatedLease | None, timeout_s: float) -> None:
        self._read, self.lease = read, lease
        self._ends_s = time.monotonic() + timeout_s
        self._pieces = Pieces.of(tuple(read.section_bytes), tuple(read.sections))
        self._sizes = [b - a for a, b in self._pieces.spans]
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
        size = batching.bulk_blocks(self._sizes, batching.BULK_READ_BYTES, *limits)
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
        outcomes, tiers = reply.outcomes, reply.tiers
        if not len(outcomes) == len(tiers) == len(batch):
            raise StreamLost("an answer to another read", answered=True)
        hits = batch
        if outcomes != _HIT * len(batch):
            hits = [i for i, n in zip(batch, outcomes, strict=True) if n == Outcome.HIT.value]
        if hits and list(reply.section_bytes) != self._sizes:
            raise StreamLost("sections of another layout", answered=True)
        tier_of = dict(zip(batch, map(messages.TIERS.__getitem__, tiers), strict=True))
        sent = hits
        if self.lease is not None and reply.arena_id == self.lease.arena.instance_id:
            places = np.frombuffer(reply.slots, "<u8").reshape(-1, 2)
            self.lease.learn([self._read.keys[i] for i in batch], places)
            there, _, sent = self._known(hits)
            for tier in set(map(tier_of.__getitem__, there)):
                again += self.copy([i for i in there if tier_of[i] is tier], tier)
        stride, step = self._pieces.stride, wire.CHECKSUM_BYTES * len(self._pieces.spans)
        checksums = reply.checksums
        if head.body_bytes != len(sent) * stride or len(checksums) != len(sent) * step:
            raise StreamLost("a body of another size", answered=True)
        at = 0
        for first, last in _runs(sent, max(1, PIECE_BYTES // stride)):
            stream.receive_body(self._read.into[first * stride : (last + 1) * stride], self._ends_s)
            for i in range(first, last + 1):
                self._verify(i, checksums[at : at + step], tier_of[i])
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
