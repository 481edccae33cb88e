"""The store's values survive the wire."""

import os
from dataclasses import replace

import pytest

from kvstore.block import (
    Match,
    Outcome,
    PutOutcome,
    SnapshotPlace,
    SnapshotRef,
    Tier,
    TierCost,
)
from kvstore.errors import InvalidRequest
from kvstore.server import messages
from kvstore.server.windows import window_head
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

BOTH = Tier.DRAM | Tier.SSD
MATCH = Match(
    hit_blocks=2,
    outcomes=(Outcome.HIT, Outcome.HIT, Outcome.PENDING, Outcome.MISS),
    residency=(BOTH, Tier.SSD, Tier.NONE, Tier.NONE),
    block_bytes=227_840,
    costs={Tier.DRAM: TierCost(1e-5, 5e9), Tier.SSD: TierCost(1e-4, float("inf"))},
    snapshots=(
        SnapshotRef(b"s" * 32, 2, 255, 1 << 33),
        SnapshotRef(b"t" * 32, 0, 0, 0),
    ),
)
STAT = Stat(
    tiers=(TierStat(Tier.SSD, 1, 2, 3, 4, False, TierCost(0.5, 6.0), 7, "lru", "because"),),
    blocks=7,
    namespaces=8,
    leases=9,
    reservations=10,
    pinned_blocks=11,
    dirty_blocks=12,
    write_back_bytes=1 << 40,
    lookup_blocks={"hit_dram": 13, "miss": 0},
    puts={"stored": 14},
    notes=("hbm: absent, there is none",),
    counters={"disk_errors": 15},
    windows=WindowsStat(16, 17, 18, 1 << 40),
    evicted_ssd_age_s_min=16.5,
)
INFO = BlockInfo(b"k" * 32, b"n" * 32, b"p" * 32, 3, BOTH, 160, 2, True, 4.5)
REPORT = VerifyReport({Tier.DRAM: 1, Tier.SSD: 2}, {Tier.DRAM: 3, Tier.SSD: 4}, (b"c" * 32,), 5)


@pytest.mark.parametrize(
    ("value", "to_pb", "from_pb"),
    [
        (MATCH, messages.match_to_pb, messages.match_from_pb),
        (LeaseGrant(1 << 60, 2, 3.5, MATCH), messages.lease_to_pb, messages.lease_from_pb),
        (
            ReservationGrant(7, (PutOutcome.STORED, PutOutcome.CORRUPT), 60.0),
            messages.reservation_to_pb,
            messages.reservation_from_pb,
        ),
        (STAT, messages.stat_to_pb, messages.stat_from_pb),
        (
            replace(STAT, evicted_ssd_age_s_min=None),
            messages.stat_to_pb,
            messages.stat_from_pb,
        ),
        (INFO, messages.info_to_pb, messages.info_from_pb),
        (REPORT, messages.report_to_pb, messages.report_from_pb),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_survive(value: object, to_pb: object, from_pb: object) -> None:
    sent = to_pb(value)
    assert from_pb(type(sent).FromString(sent.SerializeToString())) == value


@pytest.mark.parametrize(
    "head",
    [
        WindowHead(b"k" * 32, SnapshotPlace(b"p" * 32, 7, 3), 1 << 33, b"c" * 16, 2.5),
        WindowHead(b"k" * 32, SnapshotPlace(b"p" * 32, 0, 0), 0, b"c" * 16),
        WindowHead("réquest", None, 1, b"c" * 16),
    ],
)
def test_heads_of_windows_survive(head: WindowHead) -> None:
    sent = messages.put_window_to_pb(b"n" * 32, head)
    received = pb.PutWindowRequest.FromString(sent.SerializeToString())
    assert received.namespace_id == b"n" * 32
    assert window_head(received) == head


def test_keys_are_packed_one_behind_the_other() -> None:
    keys = [b"\0" * 32, *(os.urandom(32) for _ in range(9)), b"x\0" * 16]
    packed = messages.pack_keys(keys)
    assert packed == b"".join(keys)
    assert messages.unpack_keys(packed) == keys
    assert all(type(key) is bytes for key in messages.unpack_keys(packed))
    assert messages.unpack_keys(b"") == []


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([b"x" * 32, b"x" * 31], "key 1 must be 32 bytes, not 31 B"),
        ([b""], "key 0 must be 32 bytes, not 0 B"),
        ([b"x" * 32, "x" * 32], "key 1 must be 32 bytes, not str"),
        ([None], "key 0 must be 32 bytes, not NoneType"),
    ],
)
def test_wrong_keys_are_named(keys: list[bytes], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        messages.check_digests(keys, "key")


def test_a_wrong_length_of_packed_keys_is_named() -> None:
    with pytest.raises(InvalidRequest, match="33 B of packed keys are no whole number of 32-byte"):
        messages.unpack_keys(b"x" * 33)


def test_a_newer_daemons_tiers_are_kept() -> None:
    reply = pb.MatchReply(hit_blocks=1, outcomes=b"\1", residency=bytes([8 | 2]))
    match = messages.match_from_pb(reply)
    assert Tier.DRAM in match.residency[0]
