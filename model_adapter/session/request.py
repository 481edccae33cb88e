"""One request on its way: prefix, prefill, answer, and what it leaves at the source."""

import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore import ImageSpan
from model_adapter.cache import SequenceCache
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import SectionsLost
from model_adapter.forward_pass import Observer
from model_adapter.model import Counters, Model
from model_adapter.replay import Mode
from model_adapter.session.fetch_choice import FetchChoice
from model_adapter.session.prefix import Prefix, PrefixTaker
from model_adapter.session.report import PrefixOutcome, RequestReport
from model_adapter.session.source import BlockSource, Stored, TokenIds
from model_adapter.snapshot import Computed
from model_adapter.vision import PlacedImage, VisionEncoder

logger = logging.getLogger(__name__)

OnToken = Callable[[int], object]
Decode = Callable[
    [Model, SequenceCache, torch.Tensor, int, Collection[int]], Generator[int, None, None]
]
"""How the answer is chosen, from the prompt's last logits on; called as `greedy` is."""


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids`: the generated ones, the stop token included where it came; none where
    the request was stopped during its prefill."""

    token_ids: list[int]
    report: RequestReport


@dataclass(frozen=True, slots=True)
class Way:
    """How a session serves its requests; see `CachedSession`. `vision`: made where it is needed."""

    model: Model
    source: BlockSource | None
    mode: Mode
    chunk_tokens: int
    snapshots: bool
    vision: Callable[[], VisionEncoder]
    choice: FetchChoice = field(default_factory=FetchChoice)

    @property
    def computed(self) -> Computed:
        """What tells its states from those of another way to compute."""
        return Computed(self.model.weights.dtype, self.mode)


class Stopped(Exception):
    """Nobody wants the answer any more."""


class Request:
    """`ids`: the prompt. `spans`: of images whose pixels are not needed. `drafts`: to be kept up
    with the sequence and in its snapshots."""

    def __init__(
        self,
        way: Way,
        ids: TokenIds,
        images: Sequence[PlacedImage],
        spans: Sequence[ImageSpan],
        drafts: SequenceDrafts | None,
        stopped: Callable[[], bool] | None,
    ) -> None:
        self.way = way
        self.ids = ids
        self.cache: SequenceCache
        self.spans = [*spans, *(placed.span for placed in images)]
        self._images = images
        self._drafts = drafts
        self._observer: Observer | None = drafts.observer if drafts else None
        self._stopped = stopped or (lambda: False)
        self._start = time.perf_counter()
        self._prefix: Prefix
        self._computed = Counters()
        self._stored = Stored()
        self._stored_upto = 0
        self._snapshot_at = 0
        self._fetch_s = self._ttft_s = self._store_s = 0.0
        self._generated = 0

    def prefill(self) -> torch.Tensor:
        """Logits of the prompt's last position; its new full blocks are stored as chunks finish.

        Raises `Stopped`.
        """
        counters = self.way.model.counters
        counters.reset()
        self._adopt(self._take_prefix())
        self._fetch_s = time.perf_counter() - self._start
        try:
            return self._run_prompt()
        except SectionsLost as e:
            self._start_over(e)
            return self._run_prompt()
        finally:
            self._computed = counters.snapshot()
            self._learn()

    def _learn(self) -> None:
        """How long computing takes here, for the choice of later requests."""
        taken_s = time.perf_counter() - self._start
        waited_s = self._fetch_s + self._store_s + self.cache.waited_s
        self.way.choice.computed(self._computed.encoder_positions, taken_s - waited_s)

    def _start_over(self, lost: SectionsLost) -> None:
        """With what is still there after sections that were promised did not come. Nothing was
        stored yet: the decoder's rows behind the hit stand behind the last of the sections."""
        logger.warning("starting over: %s", lost)
        reading = self._prefix.loaded.reading
        error = reading.join().error if reading else None
        if error is None:
            self._adopt(self._take_prefix())
        else:
            cache = self.way.model.new_cache()
            self._adopt(Prefix(cache, PrefixOutcome.LOST, self._prefix.snapshot, error=error))
        self._fetch_s = time.perf_counter() - self._start

    def go_on(self, prefix: Prefix) -> None:
        """Take the place of `prefill` where another process did it: `prefix` has all of it."""
        self._adopt(prefix)
        self._fetch_s = time.perf_counter() - self._start

    def answer(
        self,
        logits: torch.Tensor,
        max_tokens: int,
        stop_ids: Collection[int],
        on_token: OnToken | None,
        decode: Decode,
    ) -> Generation:
        """Decode behind the prompt, and leave the state at both ends of the answer."""
        tokens: list[int] = []
        # closed before the cache is looked at: drafts that were not asked for have to leave it
        chosen = decode(self.way.model, self.cache, logits, max_tokens, stop_ids)
        with closing(chosen):
            for token in chosen:
                if not tokens:
                    self._ttft_s = time.perf_counter() - self._start - self._store_s
                tokens.append(token)
                if on_token:
                    on_token(token)
                if len(tokens) == 1:
                    # nothing has been decoded yet, and nobody waits for the first token any more
                    self.store_snapshot()
                if self._stopped():
                    break
        self._store_blocks(self.cache)
        self.store_snapshot()
        self._generated = len(tokens)
        return Generation(tokens, self.report())

    def store_snapshot(self) -> None:
        """Offer the state where the sequence stands now, unless it was offered already."""
        source, position = self.way.source, self.cache.length
        if source is None or not self.way.snapshots or position == self._snapshot_at:
            return
        if self._stored.error or self._stored.refused:
            return
        start = time.perf_counter()
        self._snapshot_at = position
        ids = self.cache.token_ids.astype(np.uint32)
        self._stored += source.store_snapshot(ids, self.snapshot(), self.spans)
        self._store_s += time.perf_counter() - start

    def snapshot(self) -> bytearray:
        """The state where the sequence stands now. The session has a source."""
        assert self.way.source is not None
        windows = self._drafts.windows.layers if self._drafts else ()
        step = self.way.source.layout.block_tokens
        return self.cache.to_snapshot(step, self.way.computed, windows)

    @property
    def stored(self) -> Stored:
        """What became of what was offered so far."""
        return self._stored

    def report(self) -> RequestReport:
        """The request in numbers, as far as it got."""
        prefix, stored = self._prefix, self._stored
        loaded = prefix.loaded
        reading = loaded.reading.join() if loaded.reading else None
        step = self.way.source.layout.block_tokens if self.way.source else 0
        return RequestReport(
            outcome=prefix.outcome,
            prompt_tokens=len(self.ids),
            generated_tokens=self._generated,
            hit_tokens=prefix.resumed or loaded.blocks * step,
            replayed_tokens=self._computed.replayed_positions,
            encoder_positions=self._computed.encoder_positions,
            decoder_positions=self._computed.decoder_positions,
            hit_blocks=loaded.tiers,
            fetched_bytes=loaded.payload_bytes,
            stored_blocks=stored.stored,
            present_blocks=stored.present,
            refused_blocks=stored.refused,
            stored_bytes=stored.payload_bytes,
            fetch_s=self._fetch_s,
            ttft_s=self._ttft_s,
            store_s=self._store_s,
            total_s=time.perf_counter() - self._start,
            store_error=stored.error,
            snapshot=prefix.snapshot,
            snapshot_bytes=prefix.snapshot_bytes,
            stored_snapshots=stored.snapshots,
            refused_snapshots=stored.refused_snapshots,
            read_ahead_s=reading.seconds if reading else 0.0,
            waited_s=self.cache.waited_s,
        )

    def _take_prefix(self) -> Prefix:
        way = self.way
        if way.source is None:
            return Prefix(way.model.new_cache(), PrefixOutcome.NO_STORE)
        snapshots = way.computed if way.snapshots else None
        return PrefixTaker(way.model, way.source, snapshots, way.choice).take(
            self.ids, self.spans, self._drafts
        )

    def _adopt(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self.cache = prefix.cache
        # what was there and not worth fetching need not be offered again
        self._stored_upto = max(prefix.loaded.blocks, prefix.known)
        # a store that failed once would cost its deadline again at every further call
        self._stored = Stored(error=prefix.error)

    def _run_prompt(self) -> torch.Tensor:
        model, prefix = self.way.model, self._prefix
        mode, chunk = self.way.mode, self.way.chunk_tokens
        if prefix.resumed or not prefix.loaded.blocks:
            rows = self._image_rows(prefix.resumed)
            ids = self.ids[prefix.resumed :]
            return model.prefill(self.cache, ids, mode, chunk, rows, self._on_chunk, self._observer)
        assert self.way.source is not None
        hit = prefix.loaded.blocks * self.way.source.layout.block_tokens
        rows = self._image_rows(hit - model.config.window)
        return model.resume(
            self.cache, self.ids, hit, mode, chunk, rows, self._on_chunk, self._observer
        )

    def _image_rows(self, start: int) -> torch.Tensor | None:
        """Embeddings of the image tokens from position `start` on; earlier images cost nothing."""
        if not self._images:
            return None
        rows = self.way.vision().rows(self._images, start, len(self.ids))
        return rows.rows if rows else None

    def _on_chunk(self, cache: SequenceCache) -> None:
        self._store_blocks(cache)
        if self._stopped():
            raise Stopped

    def _store_blocks(self, cache: SequenceCache) -> None:
        """Offer the full blocks that were computed since the last time."""
        source = self.way.source
        if source is None or self._stored.error or self._stored.refused:
            return
        full = cache.loaded_tokens // source.layout.block_tokens
        if full <= self._stored_upto:
            return
        start = time.perf_counter()
        ids = cache.token_ids.astype(np.uint32)
        self._stored += source.store(ids, self._stored_upto, cache, self.spans)
        self._stored_upto = full
        self._store_s += time.perf_counter() - start
