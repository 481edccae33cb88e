"""The bridge between the model and the store: what a request takes from it and leaves in it.

A request goes: `find` how much of the prompt the source holds; decide how much of that is worth
taking; `load` it into the cache; go on at a window snapshot's exact position, or resume behind the
blocks (encoder bounded replay, ds41f §5), or prefill in full; `store` the new full blocks, and
snapshots of both ends of the answer. The source is the store (`StoreBlocks`) or anything with the
same calls. A store that fails at any of them costs the request its hit and nothing else.
"""

from model_adapter.session.identity import namespace_of, weight_revision
from model_adapter.session.report import PrefixOutcome, RequestReport, SnapshotOutcome
from model_adapter.session.request import Decode, Generation, Request, Stopped
from model_adapter.session.session import CachedSession, generate_with_store
from model_adapter.session.source import (
    BlockSource,
    Found,
    FoundSnapshot,
    Loaded,
    LoadedSnapshot,
    Stored,
)
from model_adapter.session.store_blocks import StoreBlocks

__all__ = [
    "BlockSource",
    "CachedSession",
    "Decode",
    "Found",
    "FoundSnapshot",
    "Generation",
    "Loaded",
    "LoadedSnapshot",
    "PrefixOutcome",
    "Request",
    "RequestReport",
    "SnapshotOutcome",
    "Stopped",
    "StoreBlocks",
    "Stored",
    "generate_with_store",
    "namespace_of",
    "weight_revision",
]
