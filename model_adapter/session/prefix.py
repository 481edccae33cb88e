"""What a request starts from: taken from the source, or nothing.

The longest window snapshot on the prompt is resumed exactly; without one the blocks that hit are
taken up by a replay. Whatever is gone, damaged or does not fit falls back to the next best.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore import ImageSpan
from model_adapter.cache import SequenceCache
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import SnapshotError
from model_adapter.model import Model
from model_adapter.session.fetch_choice import FetchChoice
from model_adapter.session.report import PrefixOutcome, SnapshotOutcome
from model_adapter.session.source import BlockSource, Found, Loaded, TokenIds
from model_adapter.snapshot import Computed, Snapshot, read_snapshot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Prefix:
    """A cache with `loaded.blocks` blocks in it. `resumed`: it stands at that position, where the
    prompt goes on; 0 where the blocks, if any, have to be taken up by a replay. `known`: blocks
    that the source had when it was asked, where some of them were not worth taking."""

    cache: SequenceCache
    outcome: PrefixOutcome
    snapshot: SnapshotOutcome = SnapshotOutcome.OFF
    resumed: int = 0
    snapshot_bytes: int = 0
    loaded: Loaded = field(default_factory=Loaded)
    error: str | None = None
    known: int = 0


@dataclass(frozen=True, slots=True)
class PrefixTaker:
    """Takes what `source` has of one prompt after another.

    `snapshots`: None where it is to do without them, else how this model's states come to be.
    `choice`: how much of a hit to take.
    """

    model: Model
    source: BlockSource
    snapshots: Computed | None
    choice: FetchChoice

    def take(
        self, ids: TokenIds, images: Sequence[ImageSpan], drafts: SequenceDrafts | None
    ) -> Prefix:
        """The best start for a prompt; `drafts` are restored with a snapshot that has them."""
        found = self.source.find(ids, images)
        if found.error:
            return Prefix(self.model.new_cache(), PrefixOutcome.LOST, error=found.error)
        worth = self._worth(ids, found.blocks)
        chosen = self._chosen(ids, found, worth)
        snapshot, prefix = self._snapshot(found, chosen, len(ids))
        if prefix.error:
            return prefix
        if snapshot is not None:
            self._go_on(prefix, found, snapshot, ids, drafts)
        else:
            self._load(prefix, found, chosen, ids)
        if worth and not chosen and prefix.outcome is not PrefixOutcome.HIT:
            prefix.outcome = PrefixOutcome.DECLINED
        if chosen < worth and prefix.loaded.blocks >= chosen and not prefix.error:
            prefix.known = found.blocks
        return prefix

    def _chosen(self, ids: TokenIds, found: Found, worth: int) -> int:
        """How many of the blocks that may be taken give the first token soonest."""
        step, replay = self.source.layout.block_tokens, self.model.config.window
        chosen = self.choice.blocks(len(ids), worth, step, found.fetch_s, replay)
        return self._worth(ids, chosen)

    def _snapshot(self, found: Found, worth: int, tokens: int) -> tuple[Snapshot | None, Prefix]:
        """The snapshot to go on from, checked, and a prefix that says what became of it."""
        prefix = Prefix(self.model.new_cache(), PrefixOutcome.MISS)
        if self.snapshots is None:
            return None, prefix
        prefix.snapshot = SnapshotOutcome.MISS
        if found.snapshot is None:
            return None, prefix
        replay_from = worth * self.source.layout.block_tokens - self.model.config.window
        if found.snapshot.position < replay_from:
            prefix.snapshot = SnapshotOutcome.SHORTER
            return None, prefix
        at = found.snapshot
        if not self.choice.exact_pays(at.position, at.blocks, tokens, found.fetch_s):
            return None, prefix
        loaded = self.source.load_snapshot(found.snapshot)
        prefix.snapshot, prefix.error = SnapshotOutcome.GONE, loaded.error
        if loaded.error:
            prefix.outcome = PrefixOutcome.LOST
        if loaded.payload is None:
            return None, prefix
        try:
            snapshot = read_snapshot(
                *(loaded.payload, self.model.config, self.snapshots),
                *(found.snapshot.position, self.source.layout.block_tokens),
            )
        except SnapshotError as e:
            logger.warning("going on without a window snapshot: %s", e)
            prefix.snapshot = SnapshotOutcome.UNUSABLE
            return None, prefix
        prefix.snapshot_bytes = len(loaded.payload)
        return snapshot, prefix

    def _go_on(
        self,
        prefix: Prefix,
        found: Found,
        snapshot: Snapshot,
        ids: TokenIds,
        drafts: SequenceDrafts | None,
    ) -> None:
        """Load the snapshot's blocks and stand where it stood; a replay where they have gone."""
        if snapshot.blocks:
            self._load(prefix, found, snapshot.blocks, ids)
        if prefix.loaded.blocks < snapshot.blocks:
            prefix.snapshot = SnapshotOutcome.GONE
            return
        windows = drafts.windows.layers if drafts else ()
        prefix.cache.from_snapshot(snapshot, ids[: snapshot.position], windows)
        prefix.outcome, prefix.snapshot = PrefixOutcome.HIT, SnapshotOutcome.HIT
        prefix.resumed = snapshot.position

    def _load(self, prefix: Prefix, found: Found, blocks: int, ids: TokenIds) -> None:
        """Load blocks for a replay, or for a snapshot behind them."""
        if not blocks:
            if found.blocks:
                prefix.outcome = PrefixOutcome.TOO_SHORT
            return
        prefix.cache.reserve(len(ids))
        began = time.perf_counter()
        loaded = self.source.load(found, blocks, prefix.cache)
        if loaded.reading is None and loaded.blocks == blocks < len(found.fetch_s):
            seconds = time.perf_counter() - began
            self.choice.fetched(blocks, found.fetch_s[blocks], seconds)
        prefix.error = loaded.error
        if loaded.blocks == blocks or self._worth(ids, loaded.blocks):
            prefix.outcome, prefix.loaded = PrefixOutcome.HIT, loaded
            return
        prefix.outcome = PrefixOutcome.LOST if loaded.error else PrefixOutcome.MISS
        # a cache with blocks in it can only be resumed, and this one is too short for that
        prefix.cache = self.model.new_cache()

    def _worth(self, ids: TokenIds, blocks: int) -> int:
        """How many of `blocks` hit blocks to take up by a replay. The last token's logits have to
        be computed, so a hit on the whole prompt gives up its last block."""
        step = self.source.layout.block_tokens
        blocks = min(blocks, (len(ids) - 1) // step)
        return self.model.usable_hit_tokens(blocks * step) // step
