"""The store as a source of blocks. A store that is lost in the middle is a miss and a warning."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvstore import (
    BlockPut,
    Client,
    ImageSpan,
    Lease,
    Namespace,
    NamespaceHandle,
    Outlook,
    PutOutcome,
    Tier,
)
from kvstore.errors import InvalidRequest, KVStoreError
from model_adapter.cache import SequenceCache
from model_adapter.session.leased_blocks import LeasedBlocks
from model_adapter.session.read_ahead import ReadAhead
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
READ_AHEAD_BYTES_MIN_DEFAULT = 4 << 20
READ_AHEAD_SSD_BYTES_MAX_DEFAULT = 256 << 20
_REFUSED = {PutOutcome.NO_SPACE, PutOutcome.PARENT_MISSING, PutOutcome.CORRUPT}


class StoreBlocks:
    """Blocks and snapshots of one namespace behind a `kvstore.connect` client (see `BlockSource`).

    `batch_bytes_max`: payload that is in memory besides the cache, in either direction.
    `read_ahead_bytes_min`: a hit of at least that many bytes is read section by section while the
    model computes; None reads none so. `read_ahead_ssd_bytes_max`: not where more than that is on
    SSD alone, which the store reads block by block: a DRAM tier that is too small to keep the
    blocks from their first section to their last would read them again and again. The namespace is
    opened at first use, and again after the store was lost.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        batch_bytes_max: int = BATCH_BYTES_MAX_DEFAULT,
        read_ahead_bytes_min: int | None = READ_AHEAD_BYTES_MIN_DEFAULT,
        read_ahead_ssd_bytes_max: int = READ_AHEAD_SSD_BYTES_MAX_DEFAULT,
    ) -> None:
        self.layout = namespace.layout
        self._client = client
        self._namespace = namespace
        self._handle: NamespaceHandle | None = None
        self._batch_bytes = batch_bytes_max
        self._ahead_bytes_min = read_ahead_bytes_min
        self._ahead_ssd_bytes_max = read_ahead_ssd_bytes_max
        self._last_reading: ReadAhead | None = None
        self._is_lost = False
        self._batch_blocks = max(1, batch_bytes_max // self.layout.block_bytes)

    def find(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Found:
        """Look the prompt's blocks up."""
        try:
            handle = self._open()
            keys = handle.block_keys(token_ids, images)
            match = self._client.match(handle, keys)
            if self._is_lost:
                logger.warning("the store answers again")
                self._is_lost = False
            snapshot = None
            ref = handle.longest_snapshot(match, token_ids, images)
            if ref is not None:
                position = ref.blocks * self.layout.block_tokens + ref.tail_tokens
                snapshot = FoundSnapshot(ref.key, position, ref.blocks)
            costs = match.fetch_costs_s().tolist()
            return Found(keys, match.hit_blocks, snapshot, fetch_s=costs)
        except KVStoreError as e:
            return Found(error=self._lost("looking up a prefix", e))

    def load(self, found: Found, blocks: int, cache: SequenceCache, first: int = 0) -> Loaded:
        """Lease the blocks and read them batch by batch, up to the first that is not there.

        `first`: of the blocks, those before it being in the cache already.
        """
        if first == 0 and self._ahead_pays(blocks):
            return self._load_ahead(found.keys[:blocks], cache)
        leased = self._leased(cache)
        try:
            leased.open()
            lease = self._client.acquire(self._open(), found.keys[first:blocks])
        except KVStoreError as e:
            return Loaded(error=self._lost("reading blocks", e))
        return self._load_leased(leased, lease, cache, first)

    def _leased(self, cache: SequenceCache) -> LeasedBlocks:
        return LeasedBlocks(self._client, self.layout.block_tokens, cache.device)

    def _load_leased(
        self, leased: LeasedBlocks, lease: Lease, cache: SequenceCache, first: int = 0
    ) -> Loaded:
        tiers: Counter[Tier] = Counter()
        loaded, error = 0, None
        try:
            with lease as held:
                for at in range(0, held.blocks, self._batch_blocks):
                    batch = held.keys[at : at + self._batch_blocks]
                    came = leased.load(held, batch, cache, first + loaded)
                    tiers.update(came)
                    loaded += len(came)
                    if len(came) < len(batch):
                        break
        except KVStoreError as e:
            error = self._lost("reading blocks", e)
        return self._loaded(loaded, tiers, error)

    def _loaded(
        self,
        blocks: int,
        tiers: Counter[Tier],
        error: str | None = None,
        reading: ReadAhead | None = None,
    ) -> Loaded:
        return Loaded(blocks, tiers, blocks * self.layout.block_bytes, error, reading)

    def _ahead_pays(self, blocks: int) -> bool:
        last, self._last_reading = self._last_reading, None
        if last is not None and not last.join().complete:
            return False
        size = blocks * self.layout.block_bytes
        return self._ahead_bytes_min is not None and size >= self._ahead_bytes_min

    def _load_ahead(self, keys: Sequence[bytes], cache: SequenceCache) -> Loaded:
        """Lease the blocks and promise them to the cache, unless there is nothing to wait for."""
        leased = self._leased(cache)
        try:
            leased.open()
            lease = self._client.acquire(self._open(), keys)
        except KVStoreError as e:
            return Loaded(error=self._lost("reading blocks", e))
        tiers = Counter(map(_fastest, lease.match.residency[: lease.blocks]))
        on_ssd = tiers[Tier.SSD] * self.layout.block_bytes
        if not lease.blocks or on_ssd > self._ahead_ssd_bytes_max or leased.all_in_hbm(lease):
            return self._load_leased(leased, lease, cache)
        promises = cache.promise_blocks(lease.blocks, self.layout.block_tokens)
        reading = ReadAhead(leased, lease, promises, self._batch_bytes)
        self._last_reading = reading
        return self._loaded(lease.blocks, tiers, None, reading)

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

    def answered(
        self,
        token_ids: TokenIds,
        outlook: Outlook,
        lasting_tokens: int | None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Tell the store which of the full blocks may be asked for again, and how soon."""
        try:
            handle = self._open()
            keys = handle.block_keys(token_ids, images)
            step = self.layout.block_tokens
            lasting = None if lasting_tokens is None else min(lasting_tokens // step, len(keys))
            if keys:
                self._client.answered(handle, keys, outlook, lasting)
        except KVStoreError as e:
            self._lost("telling how an answer ended", e)

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
        # one line for an outage, however many requests it lasts
        level = logging.DEBUG if self._is_lost else logging.WARNING
        self._is_lost = True
        logger.log(level, "going on without the store: %s", message)
        return message


def _fastest(residency: Tier) -> Tier:
    return next((tier for tier in (Tier.HBM, Tier.DRAM) if tier in residency), Tier.SSD)
