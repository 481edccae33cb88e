"""Between the store's values and the protobuf messages that carry no block bytes.

Both sides use it: the daemon writes replies and reads requests, the client the other way round.
`kvstore.server.wire` has the messages with bytes.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.block import Match, Outcome, PutOutcome, SnapshotRef, Tier, TierCost
from kvstore.errors import InvalidRequest
from kvstore.namespace import DIGEST_BYTES
from kvstore.store.types import (
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    TierStat,
    VerifyReport,
    WindowHead,
    WindowsStat,
)
from kvstore.v1 import kvstore_pb2 as pb

SERVICE = "kvstore.v1.KVStore"

_OUTCOMES = tuple(Outcome(i) for i in range(len(Outcome)))
_PUT_OUTCOMES = tuple(PutOutcome(i) for i in range(len(PutOutcome)))
TIERS = tuple(map(Tier, range(256)))
"""By its number, which takes an enum ten times as long; residencies too."""
_HIT = bytes((Outcome.HIT.value,))
_T = TypeVar("_T")
_code = attrgetter("_value_")
"""`value` without the detour that makes it slow on an enum: this runs for thousands of keys."""


def method_path(name: str) -> str:
    """The path under which gRPC knows a method of the service."""
    return f"/{SERVICE}/{name}"


def parse(cls: Any, data: bytes) -> Any:
    """A message of class `cls`. Raises `InvalidRequest`."""
    try:
        return cls.FromString(data)
    except DecodeError as e:
        raise InvalidRequest(f"{len(data)} B that are no {cls.DESCRIPTOR.name}: {e}") from e


def check_digest(value: object, what: str) -> bytes:
    """`value`, if it is 32 bytes. Raises `InvalidRequest` naming `what` if not."""
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        got = f"{len(value)} B" if isinstance(value, bytes) else type(value).__name__
        raise InvalidRequest(f"{what} must be {DIGEST_BYTES} bytes, not {got}")
    return value


def check_digests(values: Sequence[bytes], what: str) -> None:
    """Raises `InvalidRequest` naming `what` and the place of one that is not 32 bytes."""
    # Sets of what occurs: thousands of keys are checked without a loop in Python.
    if set(map(type, values)) | {bytes} == {bytes} and set(map(len, values)) <= {DIGEST_BYTES}:
        return
    for i, value in enumerate(values):
        check_digest(value, f"{what} {i}")


def check_some(values: Sequence[object], what: str) -> None:
    """Raises `InvalidRequest` where a call names nothing to work on."""
    if not values:
        raise InvalidRequest(f"no {what}: a prompt shorter than one block has none")


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Keys one behind the other. The caller has checked their lengths (`check_digests`)."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """The inverse of `pack_keys`. Raises `InvalidRequest` for a length that 32 does not divide."""
    if len(packed) % DIGEST_BYTES:
        raise InvalidRequest(
            f"{len(packed)} B of packed keys are no whole number of {DIGEST_BYTES}-byte keys"
        )
    if not packed:
        return []
    # One `bytes` per key, a quarter of the time that slicing takes.
    keys: list[bytes] = np.frombuffer(packed, f"V{DIGEST_BYTES}").tolist()
    return keys


def pack_put_outcomes(outcomes: Sequence[PutOutcome]) -> bytes:
    """One byte per block."""
    return bytes(map(_code, outcomes))


def unpack_put_outcomes(packed: bytes) -> list[PutOutcome]:
    """The inverse of `pack_put_outcomes`."""
    return [_PUT_OUTCOMES[b] for b in packed]


def _cost_to_pb(tier: Tier, cost: TierCost) -> Any:
    return pb.TierCost(
        tier=int(tier),
        latency_s=cost.latency_s,
        bytes_per_s=cost.bytes_per_s,
        measured=cost.measured,
    )


def _cost_from_pb(m: Any) -> TierCost:
    return TierCost(m.latency_s, m.bytes_per_s, m.measured)


def _pack_residency(residency: Sequence[Tier]) -> bytes:
    # thousands of blocks mostly lie on the same tiers
    if residency and residency.count(residency[0]) == len(residency):
        return bytes((residency[0],)) * len(residency)
    return bytes(residency)


def _spread(packed: bytes, values: Sequence[_T]) -> tuple[_T, ...]:
    """The value of every byte."""
    if packed and packed == packed[:1] * len(packed):
        return (values[packed[0]],) * len(packed)
    return tuple(map(values.__getitem__, packed))


_SNAPSHOT_FIELDS = ("key", "blocks", "tail_tokens", "payload_bytes")


def match_to_pb(match: Match) -> Any:
    """`MatchReply`."""
    return pb.MatchReply(
        hit_blocks=match.hit_blocks,
        outcomes=_HIT * match.hit_blocks + bytes(map(_code, match.outcomes[match.hit_blocks :])),
        residency=_pack_residency(match.residency),
        block_bytes=match.block_bytes,
        costs=[_cost_to_pb(tier, cost) for tier, cost in match.costs.items()],
        snapshots=[
            pb.SnapshotRef(**{name: getattr(ref, name) for name in _SNAPSHOT_FIELDS})
            for ref in match.snapshots
        ],
    )


def match_from_pb(m: Any) -> Match:
    """The inverse of `match_to_pb`."""
    return Match(
        hit_blocks=m.hit_blocks,
        outcomes=_spread(m.outcomes, _OUTCOMES),
        residency=_spread(m.residency, TIERS),
        block_bytes=m.block_bytes,
        costs={TIERS[c.tier]: _cost_from_pb(c) for c in m.costs},
        snapshots=tuple(
            [
                SnapshotRef(**{name: getattr(r, name) for name in _SNAPSHOT_FIELDS})
                for r in m.snapshots
            ]
        ),
    )


def lease_to_pb(grant: LeaseGrant) -> Any:
    """`AcquireReply`."""
    return pb.AcquireReply(
        lease_id=grant.lease_id,
        blocks=grant.blocks,
        ttl_s=grant.ttl_s,
        match=match_to_pb(grant.match),
    )


def lease_from_pb(m: Any) -> LeaseGrant:
    """The inverse of `lease_to_pb`."""
    return LeaseGrant(m.lease_id, m.blocks, m.ttl_s, match_from_pb(m.match))


def reservation_to_pb(grant: ReservationGrant) -> Any:
    """`ReserveReply`."""
    return pb.ReserveReply(
        reservation_id=grant.reservation_id,
        outcomes=pack_put_outcomes(grant.outcomes),
        ttl_s=grant.ttl_s,
    )


def reservation_from_pb(m: Any) -> ReservationGrant:
    """The inverse of `reservation_to_pb`."""
    return ReservationGrant(m.reservation_id, tuple(unpack_put_outcomes(m.outcomes)), m.ttl_s)


_STAT_NUMBERS = (
    "blocks",
    "namespaces",
    "leases",
    "reservations",
    "pinned_blocks",
    "dirty_blocks",
    "write_back_bytes",
)
_STAT_MAPS = ("lookup_blocks", "puts", "counters")
_WINDOWS_NUMBERS = ("objects", "payload_bytes", "used_bytes", "budget_bytes")
_TIER_FIELDS = (
    "objects",
    "payload_bytes",
    "used_bytes",
    "budget_bytes",
    "accepting",
    "live_bytes",
    "policy",
    "refuses_why",
)


def stat_to_pb(stat: Stat) -> Any:
    """`StatReply`."""
    tiers = [
        pb.TierStat(
            tier=int(t.tier),
            cost=_cost_to_pb(t.tier, t.cost),
            **{name: getattr(t, name) for name in _TIER_FIELDS},
        )
        for t in stat.tiers
    ]
    values = {name: getattr(stat, name) for name in (*_STAT_NUMBERS, *_STAT_MAPS)}
    windows = {name: getattr(stat.windows, name) for name in _WINDOWS_NUMBERS}
    return pb.StatReply(
        tiers=tiers,
        evicted_ssd_age_s_min=stat.evicted_ssd_age_s_min,
        windows=pb.WindowsStat(**windows),
        notes=stat.notes,
        **values,
    )


def stat_from_pb(m: Any) -> Stat:
    """The inverse of `stat_to_pb`."""
    tiers = tuple(
        TierStat(
            tier=Tier(t.tier),
            cost=_cost_from_pb(t.cost),
            **{name: getattr(t, name) for name in _TIER_FIELDS},
        )
        for t in m.tiers
    )
    values: dict[str, Any] = {name: getattr(m, name) for name in _STAT_NUMBERS}
    values |= {name: dict(getattr(m, name)) for name in _STAT_MAPS}
    age_s = m.evicted_ssd_age_s_min if m.HasField("evicted_ssd_age_s_min") else None
    windows = WindowsStat(**{name: getattr(m.windows, name) for name in _WINDOWS_NUMBERS})
    values["notes"] = tuple(m.notes)
    return Stat(tiers=tiers, evicted_ssd_age_s_min=age_s, windows=windows, **values)


_INFO_FIELDS = (
    "key",
    "namespace_id",
    "parent",
    "depth",
    "payload_bytes",
    "pins",
    "dirty",
    "age_s",
)


def named_to_pb(cls: Any, namespace_id: bytes, name: bytes | str) -> Any:
    """A message of class `cls` about an object of the window pool."""
    kind = {"request_id": name} if isinstance(name, str) else {"key": name}
    return cls(namespace_id=namespace_id, **kind)


def put_window_to_pb(namespace_id: bytes, head: WindowHead) -> Any:
    """`PutWindowRequest` without bytes."""
    request = named_to_pb(pb.PutWindowRequest, namespace_id, head.name)
    request.payload_bytes, request.checksum = head.payload_bytes, head.checksum
    if head.ttl_s is not None:
        request.ttl_s = head.ttl_s
    if head.place is not None:
        place = head.place
        request.place.SetInParent()
        request.place.parent, request.place.blocks = place.parent, place.blocks
        request.place.tail_tokens = place.tail_tokens
    return request


def info_to_pb(info: BlockInfo) -> Any:
    """`BlockInfo`."""
    values = {name: getattr(info, name) for name in _INFO_FIELDS}
    return pb.BlockInfo(residency=int(info.residency), **values)


def info_from_pb(m: Any) -> BlockInfo:
    """The inverse of `info_to_pb`."""
    values = {name: getattr(m, name) for name in _INFO_FIELDS}
    return BlockInfo(residency=Tier(m.residency), **values)


def report_to_pb(report: VerifyReport) -> Any:
    """`VerifyReport`."""
    tiers = [
        pb.VerifyReport.PerTier(
            tier=int(tier), frames=frames, payload_bytes=report.payload_bytes.get(tier, 0)
        )
        for tier, frames in report.frames.items()
    ]
    return pb.VerifyReport(
        tiers=tiers, corrupt=pack_keys(report.corrupt), unreadable=report.unreadable
    )


def report_from_pb(m: Any) -> VerifyReport:
    """The inverse of `report_to_pb`."""
    return VerifyReport(
        frames={Tier(t.tier): t.frames for t in m.tiers},
        payload_bytes={Tier(t.tier): t.payload_bytes for t in m.tiers},
        corrupt=tuple(unpack_keys(m.corrupt)),
        unreadable=m.unreadable,
    )
