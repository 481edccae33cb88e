"""The data path: the order of steps for every request, over index, leases, policy and tiers.

The engine is loaded when first used: a client of a daemon needs the values alone.
"""

from typing import TYPE_CHECKING

from kvstore.store.types import (
    BlockFrames,
    BlockInfo,
    LeaseGrant,
    ReservationGrant,
    Stat,
    TierStat,
    VerifyReport,
)

if TYPE_CHECKING:
    from kvstore.store.engine import Engine

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


def __getattr__(name: str) -> object:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.store.engine import Engine

    return Engine
