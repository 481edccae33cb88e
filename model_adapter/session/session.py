"""One request after another over one model and one source of blocks."""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Client, Namespace
from model_adapter.cache import SequenceCache
from model_adapter.errors import InputError
from model_adapter.forward_pass import Observer
from model_adapter.generate import greedy
from model_adapter.model import Counters, Model
from model_adapter.replay import Mode
from model_adapter.run import CHUNK_TOKENS_DEFAULT
from model_adapter.session.report import PrefixOutcome, RequestReport
from model_adapter.session.source import BlockSource, Found, Loaded, Stored, TokenIds
from model_adapter.session.store_blocks import StoreBlocks
from model_adapter.vision import ImagePatches, PlacedImage, VisionEncoder, locate_images

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


@dataclass(slots=True)
class _Prefix:
    """What a request starts from: a cache with `loaded.blocks` blocks in it, or an empty one."""

    cache: SequenceCache
    outcome: PrefixOutcome
    loaded: Loaded = field(default_factory=Loaded)
    error: str | None = None


class _Stopped(Exception):
    """Nobody wants the answer any more."""


class CachedSession:
    """Generates, taking from `source` what it holds and leaving there what is new.

    Every request has a cache of its own: what two requests share, they share through the source.
    `source`: none for a model without a store. `mode`: `bounded` or `exact` (ds41f §5).
    `chunk_tokens`: positions per prefill chunk; blocks are stored as chunks finish.

    A session serves one request at a time.
    """

    def __init__(
        self,
        model: Model,
        source: BlockSource | None = None,
        mode: Mode = "bounded",
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
    ) -> None:
        self.model = model
        self.source = source
        self.mode = mode
        self.chunk_tokens = chunk_tokens

    @cached_property
    def vision(self) -> VisionEncoder:
        """Made for the first image. Raises `ImageError` where the model has no vision part."""
        return VisionEncoder.of(self.model.config, self.model.weights)

    def generate(
        self,
        prompt_ids: Collection[int] | npt.NDArray[np.integer],
        max_tokens: int,
        stop_ids: Collection[int] = (),
        on_token: OnToken | None = None,
        *,
        images: Sequence[ImagePatches] = (),
        decode: Decode = greedy,
        observer: Observer | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Generation:
        """Answer one prompt with at most `max_tokens` tokens, or up to one of `stop_ids`.

        `images`: those whose spans are in the prompt, in order. `observer`: sees the prefill, as
        `decode` may want. `stopped`: asked after every prefill chunk and every token; the answer
        ends where it says yes.

        Raises `InputError` for an empty prompt, for `max_tokens` below one, and where prompt and
        answer together pass the model's positions; `ImageError` where the prompt's image tokens are
        not the spans of `images`.
        """
        ids = np.asarray(prompt_ids, dtype=np.uint32)
        if ids.size == 0 or max_tokens < 1:
            raise InputError(
                f"a prompt of {ids.size} tokens, max_tokens {max_tokens}: both must be at least 1"
            )
        positions = len(ids) + max_tokens - 1
        if positions > self.model.config.positions_max:
            raise InputError(
                f"a prompt of {len(ids)} tokens and {max_tokens} to generate pass the model's "
                f"{self.model.config.positions_max} positions"
            )
        request = _Request(self, ids, self._placed(ids, images), observer, stopped)
        return request.run(max_tokens, stop_ids, on_token, decode)

    def _placed(self, ids: TokenIds, images: Sequence[ImagePatches]) -> tuple[PlacedImage, ...]:
        """Where the images stand. An image token without its image would name blocks by nothing
        but its place."""
        if images:
            _ = self.vision
        image_token = self.model.config.image_token
        return (
            ()
            if image_token is None
            else locate_images(ids.astype(np.int64), images, image_token).images
        )


class _Request:
    def __init__(
        self,
        session: CachedSession,
        ids: TokenIds,
        images: tuple[PlacedImage, ...],
        observer: Observer | None,
        stopped: Callable[[], bool] | None,
    ) -> None:
        self.session = session
        self.model = session.model
        self.source = session.source
        self.ids = ids
        self.images = images
        self.spans = [placed.span for placed in images]
        self.observer = observer
        self.stopped = stopped or (lambda: False)
        self.start = time.perf_counter()
        self.stored = Stored()
        self.stored_upto = 0
        self.store_s = 0.0

    def run(
        self,
        max_tokens: int,
        stop_ids: Collection[int],
        on_token: OnToken | None,
        decode: Decode,
    ) -> Generation:
        counters = self.model.counters
        counters.reset()
        prefix = self._take_prefix()
        fetch_s = time.perf_counter() - self.start
        self.stored_upto = prefix.loaded.blocks
        # a store that failed once would cost its deadline again at every further call
        self.stored = Stored(error=prefix.error)
        tokens: list[int] = []
        ttft_s = 0.0
        try:
            logits = self._prefill(prefix)
        except _Stopped:
            return Generation([], self._report(prefix, counters.snapshot(), 0, fetch_s, ttft_s))
        computed = counters.snapshot()
        # closed before the cache is looked at: drafts that were not asked for have to leave it
        with closing(decode(self.model, prefix.cache, logits, max_tokens, stop_ids)) as chosen:
            for token in chosen:
                if not tokens:
                    ttft_s = time.perf_counter() - self.start - self.store_s
                tokens.append(token)
                if on_token:
                    on_token(token)
                if self.stopped():
                    break
        self._store_new(prefix.cache)
        return Generation(tokens, self._report(prefix, computed, len(tokens), fetch_s, ttft_s))

    def _take_prefix(self) -> _Prefix:
        cache = self.model.new_cache()
        if self.source is None:
            return _Prefix(cache, PrefixOutcome.NO_STORE)
        found = self.source.find(self.ids, self.spans)
        blocks = self._worth(found.blocks)
        if not blocks:
            return _Prefix(cache, self._without(found), error=found.error)
        loaded = self.source.load(found, blocks, cache)
        usable = self._worth(loaded.blocks)
        if usable:
            return _Prefix(cache, PrefixOutcome.HIT, loaded, loaded.error)
        outcome = PrefixOutcome.LOST if loaded.error else PrefixOutcome.MISS
        # a cache with blocks in it can only be resumed, and this one is too short for that
        return _Prefix(self.model.new_cache(), outcome, error=loaded.error)

    def _worth(self, blocks: int) -> int:
        """How many of `blocks` hit blocks to take. The last token's logits have to be computed, so
        a hit on the whole prompt gives up its last block."""
        assert self.source is not None
        step = self.source.layout.block_tokens
        blocks = min(blocks, (len(self.ids) - 1) // step)
        return self.model.usable_hit_tokens(blocks * step) // step

    def _without(self, found: Found) -> PrefixOutcome:
        if found.error:
            return PrefixOutcome.LOST
        return PrefixOutcome.TOO_SHORT if found.blocks else PrefixOutcome.MISS

    def _prefill(self, prefix: _Prefix) -> torch.Tensor:
        """Last-position logits; new full blocks are stored as chunks finish."""
        mode, chunk, cache = self.session.mode, self.session.chunk_tokens, prefix.cache
        if prefix.loaded.blocks:
            hit = prefix.loaded.blocks * self._block_tokens
            rows = self._image_rows(hit - self.model.config.window)
            return self.model.resume(
                cache, self.ids, hit, mode, chunk, rows, self._on_chunk, self.observer
            )
        rows = self._image_rows(0)
        return self.model.prefill(cache, self.ids, mode, chunk, rows, self._on_chunk, self.observer)

    def _image_rows(self, start: int) -> torch.Tensor | None:
        """Embeddings of the image tokens from position `start` on; earlier images cost nothing."""
        if not self.images:
            return None
        rows = self.session.vision.rows(self.images, start, len(self.ids))
        return rows.rows if rows else None

    def _on_chunk(self, cache: SequenceCache) -> None:
        self._store_new(cache)
        if self.stopped():
            raise _Stopped

    @property
    def _block_tokens(self) -> int:
        assert self.source is not None
        return self.source.layout.block_tokens

    def _store_new(self, cache: SequenceCache) -> None:
        """Offer the full blocks that were computed since the last time."""
        if self.source is None or self.stored.error or self.stored.refused:
            return
        full = cache.loaded_tokens // self._block_tokens
        if full <= self.stored_upto:
            return
        start = time.perf_counter()
        ids = cache.token_ids.astype(np.uint32)
        self.stored += self.source.store(ids, self.stored_upto, cache, self.spans)
        self.stored_upto = full
        self.store_s += time.perf_counter() - start

    def _report(
        self,
        prefix: _Prefix,
        computed: Counters,
        generated: int,
        fetch_s: float,
        ttft_s: float,
    ) -> RequestReport:
        loaded = prefix.loaded
        return RequestReport(
            outcome=prefix.outcome,
            prompt_tokens=len(self.ids),
            generated_tokens=generated,
            hit_tokens=loaded.blocks * self._block_tokens if loaded.blocks else 0,
            replayed_tokens=computed.replayed_positions,
            encoder_positions=computed.encoder_positions,
            decoder_positions=computed.decoder_positions,
            hit_blocks=loaded.tiers,
            fetched_bytes=loaded.payload_bytes,
            stored_blocks=self.stored.stored,
            present_blocks=self.stored.present,
            refused_blocks=self.stored.refused,
            stored_bytes=self.stored.payload_bytes,
            fetch_s=fetch_s,
            ttft_s=ttft_s,
            store_s=self.store_s,
            total_s=time.perf_counter() - self.start,
            store_error=self.stored.error,
        )


def generate_with_store(
    model: Model,
    client: Client,
    namespace: Namespace,
    prompt_ids: Collection[int] | npt.NDArray[np.integer],
    max_tokens: int,
    mode: Mode = "bounded",
    stop_ids: Collection[int] = (),
) -> Generation:
    """One request over the store at `client`; see `CachedSession.generate`."""
    session = CachedSession(model, StoreBlocks(client, namespace), mode)
    return session.generate(prompt_ids, max_tokens, stop_ids)
