"""The store as a source of blocks. A store that is lost in the middle is a miss and a warning."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvstore import (
    BlockPut,
    Client,
    ImageSpan,
    Namespace,
    NamespaceHandle,
    Outcome,
    PutOutcome,
    Tier,
)
from kvstore.errors import InvalidRequest, KVStoreError
from model_adapter.cache import SequenceCache
from model_adapter.session.source import (
    Found,
    FoundSnapshot,
    Loaded,
    LoadedSnapshot,
    Stored,
    TokenIds,
)

logger = logging.getLogger(__name__)

BATCH_BYTES_MAX_DEFAULT = 8 << 20
_REFUSED = {PutOutcome.NO_SPACE, PutOutcome.PARENT_MISSING, PutOutcome.CORRUPT}


class StoreBlocks:
    """Blocks and snapshots of one namespace behind a `kvstore.connect` client (see `BlockSource`).

    `batch_bytes_max`: payload that is in memory besides the cache, in either direction. The
    namespace is opened at first use, and again after the store was lost.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        batch_bytes_max: int = BATCH_BYTES_MAX_DEFAULT,
    ) -> None:
        self.layout = namespace.layout
        self._client = client
        self._namespace = namespace
        self._handle: NamespaceHandle | None = None
        self._batch_blocks = max(1, batch_bytes_max // self.layout.block_bytes)

    def find(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Found:
        """Look the prompt's blocks up."""
        try:
            handle = self._open()
            keys = handle.block_keys(token_ids, images)
            if not keys:
                return Found()
            match = self._client.match(handle, keys)
            snapshot = None
            ref = handle.longest_snapshot(match, token_ids, images)
            if ref is not None:
                position = ref.blocks * self.layout.block_tokens + ref.tail_tokens
                snapshot = FoundSnapshot(ref.key, position, ref.blocks)
            return Found(keys, match.hit_blocks, snapshot)
        except KVStoreError as e:
            return Found(error=self._lost("looking up a prefix", e))

    def load(self, found: Found, blocks: int, cache: SequenceCache, first: int = 0) -> Loaded:
        """Lease the blocks and read them batch by batch, up to the first that is not there.

        `first`: of the blocks, those before it being in the cache already.
        """
        tiers: Counter[Tier] = Counter()
        loaded, error = 0, None
        keys = found.keys[first:blocks]
        try:
            with self._client.acquire(self._open(), keys) as lease:
                granted = keys[: lease.blocks]
                for at in range(0, len(granted), self._batch_blocks):
                    batch = granted[at : at + self._batch_blocks]
                    for data in self._client.read(lease, batch):
                        if data.outcome is not Outcome.HIT:
                            return self._loaded(loaded, tiers)
                        cache.load_block(first + loaded, self.layout.block_tokens, data.sections)
                        tiers[data.tier] += 1
                        loaded += 1
        except KVStoreError as e:
            error = self._lost("reading blocks", e)
        return self._loaded(loaded, tiers, error)

    def _loaded(self, blocks: int, tiers: Counter[Tier], error: str | None = None) -> Loaded:
        return Loaded(blocks, tiers, blocks * self.layout.block_bytes, error)

    def load_snapshot(self, snapshot: FoundSnapshot) -> LoadedSnapshot:
        """Read a snapshot; one that has gone is a miss."""
        try:
            return LoadedSnapshot(self._client.get_window(self._open(), snapshot.key))
        except KVStoreError as e:
            return LoadedSnapshot(error=self._lost("reading a window snapshot", e))

    def store_snapshot(
        self, token_ids: TokenIds, payload: bytearray, images: Sequence[ImageSpan] = ()
    ) -> Stored:
        """Put a snapshot. One that the store will never take, or has no room for, is refused."""
        try:
            outcome = self._client.put_snapshot(self._open(), token_ids, payload, images=images)
        except InvalidRequest as e:
            logger.warning("a window snapshot was refused: %s", e)
            return Stored(refused_snapshots=1)
        except KVStoreError as e:
            return Stored(error=self._lost("storing a window snapshot", e))
        return Stored(refused_snapshots=1) if outcome in _REFUSED else Stored(snapshots=1)

    def store(
        self,
        token_ids: TokenIds,
        first: int,
        cache: SequenceCache,
        images: Sequence[ImageSpan] = (),
    ) -> Stored:
        """Put the new full blocks in batches, up to the first that is refused."""
        total = Stored()
        step = self.layout.block_tokens
        full = cache.loaded_tokens // step
        if first >= full:
            return total
        try:
            handle = self._open()
            keys = [handle.id, *handle.block_keys(token_ids, images)]
            puts = (
                BlockPut(keys[i + 1], keys[i], cache.block_sections(i, step))
                for i in range(first, full)
            )
            while batch := list(islice(puts, self._batch_blocks)):
                total += self._count(self._client.put(handle, batch))
                if total.refused:
                    break
        except KVStoreError as e:
            total += Stored(error=self._lost("storing blocks", e))
        return total

    def _count(self, outcomes: Sequence[PutOutcome]) -> Stored:
        stored = outcomes.count(PutOutcome.STORED)
        refused = sum(outcome in _REFUSED for outcome in outcomes)
        present = len(outcomes) - stored - refused
        return Stored(stored, present, refused, stored * self.layout.block_bytes)

    def _open(self) -> NamespaceHandle:
        if self._handle is None:
            self._handle = self._client.open_namespace(self._namespace)
        return self._handle

    def _lost(self, doing: str, error: KVStoreError) -> str:
        self._handle = None
        message = f"{type(error).__name__} while {doing}: {error}"
        logger.warning("going on without the store: %s", message)
        return message
