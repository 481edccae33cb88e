"""That a block exists: its name, its place in the chain, and which tiers hold it."""

from kvstore.index.table import (
    FREE,
    GHOST,
    NO_PARENT,
    READY,
    RESERVED,
    ROOT,
    BlockIndex,
    BulkRows,
    leading,
)

__all__ = [
    "FREE",
    "GHOST",
    "NO_PARENT",
    "READY",
    "RESERVED",
    "ROOT",
    "BlockIndex",
    "BulkRows",
    "leading",
]
