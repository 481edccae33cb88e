"""What a caller sees of blocks: residency, outcomes, and the bytes on their way in and out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.namespace import DIGEST_BYTES

REQUEST_ID_BYTES_MAX = 256
"""Of a hand-over's request id, in UTF-8."""
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class Tier(IntFlag):
    """Places that hold objects; a residency is a union of them."""

    NONE = 0
    HBM = 1
    DRAM = 2
    SSD = 4


class Outcome(Enum):
    """What a lookup or a read found."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Reserved by a writer that has not committed yet."""


class PutOutcome(Enum):
    """What became of one block of a put."""

    STORED = 0
    PRESENT = 1
    """Stored before: the first writer wins, these bytes were not looked at."""
    PENDING = 2
    """Another writer holds the reservation."""
    NO_SPACE = 3
    """Everything that could go is pinned, dirty or younger than its guaranteed lifetime."""
    PARENT_MISSING = 4
    """The parent is not in the store (any more), so the block would be unreachable."""
    CORRUPT = 5
    """The bytes did not match their checksum on arrival; they were dropped and counted."""


class Durability(Enum):
    """When a put returns."""

    ACCEPTED = 0
    """The bytes are checked and readable; write-back to SSD follows."""
    DURABLE = 1
    """The blocks survive kill -9 and power loss."""


class Outlook(IntEnum):
    """What a client knows, when an answer ends, about the next request for the same chain."""

    UNKNOWN = 0
    TOOL_CALL = 1
    """The answer asks for a tool: the next request comes as soon as the tool has run."""
    USER_TURN = 2
    """A person reads the answer first."""
    END_OF_SESSION = 3
    """There will be none."""


@dataclass(frozen=True, slots=True)
class BlockPut:
    """One block on its way in. `sections`: one buffer per section of the layout, in its order.

    `parent`: key of the block before it, or the namespace id for the first.
    `checksums`: xxh3-128 digests (16 bytes each) per section; computed by the client where absent.
    """

    key: bytes
    parent: bytes
    sections: Sequence[Buffer]
    checksums: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True)
class BlockData:
    """One block on its way out.

    `sections[i]` is the i-th section *asked for*, in the order asked; empty unless `outcome` is
    HIT. The views stay valid as long as this object is referenced. `tier`: the fastest tier that
    held the block when it was read.
    """

    key: bytes
    outcome: Outcome
    sections: tuple[memoryview, ...] = ()
    tier: Tier = Tier.NONE


@dataclass(frozen=True, slots=True)
class HbmBlock:
    """One block where it lies in a device's memory.

    `sections[i]`: the i-th section asked for, a `uint8` array that belongs to the store and is not
    to be written: of CuPy for `kind` "cuda", a view of host memory for "simulated". `device`: its
    index in the daemon.
    """

    key: bytes
    kind: str
    device: int
    sections: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TierCost:
    """Moving estimate of what reading from a tier costs: latency per request and bandwidth.
    `measured`: by reads that were made; else it is assumed."""

    latency_s: float
    bytes_per_s: float
    measured: bool = True


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where a window snapshot lies: `tail_tokens` (fewer than a block's) behind `blocks` full
    blocks, the last of which is `parent`: its key, or the namespace id where there is none."""

    parent: bytes
    blocks: int
    tail_tokens: int


def check_window_name(name: bytes | str) -> None:
    """Raise `InvalidRequest` for what is neither a snapshot's key nor a hand-over's request id."""
    if isinstance(name, bytes):
        if len(name) != DIGEST_BYTES:
            raise InvalidRequest(f"a snapshot's key has {DIGEST_BYTES} bytes, not {len(name)}")
        return
    try:
        size = len(name.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"a request id is Unicode text: {e}") from e
    if not 1 <= size <= REQUEST_ID_BYTES_MAX:
        raise InvalidRequest(
            f"a request id has 1 to {REQUEST_ID_BYTES_MAX} bytes of UTF-8, not {size}"
        )


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """What a lookup says of one window snapshot. Its position is `blocks · block_tokens +
    tail_tokens`; whose tokens those are only `key` tells."""

    key: bytes
    blocks: int
    tail_tokens: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """Answer to a lookup, one entry per key asked for.

    `hit_blocks`: length of the prefix in which every block is READY. `outcomes`, `residency`: per
    key, as far as the lookup went (it may stop at the first miss). `snapshots`: those whose full
    blocks are a prefix of the keys, READY or not, deepest first, at most `windows.candidates_max`;
    which of them lie on the prompt the caller can tell, who knows the tokens
    (`NamespaceHandle.longest_snapshot`).
    """

    hit_blocks: int
    outcomes: tuple[Outcome, ...]
    residency: tuple[Tier, ...]
    block_bytes: int
    costs: dict[Tier, TierCost] = field(default_factory=dict)
    snapshots: tuple[SnapshotRef, ...] = ()

    def fetch_costs_s(self) -> npt.NDArray[np.float64]:
        """Estimated seconds to fetch the first n blocks, for every n from 0 to `hit_blocks`: of
        each tier that is the fastest to hold some of them, its latency once and their bytes."""
        held = np.array(self.residency[: self.hit_blocks], np.uint8)
        seconds = np.zeros(self.hit_blocks + 1)
        # of a residency's bits the lowest is the fastest tier
        nearest = held & (~held + np.uint8(1))
        for tier, cost in self.costs.items():
            blocks = np.cumsum(nearest == tier)
            part = cost.latency_s + blocks * (self.block_bytes / cost.bytes_per_s)
            seconds[1:] += np.where(blocks > 0, part, 0.0)
        return seconds

    def fetch_cost_s(self, blocks: int | None = None) -> float:
        """Estimated seconds to fetch the first `blocks` blocks (all that hit by default)."""
        n = self.hit_blocks if blocks is None else min(blocks, self.hit_blocks)
        return float(self.fetch_costs_s()[n])


def fastest(residency: Tier) -> Tier:
    """The fastest tier of a residency, or NONE."""
    for tier in (Tier.HBM, Tier.DRAM, Tier.SSD):
        if tier in residency:
            return tier
    return Tier.NONE
