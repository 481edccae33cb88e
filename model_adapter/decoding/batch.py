"""Several sequences decoding together, each with the tokens and the cache that it has alone.

The rows of all sequences go through a pass together; every sequence attends to its own cache. At
most `FEW_ROWS_MAX` share a pass, within which no row's bits depend on the others (`few_rows`); a
larger batch takes several passes.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding.sampling import Sampler, SamplingParams, never_generated
from model_adapter.errors import InputError
from model_adapter.few_rows import FEW_ROWS_MAX
from model_adapter.forward_pass import Span
from model_adapter.hyper_connections import collapse
from model_adapter.model import Model

SEQUENCES_MAX_DEFAULT = 64


def decode_batch(
    model: Model, caches: Sequence[SequenceCache], token_ids: Sequence[int]
) -> torch.Tensor:
    """Run one token behind what each cache holds; logits float32 [B, vocab].

    Raises `InputError` for an empty batch, unequal numbers, a cache that comes twice, or a token
    that can't be right; nothing was computed then.
    """
    if not caches or len(caches) != len(token_ids):
        raise InputError(f"{len(caches)} caches and {len(token_ids)} tokens make no batch")
    if len({id(cache) for cache in caches}) < len(caches):
        raise InputError("a cache comes twice in a batch; its tokens follow each other")
    ids = np.concatenate(
        [model.checked_ids(c, [token]) for c, token in zip(caches, token_ids, strict=True)]
    )
    parts = [slice(at, at + FEW_ROWS_MAX) for at in range(0, len(caches), FEW_ROWS_MAX)]
    return torch.cat([_decode_few(model, caches[part], ids[part]) for part in parts])


@torch.inference_mode()
def _decode_few(
    model: Model, caches: Sequence[SequenceCache], ids: npt.NDArray[np.int32]
) -> torch.Tensor:
    with ExitStack() as changing:
        for row, cache in enumerate(caches):
            changing.enter_context(cache.changing())
            cache.append_tokens(ids[row : row + 1])
        work = model.forward_pass(
            [Span(c, c.length, c.length + 1, slice(i, i + 1)) for i, c in enumerate(caches)]
        )
        state = model.embed(ids)
        for block in model.blocks:
            state = block.forward(*state, work)
        for cache in caches:
            cache.length += 1
    model.counters.encoder_positions += len(caches)
    model.counters.decoder_positions += len(caches)
    return model.logits(collapse(*state))


@dataclass
class _Running:
    """`token`: the last one drawn, not in the cache yet. `logits`: where there is none."""

    cache: SequenceCache
    sampler: Sampler
    stop_ids: frozenset[int]
    logits: torch.Tensor
    drawn: int
    end: int
    token: int | None = None


class Batch:
    """Sequences that decode together; they join and leave between two steps."""

    def __init__(self, model: Model, sequences_max: int = SEQUENCES_MAX_DEFAULT) -> None:
        self._model = model
        self._max = sequences_max
        self._running: dict[int, _Running] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(
        self,
        cache: SequenceCache,
        logits: torch.Tensor,
        params: SamplingParams,
        stop_ids: Collection[int] = (),
        drawn: int = 0,
    ) -> int:
        """Let a prefilled sequence join; the arguments are those of `generate`. Returns its number
        in this batch.

        Raises `InputError` where the batch is full, where the cache is in it already, or where the
        tokens asked for pass the model's positions.
        """
        if len(self._running) >= self._max:
            raise InputError(f"the batch is full: {self._max} sequences")
        if any(r.cache is cache for r in self._running.values()):
            raise InputError("this cache is in the batch already")
        positions = cache.length + params.max_tokens - 1
        if positions > self._model.config.positions_max:
            raise InputError(
                f"{cache.length} tokens and {params.max_tokens} to generate pass the model's "
                f"{self._model.config.positions_max} positions"
            )
        sampler = Sampler(params, never_generated(self._model.config))
        number, self._next = self._next, self._next + 1
        self._running[number] = _Running(
            cache, sampler, frozenset(stop_ids), logits, drawn, drawn + params.max_tokens
        )
        return number

    def remove(self, number: int) -> None:
        """Let a sequence leave before its end; one that has finished is ignored."""
        self._running.pop(number, None)

    def step(self) -> list[tuple[int, int, bool]]:
        """(number, token, finished) of every sequence, one token each; those that finished leave.

        As with `generate`, the token just returned is not in its cache.
        """
        self._decode([r for r in self._running.values() if r.token is not None])
        out = []
        for number, running in list(self._running.items()):
            running.token = running.sampler.token(running.logits, running.drawn)
            running.drawn += 1
            finished = running.token in running.stop_ids or running.drawn == running.end
            out.append((number, running.token, finished))
            if finished:
                del self._running[number]
        return out

    def _decode(self, running: list[_Running]) -> None:
        if not running:
            return
        tokens = [r.token for r in running if r.token is not None]
        logits = decode_batch(self._model, [r.cache for r in running], tokens)
        for r, row in zip(running, logits, strict=True):
            r.logits = row
