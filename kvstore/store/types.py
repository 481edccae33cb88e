"""What the store's calls return. Values only: no behaviour but the release of a pin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.block import Buffer, Match, Outcome, PutOutcome, SnapshotPlace, Tier, TierCost


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease over the READY prefix of the keys asked for.

    `blocks`: how many of the keys, from the first on, are pinned. `ttl_s`: seconds until it
    expires by itself. `match`: what the lookup found, over all keys asked for.
    """

    lease_id: int
    blocks: int
    ttl_s: float
    match: Match


@dataclass(frozen=True, slots=True)
class SharedArena:
    """The DRAM tier as another process maps it: `fd`, a memfd of slots, `arena_bytes` long, and
    behind them, from `generations_offset` on, one u64 per 4 KiB page: the generation of the slot
    that starts there."""

    fd: int
    arena_bytes: int
    generations_offset: int


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A device's pool of the HBM tier as another process opens it (`kvstore.tiers.hbm.opened`).
    `kind`: `cuda` or `simulated`. `device`: its index. `handle`: opaque."""

    kind: str
    device: int
    size_bytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class SharedHbm:
    """The HBM tier. `pools`: their pages are numbered through in this order. `generations`: names
    the memory with one u64 per page."""

    pools: tuple[SharedPool, ...]
    generations: bytes


@dataclass(slots=True)
class BlockFrames:
    """One block on its way out of the store.

    `sections`, `checksums`: per section asked for, in that order: read-only bytes (in the arena, or
    in a bounce buffer) and their xxh3-128 (16 bytes); empty unless `outcome` is HIT. `tier`: the
    fastest tier that held the block when it was read. The views are valid until `done`, which MUST
    be called once the bytes are used up, also for a MISS; a lease that expires meanwhile takes
    nothing away.
    """

    key: bytes
    outcome: Outcome
    tier: Tier = Tier.NONE
    sections: tuple[memoryview, ...] = ()
    checksums: tuple[bytes, ...] = ()
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def done(self) -> None:
        """Unpin the bytes; a second call does nothing. On the event loop's thread only."""
        release, self._release = self._release, None
        if release is not None:
            self.sections = ()
            release()


@dataclass(frozen=True, slots=True)
class Gathered:
    """Blocks on their way out of the arena, to be sent one behind the other.

    `outcomes`: per key, HIT or MISS. `section_bytes`: of every block, as far as asked for.
    `checksums`: of the hits' sections, packed. `body`: their bytes, in as few pieces as they lie
    in. `release` MUST be called when the bytes are used up; on the event loop's thread; a second
    call does nothing.
    """

    outcomes: list[Outcome]
    section_bytes: list[int]
    checksums: bytes
    body: list[memoryview]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Blocks on their way in whose sections lie one behind the other, block by block, in one
    buffer, as they come from a stream or a staging area.

    `section_bytes`: of every block. `checksums`: xxh3-128 (16 bytes) per section, packed; empty
    where the writer has none.
    """

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    payload: memoryview
    section_bytes: Sequence[int]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class ReservationGrant:
    """Room for blocks on their way in.

    `outcomes`: per block asked for; STORED means reserved for this caller, whose bytes are now
    awaited; anything else is final for that block. `reservation_id`: 0 where nothing was reserved.
    """

    reservation_id: int
    outcomes: tuple[PutOutcome, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class WindowHead:
    """What comes before the bytes of an object of the window pool. `name`: a snapshot's key, or a
    hand-over's request id. `place`: of a snapshot, None for a hand-over. `checksum`: xxh3-128 of
    the payload. `ttl_s`: the store's default without."""

    name: bytes | str
    place: SnapshotPlace | None
    payload_bytes: int
    checksum: bytes
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class WindowPut:
    """An object of the window pool on its way in. `payload`: of `head.payload_bytes`."""

    head: WindowHead
    payload: Buffer


@dataclass(slots=True)
class WindowFrame:
    """An object of the window pool on its way out. `payload`: its bytes in the pool, valid until
    `done`, which MUST be called. `checksum`: their xxh3-128."""

    payload: memoryview
    checksum: bytes
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def done(self) -> None:
        """Let the memory go; a second call does nothing. On the event loop's thread only."""
        release, self._release = self._release, None
        if release is not None:
            self.payload = memoryview(b"")
            release()


@dataclass(frozen=True, slots=True)
class WindowsStat:
    """The window pool now. `payload_bytes`: of its objects. `used_bytes`: what they really take,
    those on their way in and out included."""

    objects: int = 0
    payload_bytes: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStat:
    """One tier now.

    `objects`, `payload_bytes`: READY blocks and their section bytes. `used_bytes`: what they really
    take (arena pages; for SSD `st_blocks` of segments and index). `accepting`: False while errors
    or a full SSD's guaranteed lifetime keep new blocks out. `cost`: moving estimate of a read, as
    far as one was made. `live_bytes`: of `used_bytes`, what frames of blocks take; on SSD the rest
    is the index, and dead frames until their segments are needed. `policy`: name of the one that
    picks victims. `refuses_why`: for people; empty while it is accepting.
    """

    tier: Tier
    objects: int
    payload_bytes: int
    used_bytes: int
    budget_bytes: int
    accepting: bool
    cost: TierCost
    live_bytes: int = 0
    policy: str = ""
    refuses_why: str = ""


@dataclass(frozen=True, slots=True)
class Stat:
    """The store now.

    `lookup_blocks`: one per key looked up, by what was found; the keys are `hit_hbm`, `hit_dram`,
    `hit_ssd`, `pending` and `miss`, and they sum to all lookups. `puts`: per `PutOutcome` name,
    blocks. `counters`: everything else that only grows (see `kvstore.metrics`).
    `evicted_ssd_age_s_min`: age of the youngest block that left the SSD for room, None before the
    first. `notes`: for people, which devices hbm is on, or why there is none.
    """

    tiers: tuple[TierStat, ...]
    blocks: int
    namespaces: int
    leases: int
    reservations: int
    pinned_blocks: int
    dirty_blocks: int
    write_back_bytes: int
    lookup_blocks: dict[str, int]
    puts: dict[str, int]
    counters: dict[str, int]
    evicted_ssd_age_s_min: float | None
    windows: WindowsStat = WindowsStat()
    notes: tuple[str, ...] = ()

    @property
    def write_amplification(self) -> float | None:
        """Frame bytes that the SSD wrote, compaction included, per byte that it took in; None
        before the first. The index's pages are not counted."""
        taken = self.counters.get("write_back_bytes", 0)
        again = self.counters.get("compacted_bytes", 0)
        return (taken + again) / taken if taken else None


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of a listing. `payload_bytes`: its sections', or its whole frame where an index had
    to be rebuilt and no client has told the layout since. `depth`: blocks before it."""

    key: bytes
    namespace_id: bytes
    parent: bytes
    depth: int
    residency: Tier
    payload_bytes: int
    pins: int
    dirty: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything found. `frames`, `payload_bytes`: checked, per tier. `corrupt`: keys
    quarantined by this run. `unreadable`: frames that the disk refused to give; they stay."""

    frames: dict[Tier, int]
    payload_bytes: dict[Tier, int]
    corrupt: tuple[bytes, ...]
    unreadable: int

    @property
    def clean(self) -> bool:
        """Whether every frame could be read and was right."""
        return not self.corrupt and not self.unreadable
