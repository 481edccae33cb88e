"""The run that the store's answers are held against: the same replay, the rows kept in the process.

`ProcessBlocks` takes the hit lengths of the run over the store and nothing else: its blocks and
snapshots are those that its own runs computed. So equal answers mean that what came out of the
store, after checksums, a socket, an SSD and a restart, is what went in.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import xxhash

from kvstore import ImageSpan, Layout, Outlook, block_keys
from model_adapter.cache import SequenceCache
from model_adapter.session import (
    BlockSource,
    Found,
    FoundSnapshot,
    Loaded,
    LoadedSnapshot,
    Stored,
)
from model_adapter.session.source import TokenIds

_CHAIN_START = bytes(32)


def block_digest(sections: Sequence[np.ndarray]) -> bytes:
    """A digest of a block's bytes."""
    h = xxhash.xxh3_128()
    for section in sections:
        h.update(np.ascontiguousarray(section))
    return h.digest()


class ProcessBlocks:
    """Blocks in a dict, first writer wins; hands out as many as `hit_blocks` says.

    Snapshots too; `resume_at`: the position of the one to hand out, 0 for none.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.hit_blocks = 0
        self.resume_at = 0
        self._blocks: dict[bytes, list[np.ndarray]] = {}
        self._snapshots: dict[bytes, bytes] = {}

    def find(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Found:
        """The prompt's keys, and as many hits as was set."""
        snapshot = None
        if self.resume_at:
            name = _name(token_ids[: self.resume_at])
            blocks = self.resume_at // self.layout.block_tokens
            snapshot = FoundSnapshot(name, self.resume_at, blocks)
        return Found(self._keys(token_ids, images), self.hit_blocks, snapshot)

    def load(self, found: Found, blocks: int, cache: SequenceCache) -> Loaded:
        """Copy blocks into `cache`. Raises `KeyError` where the store hit what was never computed
        here."""
        for i, key in enumerate(found.keys[:blocks]):
            cache.load_block(i, self.layout.block_tokens, self._blocks[key])
        return Loaded(blocks, Counter(), blocks * self.layout.block_bytes)

    def store(
        self,
        token_ids: TokenIds,
        first: int,
        cache: SequenceCache,
        images: Sequence[ImageSpan] = (),
    ) -> Stored:
        """Keep copies of the new full blocks."""
        step = self.layout.block_tokens
        full = cache.loaded_tokens // step
        stored = 0
        for i, key in list(enumerate(self._keys(token_ids, images)))[first:full]:
            if key not in self._blocks:
                self._blocks[key] = [s.copy() for s in cache.block_sections(i, step)]
                stored += 1
        return Stored(stored, full - first - stored, 0, stored * self.layout.block_bytes)

    def answered(
        self,
        token_ids: TokenIds,
        outlook: Outlook,
        lasting_tokens: int | None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Nothing leaves here."""

    def load_snapshot(self, snapshot: FoundSnapshot) -> LoadedSnapshot:
        """Raises `KeyError` where the store had what was never computed here."""
        return LoadedSnapshot(self._snapshots[snapshot.key])

    def store_snapshot(
        self, token_ids: TokenIds, payload: bytearray, images: Sequence[ImageSpan] = ()
    ) -> Stored:
        """Keep a copy."""
        self._snapshots[_name(token_ids)] = bytes(payload)
        return Stored(snapshots=1)

    def _keys(self, token_ids: TokenIds, images: Sequence[ImageSpan]) -> list[bytes]:
        return block_keys(_CHAIN_START, token_ids, self.layout.block_tokens, images)


def _name(token_ids: TokenIds) -> bytes:
    return xxhash.xxh3_128(np.ascontiguousarray(token_ids, np.uint32)).digest()


class WatchedBlocks:
    """Passes every call on and remembers a digest of each block and snapshot that the last request
    was given."""

    def __init__(self, source: BlockSource) -> None:
        self.layout = source.layout
        self.digests: list[bytes] = []
        self._source = source

    def find(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Found:
        """Forget the last request and pass on."""
        self.digests = []
        return self._source.find(token_ids, images)

    def load(self, found: Found, blocks: int, cache: SequenceCache) -> Loaded:
        """Pass on, then look at what lies in the cache."""
        loaded = self._source.load(found, blocks, cache)
        step = self.layout.block_tokens
        self.digests += [block_digest(cache.block_sections(i, step)) for i in range(loaded.blocks)]
        return loaded

    def store(
        self,
        token_ids: TokenIds,
        first: int,
        cache: SequenceCache,
        images: Sequence[ImageSpan] = (),
    ) -> Stored:
        """Pass on."""
        return self._source.store(token_ids, first, cache, images)

    def answered(
        self,
        token_ids: TokenIds,
        outlook: Outlook,
        lasting_tokens: int | None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Pass on."""
        self._source.answered(token_ids, outlook, lasting_tokens, images)

    def load_snapshot(self, snapshot: FoundSnapshot) -> LoadedSnapshot:
        """Pass on, then look at it."""
        loaded = self._source.load_snapshot(snapshot)
        if loaded.payload is not None:
            self.digests.append(xxhash.xxh3_128(loaded.payload).digest())
        return loaded

    def store_snapshot(
        self, token_ids: TokenIds, payload: bytearray, images: Sequence[ImageSpan] = ()
    ) -> Stored:
        """Pass on."""
        return self._source.store_snapshot(token_ids, payload, images)
