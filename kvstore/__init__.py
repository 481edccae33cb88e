"""Tiered KV-cache storage for DeepSeek-V4.1-Flash.

What users need is here, loaded when first used: `connect` and what goes in and comes out. A
client loads neither the store nor gRPC before its URL asks for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore import errors
    from kvstore.block import (
        BlockData,
        BlockPut,
        Durability,
        HbmBlock,
        Match,
        Outcome,
        Outlook,
        PutOutcome,
        SnapshotRef,
        Tier,
        TierCost,
    )
    from kvstore.client import (
        AsyncClient,
        AsyncLease,
        Client,
        Lease,
        NamespaceHandle,
        connect,
        connect_async,
    )
    from kvstore.errors import KVStoreError
    from kvstore.namespace import DS41F_LAYOUT, Layout, Namespace, SectionSpec
    from kvstore.prefix_hash import ImageSpan, block_keys, snapshot_key

__all__ = [
    "DS41F_LAYOUT",
    "AsyncClient",
    "AsyncLease",
    "BlockData",
    "BlockPut",
    "Client",
    "Durability",
    "HbmBlock",
    "ImageSpan",
    "KVStoreError",
    "Layout",
    "Lease",
    "Match",
    "Namespace",
    "NamespaceHandle",
    "Outcome",
    "Outlook",
    "PutOutcome",
    "SectionSpec",
    "SnapshotRef",
    "Tier",
    "TierCost",
    "block_keys",
    "connect",
    "connect_async",
    "errors",
    "snapshot_key",
]

_HOMES = {
    "kvstore.block": (
        "BlockData",
        "BlockPut",
        "Durability",
        "HbmBlock",
        "Match",
        "Outcome",
        "Outlook",
        "PutOutcome",
        "SnapshotRef",
        "Tier",
        "TierCost",
    ),
    "kvstore.client": (
        "AsyncClient",
        "AsyncLease",
        "Client",
        "Lease",
        "NamespaceHandle",
        "connect",
        "connect_async",
    ),
    "kvstore.errors": ("KVStoreError",),
    "kvstore.namespace": ("DS41F_LAYOUT", "Layout", "Namespace", "SectionSpec"),
    "kvstore.prefix_hash": ("ImageSpan", "block_keys", "snapshot_key"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("kvstore.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
