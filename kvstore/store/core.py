"""The store's decisions: one state machine on one thread, without I/O.

Time comes as an argument; disk and checksums are jobs that the core hands out (`lane.next_job`,
`promotion.begin`, `reservations.start_copy`) and whose results come back as calls. Between two
calls every book is in order, and `check_integrity` says so. The driver is `kvstore.store.engine`;
a simulation is another one.

Concurrency: none; every call runs to its end on the core thread. Residency: see
`kvstore.migration.residency`. Durability: a block is durable when `lane.finish` has told so, which
is after the frame and its index entry are synced.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.block import Match, Outcome, Outlook, Tier, TierCost
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest, LeaseExpired, MessageTooLarge
from kvstore.index import GHOST, READY, BlockIndex, leading
from kvstore.lease import RightsTable
from kvstore.metrics import Metrics
from kvstore.migration.demotion import Demotion
from kvstore.migration.hbm_lane import HbmLane
from kvstore.migration.lifetime import Lifetime
from kvstore.migration.log_lane import LogLane
from kvstore.migration.promotion import Promotion
from kvstore.migration.residency import Residency
from kvstore.migration.slot_users import SlotUsers
from kvstore.namespace import Namespace
from kvstore.store.namespaces import Namespaces
from kvstore.store.reservations import Reservations
from kvstore.tiers.base import PAGE_BYTES, LogTier, PoolTier, SlotTier
from kvstore.tiers.hbm import HbmTier
from kvstore.windows import WindowArena, WindowPool

_RESIDENCIES = tuple(Tier(bits) for bits in range(8))
_HBM, _DRAM, _SSD = int(Tier.HBM), int(Tier.DRAM), int(Tier.SSD)
NOT_IN_DRAM = (1 << 64) - 1
"""Offset and generation of a block that has no slot."""


@dataclass(slots=True)
class Reading:
    """How far the blocks of a lease were read in its order: from `start` to `next`, and loaded up
    to `ahead`; positions in its rows."""

    start: int = 0
    next: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What a lease holds: rows of one namespace, pinned, and slots of DRAM and HBM whose bytes its
    client uses, by their pages."""

    number: int
    rows: list[int]
    pages: dict[int, None] = field(default_factory=dict)
    hbm_pages: dict[int, None] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup. `rows`: of the leading keys that are READY or RESERVED. `hits`: how many of them,
    from the first on, are READY. `tiers`: one byte of residency per row."""

    rows: list[int]
    hits: int
    ready: "np.ndarray[tuple[int], np.dtype[np.bool_]]"
    tiers: bytes


class Core:
    """See the module. `ssd` and `hbm` are None in a store without them. `now_s`: the monotonic
    clock, for the ages that policies go by. `first_id`: leases and reservations count up from it.
    `wall_offset_s`: wall time less the time that comes as an argument."""

    def __init__(
        self,
        config: StoreConfig,
        dram: SlotTier,
        ssd: LogTier | None,
        secret: bytes,
        metrics: Metrics,
        now_s: Callable[[], float],
        first_id: int = 1,
        wall_offset_s: float = 0.0,
        hbm: HbmTier | None = None,
    ) -> None:
        self.config, self.metrics = config, metrics
        self.index = BlockIndex()
        self.residency = Residency(self.index, dram, ssd, config.eviction, metrics, now_s, hbm)
        self.namespaces = Namespaces(
            config.limits.namespaces_max, _frame_bytes_max(config, dram, ssd), secret
        )
        self.lifetime = Lifetime(self.residency, config.ssd.lifetime_min_s if config.ssd else 0.0)
        self.demotion = Demotion(self.residency, self.lifetime)
        self.promotion = Promotion(self.residency, self.demotion)
        self.reservations = Reservations(
            config, self.namespaces, self.residency, self.demotion, first_id
        )
        self.leases: RightsTable[Held] = RightsTable(
            "lease",
            LeaseExpired,
            config.lease.leases_max,
            config.lease.lease_ttl_s_default,
            config.lease.lease_ttl_s_max,
            first_id,
        )
        self.lane: LogLane | None = None
        if ssd is not None and config.ssd is not None:
            self.lane = LogLane(
                self.residency,
                self.promotion,
                ssd,
                config.migration,
                config.ssd.segment_bytes,
                self.namespaces.ids,
                self.lifetime,
                wall_offset_s,
            )
        arena = WindowArena(config.windows_budget_bytes)
        self.windows = WindowPool(config.windows, arena, metrics)
        self.hbm_lane: HbmLane | None = None
        if hbm is not None:
            self.hbm_lane = HbmLane(
                self.residency, self.promotion, config.hbm, config.migration, self.namespaces.ids
            )
            self.promotion.nominate = self.hbm_lane.nominate
        self.costs: dict[Tier, TierCost] = {}
        self.held_bytes = self.held_hbm_bytes = 0
        self.held_bytes_max = int(dram.budget_bytes * config.dram.held_fraction_max)
        self.held_hbm_bytes_max = (
            int(hbm.budget_bytes * config.hbm.held_fraction_max) if hbm is not None else 0
        )

    def open_namespace(self, namespace: Namespace) -> bytes:
        """The id; a new descriptor becomes durable with the log's next job."""
        namespace_id, new = self.namespaces.open(namespace)
        if new and self.lane is not None:
            self.lane.add_namespace(namespace_id, namespace.canonical_json())
        return namespace_id

    # lookups

    def match(self, namespace_id: bytes, keys: Sequence[bytes]) -> Match:
        """How much of a chain is here. Counts the lookup; moves and pins nothing."""
        found = self._find(self.namespaces.number(namespace_id), keys)
        self._count(found, len(keys))
        return self._answer(namespace_id, found, len(keys))

    def peek(self, namespace_id: bytes, keys: Sequence[bytes]) -> Match:
        """`match` that counts nothing, for those who look again and again."""
        found = self._find(self.namespaces.number(namespace_id), keys)
        return self._answer(namespace_id, found, len(keys))

    def _find(self, number: int, keys: Sequence[bytes]) -> Found:
        if len(keys) > self.config.limits.keys_per_call_max:
            raise MessageTooLarge(
                f"{len(keys)} keys in one call pass limits.keys_per_call_max "
                f"({self.config.limits.keys_per_call_max}); ask in parts"
            )
        index = self.index
        rows = index.find_prefix(keys)
        if not len(rows):
            return Found([], 0, np.zeros(0, np.bool_), b"")
        state = index.view("state")[rows]
        n = leading((state != GHOST) & (index.view("namespace")[rows] == number))
        rows, ready = rows[:n], state[:n] == READY
        return Found(rows.tolist(), leading(ready), ready, index.view("tiers")[rows].tobytes())

    def _answer(self, namespace_id: bytes, found: Found, asked: int) -> Match:
        n = len(found.rows)
        if found.hits == n:
            outcomes = (Outcome.HIT,) * n
        else:
            outcomes = tuple([Outcome.HIT if r else Outcome.PENDING for r in found.ready.tolist()])
        residency = tuple(map(_RESIDENCIES.__getitem__, found.tiers))
        if n < asked:
            outcomes, residency = (*outcomes, Outcome.MISS), (*residency, Tier.NONE)
        layout = self.namespaces.layout(self.namespaces.number(namespace_id))
        return Match(found.hits, outcomes, residency, layout.block_bytes, dict(self.costs))

    def _count(self, found: Found, asked: int) -> None:
        tiers = np.frombuffer(found.tiers, np.uint8, found.hits)
        in_hbm = int(np.count_nonzero(tiers & _HBM))
        in_either = int(np.count_nonzero(tiers & (_HBM | _DRAM)))
        for name, blocks in (
            ("hit_hbm", in_hbm),
            ("hit_dram", in_either - in_hbm),
            ("hit_ssd", found.hits - in_either),
            ("pending", len(found.rows) - found.hits),
            ("miss", asked - len(found.rows)),
        ):
            self.metrics.add(f"lookup_{name}_blocks", blocks)

    # leases

    def acquire(
        self, namespace_id: bytes, keys: Sequence[bytes], now_s: float, ttl_s: float | None
    ) -> tuple[int, float, Match]:
        """Pin the READY prefix: lease id, lifetime, and what the lookup found. Counts no lookup: a
        hit that is looked up and then acquired is one hit."""
        number = self.namespaces.number(namespace_id)
        found = self._find(number, keys)
        rows = found.rows[: found.hits]
        right, ttl_s = self.leases.grant(Held(number, rows), now_s, ttl_s)
        self.residency.pin(rows)
        self.residency.asked(rows)
        if self.hbm_lane is not None:
            self.hbm_lane.nominate(rows)
        self.metrics.add("leases_granted")
        return right.id, ttl_s, self._answer(namespace_id, found, len(keys))

    def release(self, lease_id: int) -> None:
        """Unpin; nothing where the lease is over already."""
        right = self.leases.end(lease_id)
        if right is not None:
            self._let_go(right.held)

    def answered(
        self, namespace_id: bytes, keys: Sequence[bytes], lasting: int | None, outlook: Outlook
    ) -> None:
        """See `Engine.answered`."""
        found = self._find(self.namespaces.number(namespace_id), keys)
        rows = found.rows[: found.hits]
        lasting = len(rows) if lasting is None else min(lasting, len(rows))
        self.residency.policies.answered(rows, lasting, outlook)
        self.metrics.add("answers_told")

    def _let_go(self, held: Held) -> None:
        self.residency.unpin(held.rows)
        frame_bytes = self.namespaces.frame_bytes(held.number)
        self.held_bytes -= len(held.pages) * frame_bytes
        self.residency.end_use_all(list(held.pages))
        self.held_hbm_bytes -= len(held.hbm_pages) * frame_bytes
        self.residency.hbm_users.end_use_all(list(held.hbm_pages))

    def locate(
        self, lease_id: int, keys: Sequence[bytes] | None, now_s: float
    ) -> npt.NDArray[np.uint64]:
        """See `Engine.locate`."""
        held = self.leases.get(lease_id, now_s).held
        places, pages = self._places(held, keys, _DRAM)
        if pages:
            room = self.held_bytes_max - self.held_bytes
            self.held_bytes += self._hold(held, held.pages, pages, self.residency.dram_users, room)
            self.metrics.add("located_blocks", len(pages))
        return places

    def locate_hbm(
        self, lease_id: int, keys: Sequence[bytes] | None, now_s: float
    ) -> npt.NDArray[np.uint64]:
        """See `Engine.locate_hbm`."""
        held, r = self.leases.get(lease_id, now_s).held, self.residency
        places, pages = self._places(held, keys, _HBM)
        if pages:
            room = self.held_hbm_bytes_max - self.held_hbm_bytes
            self.held_hbm_bytes += self._hold(held, held.hbm_pages, pages, r.hbm_users, room)
            self.metrics.add("located_hbm_blocks", len(pages))
        return places

    def _places(
        self, held: Held, keys: Sequence[bytes] | None, tier: int
    ) -> tuple[npt.NDArray[np.uint64], list[int]]:
        """Offset and generation per key, and the pages of those that the tier holds."""
        index, r = self.index, self.residency
        if keys is None:
            rows = np.array(held.rows, np.int64)
        else:
            found = [self.ready_row(held.number, key) for key in keys]
            rows = np.array([-1 if row is None else row for row in found], np.int64)
        places = np.empty((len(rows), 2), np.uint64)
        there = (rows >= 0).nonzero()[0]
        there = there[index.view("tiers")[rows[there]] & tier != 0] if len(there) else there
        if len(there) < len(rows):
            places.fill(NOT_IN_DRAM)
        if not len(there):
            return places, []
        pool: PoolTier | None = r.dram if tier == _DRAM else r.hbm
        assert pool is not None
        pages = index.view("slot" if tier == _DRAM else "hbm_slot")[rows[there]]
        places[there, 0] = pages.astype(np.uint64) * PAGE_BYTES
        places[there, 1] = pool.generations_of(pages)
        return places, pages.tolist()

    def _hold(
        self, held: Held, mine: dict[int, None], pages: list[int], users: SlotUsers, room: int
    ) -> int:
        """Keep slots until the lease ends, as far as there is room for that; the bytes held."""
        frame_bytes = self.namespaces.frame_bytes(held.number)
        # a block may have been named twice
        hold = [page for page in dict.fromkeys(pages) if page not in mine]
        del hold[max(0, room) // frame_bytes :]
        users.use_all(hold)
        mine.update(dict.fromkeys(hold))
        return len(hold) * frame_bytes

    def expire(self, now_s: float) -> None:
        """End every lease, reservation and window object that has lapsed."""
        for right in self.leases.expire(now_s):
            self.metrics.add("leases_expired")
            self._let_go(right.held)
        self.reservations.expire(now_s)
        self.windows.expire(now_s)

    def rows_to_read(
        self, lease_id: int, keys: Sequence[bytes], now_s: float
    ) -> tuple[int, list[int | None]]:
        """The lease's namespace, and per key the row of a READY block of it, or None."""
        number = self.leases.get(lease_id, now_s).held.number
        return number, [self.ready_row(number, key) for key in keys]

    def ready_row(self, number: int, key: bytes) -> int | None:
        """The row of a READY block of a namespace, or None."""
        index = self.index
        row = index.find(key)
        if row is None or index.state[row] != READY or index.namespace[row] != number:
            return None
        return row

    # eviction on request

    def evict(
        self, namespace_id: bytes | None, keys: Sequence[bytes] | None, tier: Tier | None
    ) -> int:
        """Blocks go, deepest first: from HBM or DRAM alone if `tier` says so, else from the store.
        What is pinned, in use, or still has a child stays. Returns how many went."""
        if tier not in (None, Tier.HBM, Tier.DRAM, Tier.SSD):
            raise InvalidRequest(f"tier must be HBM, DRAM or SSD, or none for all, not {tier!r}")
        r, gone = self.residency, 0
        for row in self._asked_for(namespace_id, keys):
            if tier is Tier.HBM:
                kept = self.index.tiers[row] & (_DRAM | _SSD)
                if kept and self.index.tiers[row] & _HBM and r.may_leave_hbm(row):
                    r.leave_hbm(row)
                    gone += 1
            elif tier is Tier.DRAM:
                kept = self.index.tiers[row] & _SSD or r.ssd is None
                if kept and self.index.tiers[row] & _DRAM and r.may_leave_dram(row):
                    r.demote(row)
                    gone += 1
            elif r.may_leave_store(row) and (tier is None or self.index.tiers[row] & tier):
                r.drop(row)
                gone += 1
        self.metrics.add("evicted_by_request_blocks", gone)
        return gone

    def _asked_for(self, namespace_id: bytes | None, keys: Sequence[bytes] | None) -> Iterable[int]:
        index = self.index
        number = None if namespace_id is None else self.namespaces.number(namespace_id)
        if keys is None:
            rows: Iterable[int] = index.rows_in_use().tolist()
        else:
            rows = {row for row in map(index.find, keys) if row is not None}
        chosen = [
            row
            for row in rows
            if index.state[row] == READY and number in (None, index.namespace[row])
        ]
        return sorted(chosen, key=index.depth.__getitem__, reverse=True)

    # the books

    def check_integrity(self, pinned_rows: Iterable[int] = ()) -> None:
        """Raise `AssertionError` saying what disagrees: index, tiers, leases, policies, queues.
        `pinned_rows`: pinned by calls under way, once per pin."""
        index = self.index
        index.check_integrity()
        self.leases.check_integrity()
        self.reservations.rights.check_integrity()
        self.promotion.check_integrity()
        self.windows.check_integrity()
        if self.hbm_lane is not None:
            self.hbm_lane.check_integrity()
        self.residency.check_integrity(
            [*self.reservations.slots(), *self.promotion.slots()],
            self.hbm_lane.slots() if self.hbm_lane else (),
        )
        reserved = np.flatnonzero(index.view("state") == 1).tolist()
        assert sorted(self.reservations.rows()) == reserved, "a RESERVED row has no reservation"
        pinned = np.bincount(
            [*pinned_rows, *(row for right in self.leases for row in right.held.rows)],
            minlength=index.rows_max,
        )
        pins = index.view("pins")[: index.rows_max]
        assert (pins >= pinned).all(), "a lease does not pin its blocks"
        held = sum(
            len(right.held.pages) * self.namespaces.frame_bytes(right.held.number)
            for right in self.leases
        )
        assert held == self.held_bytes, f"leases hold slots of {held} B, counted {self.held_bytes}"
        held = sum(
            len(right.held.hbm_pages) * self.namespaces.frame_bytes(right.held.number)
            for right in self.leases
        )
        assert held == self.held_hbm_bytes, f"leases hold {held} B of hbm, counted other"
        busy = any(lane is not None and lane.busy for lane in (self.lane, self.hbm_lane))
        if not len(self.promotion) and not busy:
            assert (pins == pinned).all(), "a block is pinned by nobody"
        if self.lane is None or not self.lane.busy:
            self._check_log()

    def _check_log(self) -> None:
        ssd, index = self.residency.ssd, self.index
        if ssd is None:
            return
        ssd.check_integrity()
        on_ssd = index.rows_on(_SSD)
        stored = index.view("stored_bytes")[on_ssd].astype(np.int64)
        live = int(stored.sum())
        assert ssd.live_bytes == live, f"{ssd.live_bytes} B live in the log, {live} B indexed"
        segments = index.view("segment")[on_ssd]
        for segment in np.unique(segments).tolist():
            held = int(stored[segments == segment].sum())
            assert ssd.live_in(segment) == held, f"segment {segment} holds other blocks"


def _frame_bytes_max(config: StoreConfig, dram: SlotTier, ssd: LogTier | None) -> int:
    """The largest frame that every tier has a place for."""
    if ssd is None or config.ssd is None:
        return dram.budget_bytes
    # one page of a segment is its header
    return min(dram.budget_bytes, config.ssd.segment_bytes - PAGE_BYTES)
