"""One request after another over one model and one source of blocks."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Client, Namespace
from model_adapter.cache import SequenceCache
from model_adapter.errors import InputError
from model_adapter.generate import greedy
from model_adapter.model import Counters, Model
from model_adapter.replay import Mode
from model_adapter.run import CHUNK_TOKENS_DEFAULT
from model_adapter.session.report import PrefixOutcome, RequestReport
from model_adapter.session.source import BlockSource, Found, Loaded, Stored, TokenIds
from model_adapter.session.store_blocks import StoreBlocks

OnToken = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids`: the generated ones, the stop token included where it came."""

    token_ids: list[int]
    report: RequestReport


@dataclass(slots=True)
class _Prefix:
    """What a request starts from: a cache with `loaded.blocks` blocks in it, or an empty one."""

    cache: SequenceCache
    outcome: PrefixOutcome
    loaded: Loaded = field(default_factory=Loaded)
    error: str | None = None


class CachedSession:
    """Generates greedily, taking from `source` what it holds and leaving there what is new.

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

    def generate(
        self,
        prompt_ids: Collection[int] | npt.NDArray[np.integer],
        max_tokens: int,
        stop_ids: Collection[int] = (),
        on_token: OnToken | None = None,
    ) -> Generation:
        """Answer one prompt with at most `max_tokens` tokens, or up to one of `stop_ids`.

        Raises `InputError` for an empty prompt, for `max_tokens` below one, and where prompt and
        answer together pass the model's positions.
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
        return _Request(self, ids).run(max_tokens, stop_ids, on_token)


class _Request:
    def __init__(self, session: CachedSession, ids: TokenIds) -> None:
        self.session = session
        self.model = session.model
        self.source = session.source
        self.ids = ids
        self.start = time.perf_counter()
        self.stored = Stored()
        self.stored_upto = 0
        self.store_s = 0.0

    def run(
        self, max_tokens: int, stop_ids: Collection[int], on_token: OnToken | None
    ) -> Generation:
        counters = self.model.counters
        counters.reset()
        prefix = self._take_prefix()
        fetch_s = time.perf_counter() - self.start
        self.stored_upto = prefix.loaded.blocks
        # a store that failed once would cost its deadline again at every further call
        self.stored = Stored(error=prefix.error)
        logits = self._prefill(prefix)
        computed = counters.snapshot()
        tokens: list[int] = []
        ttft_s = 0.0
        for token in greedy(self.model, prefix.cache, logits, max_tokens, stop_ids):
            if not tokens:
                ttft_s = time.perf_counter() - self.start - self.store_s
            tokens.append(token)
            if on_token:
                on_token(token)
        self._store_new(prefix.cache, tokens)
        return Generation(tokens, self._report(prefix, computed, len(tokens), fetch_s, ttft_s))

    def _take_prefix(self) -> _Prefix:
        cache = self.model.new_cache()
        if self.source is None:
            return _Prefix(cache, PrefixOutcome.NO_STORE)
        found = self.source.find(self.ids)
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
            return self.model.resume(cache, self.ids, hit, mode, chunk, on_chunk=self._store_new)
        return self.model.prefill(cache, self.ids, mode, chunk, on_chunk=self._store_new)

    @property
    def _block_tokens(self) -> int:
        assert self.source is not None
        return self.source.layout.block_tokens

    def _store_new(self, cache: SequenceCache, generated: Sequence[int] = ()) -> None:
        """Offer the full blocks that were computed since the last time."""
        if self.source is None or self.stored.error or self.stored.refused:
            return
        full = cache.loaded_tokens // self._block_tokens
        if full <= self.stored_upto:
            return
        start = time.perf_counter()
        ids = np.concatenate([self.ids, np.asarray(generated, dtype=np.uint32)])
        self.stored += self.source.store(ids, self.stored_upto, cache)
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
