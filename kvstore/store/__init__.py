"""The data path: the order of steps for every request, over index, leases, policy and tiers."""

from kvstore.store.engine import Engine
from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    TierStat,
    VerifyReport,
)

__all__ = [
    "BlockFrames",
    "BlockInfo",
    "Engine",
    "LeaseGrant",
    "ReservationGrant",
    "Stat",
    "TierStat",
    "VerifyReport",
]
