"""What the store says about itself: `stat` and `ls`."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from kvstore.block import PutOutcome, Tier, TierCost
from kvstore.errors import InvalidRequest
from kvstore.index import READY
from kvstore.store.core import Core
from kvstore.store.types import BlockInfo, Stat, TierStat, WindowsStat
from kvstore.tiers.base import LogTier, PoolTier
from kvstore.windows import WindowPool

_LOOKUPS = ("hit_hbm", "hit_dram", "hit_ssd", "pending", "miss")
_UNMEASURED = TierCost(0.0, float("inf"), measured=False)


def stat(core: Core, wall_s: float, notes: Sequence[str] = ()) -> Stat:
    """The store at `wall_s`. `notes`: what people should know of its tiers."""
    r, index, counts = core.residency, core.index, core.metrics.counts
    return Stat(
        tiers=tuple(_tiers(core, wall_s)),
        blocks=int((index.view("state") == READY).sum()),
        namespaces=len(core.namespaces),
        leases=len(core.leases),
        reservations=len(core.reservations.rights),
        pinned_blocks=int((index.view("pins") > 0).sum()),
        dirty_blocks=len(r.dirty) + len(r.stranded),
        write_back_bytes=r.dirty_bytes,
        lookup_blocks={name: counts[f"lookup_{name}_blocks"] for name in _LOOKUPS},
        puts={o.name.lower(): counts[f"put_{o.name.lower()}_blocks"] for o in PutOutcome},
        counters=dict(counts),
        evicted_ssd_age_s_min=core.lifetime.evicted_age_s_min,
        windows=_windows(core.windows),
        notes=tuple(notes),
    )


def _windows(pool: WindowPool) -> WindowsStat:
    arena = pool.arena
    return WindowsStat(len(pool), pool.payload_bytes, arena.used_bytes, arena.budget_bytes)


def _tiers(core: Core, wall_s: float) -> Iterator[TierStat]:
    r = core.residency
    if r.hbm is not None and core.hbm_lane is not None:
        why = "its device failed" if core.hbm_lane.degraded else ""
        yield _tier(core, Tier.HBM, r.hbm, len(r.hbm_policy), r.hbm.used_bytes, why)
    yield _tier(core, Tier.DRAM, r.dram, len(r.dram_policy), r.dram.used_bytes, "")
    if r.ssd is not None:
        why = _ssd_refuses_why(core, wall_s)
        yield _tier(core, Tier.SSD, r.ssd, len(r.ssd_policy), r.ssd.live_bytes, why)


def _ssd_refuses_why(core: Core, wall_s: float) -> str:
    if core.lane is None or core.lane.degraded:
        return "the disk failed, and is tried again after a while"
    # what a put found may be past: blocks left since, or grew old enough to go
    if core.residency.log_refuses and not core.lane.room_since() and not core.lifetime.old(wall_s):
        return "all is younger than ssd.lifetime_min_s"
    return ""


def _tier(
    core: Core, tier: Tier, place: PoolTier | LogTier, objects: int, live_bytes: int, why: str
) -> TierStat:
    payload = np.array([*core.namespaces.payload_bytes(), 0], np.int64)
    rows = core.index.rows_on(tier)
    numbers = core.index.view("namespace")[rows]
    own = payload[numbers]
    return TierStat(
        tier=tier,
        objects=objects,
        payload_bytes=int(np.where(own, own, core.index.view("stored_bytes")[rows]).sum()),
        used_bytes=place.used_bytes,
        budget_bytes=place.budget_bytes,
        accepting=not why,
        cost=core.costs.get(tier, _UNMEASURED),
        live_bytes=live_bytes,
        policy=core.config.eviction.policy_of(tier),
        refuses_why=why,
    )


def ls(
    core: Core, namespace_id: bytes | None, limit: int, after: bytes | None, wall_s: float
) -> list[BlockInfo]:
    """Up to `limit` READY blocks in a fixed order, the next ones behind `after`.

    Blocks that come or go between two calls may be listed or not. Raises `UnknownNamespace`, and
    `InvalidRequest` where `after` has left the store meanwhile.
    """
    index = core.index
    number = None if namespace_id is None else core.namespaces.number(namespace_id)
    start = 0
    if after is not None:
        row = index.find(after)
        if row is None:
            raise InvalidRequest(f"block {after.hex()} has left the store; list from the start")
        start = row + 1
    wanted = (
        row
        for row in range(start, index.rows_max)
        if index.state[row] == READY and number in (None, index.namespace[row])
    )
    most = min(limit, core.config.limits.ls_blocks_max)
    payload = core.namespaces.payload_bytes()
    return [_info(core, row, payload, wall_s) for row in islice(wanted, most)]


def _info(core: Core, row: int, payload: Sequence[int], wall_s: float) -> BlockInfo:
    index = core.index
    number = index.namespace[row]
    namespace_id = core.namespaces.ids[number]
    return BlockInfo(
        key=index.keys[row],
        namespace_id=namespace_id,
        parent=index.parent_key(row) or namespace_id,
        depth=index.depth[row],
        residency=Tier(index.tiers[row]),
        payload_bytes=payload[number] or index.stored_bytes[row],
        pins=index.pins[row],
        dirty=row in core.residency.dirty or row in core.residency.stranded,
        age_s=max(0.0, wall_s - index.created_wall_s[row]),
    )
