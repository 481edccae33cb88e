"""The text backbone of DS4.1F over packed caches: prefill, decode, and resuming from a hit.

Weights are views into the mapped checkpoint, or converted on first use within a budget
(`weights.Weights`). A sequence's state is its `SequenceCache` alone; the model keeps none, so one
model serves any number of sequences, one call at a time. `run` has the order of a prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.block import Block
from model_adapter.cache import SequenceCache
from model_adapter.checkpoint import Checkpoint
from model_adapter.checkpoint_check import check_checkpoint
from model_adapter.config import LayerSpec, ModelConfig, RopeSpec
from model_adapter.devices import CPU
from model_adapter.engram import Engram, EngramHasher
from model_adapter.errors import InputError
from model_adapter.few_rows import linear
from model_adapter.forward_pass import ForwardPass, Observer, Span
from model_adapter.norms import rms_norm
from model_adapter.replay import Mode, Plan, plan_continue, plan_resume
from model_adapter.rope import frequencies
from model_adapter.run import CHUNK_TOKENS_DEFAULT, OnChunk, RunOptions, State, run_plan
from model_adapter.token_map import load_token_map
from model_adapter.weights import WEIGHT_CACHE_BYTES_MAX_DEFAULT, Weights

TokenIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


@dataclass
class Counters:
    """Positions computed per half of the network since the last `reset`.

    `replayed_positions`: those of `encoder_positions` whose global rows were cached already.
    """

    encoder_positions: int = 0
    decoder_positions: int = 0
    replayed_positions: int = 0

    def reset(self) -> None:
        """Back to zero."""
        self.encoder_positions = self.decoder_positions = self.replayed_positions = 0

    def snapshot(self) -> "Counters":
        """A copy that counts no further."""
        return replace(self)


class Model:
    """A DS4.1F of any size, on the device of its weights."""

    def __init__(self, config: ModelConfig, weights: Weights, hasher: EngramHasher | None) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.device
        self.counters = Counters()
        self.blocks = [self._block(spec, hasher) for spec in config.layer_specs]
        self._plain = frequencies(RopeSpec(config.window_theta), config.rope_dim).to(self.device)
        self._compressed = frequencies(config.rope, config.rope_dim).to(self.device)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        dtype: torch.dtype = torch.float32,
        weight_cache_bytes_max: int = WEIGHT_CACHE_BYTES_MAX_DEFAULT,
        device: torch.device = CPU,
    ) -> "Model":
        """Map a checkpoint directory; nothing of the weights is read yet.

        `dtype`: float32 or bfloat16, what the layers multiply in. `device`: see `device_of`.
        Raises `ConfigError` or `CheckpointError` for whatever in it can't be used.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype {dtype} is not supported; use float32 or bfloat16")
        directory = Path(directory)
        config = ModelConfig.load(directory)
        checkpoint = Checkpoint(directory)
        check_checkpoint(checkpoint, config)
        hasher = None
        if config.engram is not None:
            merged = load_token_map(directory, config.vocab, config.engram.compressed_vocab)
            hasher = EngramHasher(config.engram, merged, config.image_token)
        return cls(config, Weights(checkpoint, dtype, weight_cache_bytes_max, device), hasher)

    def cache_sections(self) -> list[tuple[int, str, int, int]]:
        """(layer, role, ratio, row bytes) of every global cache, in a block's section order."""
        return [(s.layer, s.role, s.ratio, s.row_bytes) for s in self.config.global_caches]

    def new_cache(self) -> SequenceCache:
        """An empty sequence."""
        return SequenceCache(self.config, self.device)

    def usable_hit_tokens(self, hit_tokens: int) -> int:
        """The hit itself, or 0 where it is no longer than the window: its replay would be the whole
        prefix (ds41f §5)."""
        return hit_tokens if hit_tokens > self.config.window else 0

    def prefill(
        self,
        cache: SequenceCache,
        token_ids: TokenIds,
        mode: Mode = "bounded",
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
        image_embeddings: torch.Tensor | None = None,
        on_chunk: OnChunk | None = None,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """Run `token_ids` behind what the cache holds; logits of the last, float32 [vocab].

        `image_embeddings` [image tokens among token_ids, H] stand in for the embeddings of image
        tokens, in order. Raises `InputError` for ids that can't be right.
        """
        options = RunOptions(chunk_tokens, image_embeddings, on_chunk, observer)
        return self.logits(self._continue(cache, token_ids, mode, options)[-1:])[0]

    def prefill_all_logits(
        self,
        cache: SequenceCache,
        token_ids: TokenIds,
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
        image_embeddings: torch.Tensor | None = None,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """`prefill` in exact mode with the logits of every new position, float32 [T, vocab]."""
        options = RunOptions(chunk_tokens, image_embeddings, None, observer)
        return self.logits(self._continue(cache, token_ids, "exact", options))

    def decode(
        self, cache: SequenceCache, token_id: int, observer: Observer | None = None
    ) -> torch.Tensor:
        """Run one token behind what the cache holds; its logits, float32 [vocab]."""
        return self.prefill(cache, [token_id], "exact", observer=observer)

    def resume(
        self,
        cache: SequenceCache,
        token_ids: TokenIds,
        hit_tokens: int,
        mode: Mode = "bounded",
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
        image_embeddings: torch.Tensor | None = None,
        on_chunk: OnChunk | None = None,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """Run a prompt whose first `hit_tokens` positions' global rows were loaded into the cache.

        Encoder bounded replay (ds41f §5): [hit_tokens − W, hit_tokens) again, then the rest.
        `token_ids`: the whole prompt; `image_embeddings`: of its image tokens from hit_tokens − W
        on, the only ones that run. Logits of the last position, float32 [vocab]. Rows that were
        loaded are read, never written; loaded rows behind the hit are dropped.

        Raises `InputError` where the hit is no longer than the window, not a multiple of the
        compression ratios, longer than what was loaded, or leaves no token to compute.
        """
        options = RunOptions(chunk_tokens, image_embeddings, on_chunk, observer)
        ids = self._checked(token_ids, 0)
        plan = plan_resume(mode, hit_tokens, len(ids), self.config.window)
        self._check_images(ids[plan.start :], image_embeddings)
        if cache.length or hit_tokens % self.config.group_tokens:
            raise InputError(
                f"a hit of {hit_tokens} tokens can't be taken up by a cache of {cache.length} "
                f"tokens: it must be a multiple of {self.config.group_tokens}, the cache fresh"
            )
        if cache.loaded_tokens < hit_tokens:
            raise InputError(
                f"a hit of {hit_tokens} tokens, but only {cache.loaded_tokens} were loaded"
            )
        with cache.changing():
            cache.reserve(len(ids))
            cache.truncate_rows(hit_tokens)
            cache.append_tokens(ids)
            for window in cache.windows[: self.config.decoder_start]:
                window.restart(plan.start)
            for group in cache.open_groups.values():
                group.restart(hit_tokens)
            return self.logits(self._run(cache, plan, options)[-1:])[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Collapsed streams [T, H] to logits float32 [T, vocab]."""
        weight = self.weights.vector("norm.weight")
        normed = rms_norm(hidden, weight, self.config.norm_eps)
        return linear(normed.float(), self.weights.vector("head.weight"))

    def forward_pass(
        self, spans: Sequence[Span], observer: Observer | None = None, write_global: bool = True
    ) -> ForwardPass:
        """A pass over some spans, for running blocks one by one."""
        return ForwardPass(
            self.config, spans, self._plain, self._compressed, observer, write_global
        )

    def checked_ids(
        self,
        cache: SequenceCache,
        token_ids: TokenIds,
        image_embeddings: torch.Tensor | None = None,
    ) -> npt.NDArray[np.int32]:
        """`token_ids` as they may go in behind what the cache holds; else `InputError`."""
        ids = self._checked(token_ids, cache.length)
        self._check_images(ids, image_embeddings)
        if cache.loaded_tokens > cache.length:
            raise InputError(
                f"{cache.loaded_tokens} tokens were loaded into this cache; use resume"
            )
        return ids

    def embed(
        self, token_ids: npt.NDArray[np.integer], image_embeddings: torch.Tensor | None = None
    ) -> State:
        """Token ids [T] to the state before the first block; see `prefill` for images."""
        ids = torch.from_numpy(token_ids.astype(np.int64))
        x = self.weights.rows("embed", ids)
        if image_embeddings is not None:
            images = (ids == self.config.image_token).to(self.device)
            x[images] = image_embeddings.to(x)
        pre_mix = torch.zeros((len(ids), self.config.streams), device=self.device)
        pre_mix[:, 0].fill_(1.0)
        return x.unsqueeze(1).repeat(1, self.config.streams, 1), pre_mix

    def _block(self, spec: LayerSpec, hasher: EngramHasher | None) -> Block:
        engram = None
        if spec.has_engram and hasher is not None:
            engram = Engram(self.config, spec.index, hasher, self.weights)
        return Block(self.config, spec, self.weights, engram)

    def _continue(
        self, cache: SequenceCache, token_ids: TokenIds, mode: Mode, options: RunOptions
    ) -> torch.Tensor:
        """Collapsed streams [T', H] of the positions that went through the decoder."""
        ids = self.checked_ids(cache, token_ids, options.image_embeddings)
        plan = plan_continue(mode, cache.length, len(ids), self.config.window)
        with cache.changing():
            if len(ids) > 1:
                cache.reserve(plan.stop)
            cache.append_tokens(ids)
            return self._run(cache, plan, options)

    def _run(self, cache: SequenceCache, plan: Plan, options: RunOptions) -> torch.Tensor:
        hidden = run_plan(self, cache, plan, options)
        self.counters.encoder_positions += plan.stop - plan.start
        self.counters.decoder_positions += plan.stop - plan.decoder_from
        self.counters.replayed_positions += plan.replayed
        return hidden

    def _checked(self, token_ids: TokenIds, before: int) -> npt.NDArray[np.int32]:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or not len(ids):
            raise InputError(f"token ids must be a list of at least one, not shape {ids.shape}")
        if not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"token ids must be integers, not {ids.dtype}")
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            wrong = ids[(ids < 0) | (ids >= self.config.vocab)][0]
            raise InputError(f"token id {wrong} is outside the vocabulary of {self.config.vocab}")
        if before + len(ids) > self.config.positions_max:
            raise InputError(
                f"{before + len(ids)} tokens pass the model's {self.config.positions_max} positions"
            )
        return ids.astype(np.int32)

    def _check_images(self, ids: npt.NDArray[np.int32], embeddings: torch.Tensor | None) -> None:
        wanted = int((ids == self.config.image_token).sum())
        given = 0 if embeddings is None else len(embeddings)
        if wanted != given:
            raise InputError(
                f"{wanted} image tokens, but embeddings for {given}: pass one row per image token"
            )
