"""The order of a prefill: chunks through the encoder, then what the decoder has to see (ds41f §5).

The encoder runs chunk by chunk; behind it the decoder's Full layer projects its global rows for
every position (CED). In bounded mode the last W positions go through the decoder when all chunks
are through; in exact mode every chunk goes on at once. Chunks change nothing but the order of float
sums: a query sees the same window and the same entries wherever its chunk began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model_adapter.cache import SequenceCache
from model_adapter.errors import InputError
from model_adapter.forward_pass import ForwardPass, Observer, Span
from model_adapter.hyper_connections import collapse
from model_adapter.replay import Plan

if TYPE_CHECKING:
    from model_adapter.model import Model

CHUNK_TOKENS_DEFAULT = 1024

OnChunk = Callable[[SequenceCache], None]
"""Called when a chunk's global rows are written; `cache.length` is the end of the chunk."""
State = tuple[torch.Tensor, torch.Tensor]
"""Streams [T, n, H] and pre_mix float32 [T, n] between two blocks."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run; see `Model.prefill`. `image_embeddings` may cover positions before the plan's
    start, not beyond its end."""

    chunk_tokens: int
    image_embeddings: torch.Tensor | None
    on_chunk: OnChunk | None
    observer: Observer | None


@torch.inference_mode()
def run_plan(model: Model, cache: SequenceCache, plan: Plan, options: RunOptions) -> torch.Tensor:
    """Collapsed streams [T', H] of the positions that went through the decoder.

    The cache holds the plan's token ids already. Raises `InputError` for an impossible chunk.
    """
    if options.chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {options.chunk_tokens}")
    first = model.config.decoder_start
    if plan.restart_decoder:
        for window in cache.windows[first:]:
            window.restart(plan.decoder_from)
    whole = plan.decoder_from == plan.start
    kept: list[State] = []
    out: list[torch.Tensor] = []
    for span in _chunks(cache, plan, options.chunk_tokens):
        work = model.forward_pass([span], options.observer)
        state = _encode(model, span, work, options.image_embeddings)
        if whole:
            out.append(_decode(model, state, work))
        else:
            model.blocks[first].write_global(*state, work)
            skip = max(plan.decoder_from - span.start, 0)
            kept.append((state[0][skip:], state[1][skip:]))
        cache.length = span.stop
        if options.on_chunk is not None:
            options.on_chunk(cache)
    if not whole:
        out.append(_decode_last(model, kept, cache, plan, options.observer))
    return torch.cat(out)


def _chunks(cache: SequenceCache, plan: Plan, chunk_tokens: int) -> Iterator[Span]:
    for start in range(plan.start, plan.stop, chunk_tokens):
        stop = min(start + chunk_tokens, plan.stop)
        yield Span(cache, start, stop, slice(0, stop - start), plan.write_from)


def _encode(
    model: Model, span: Span, work: ForwardPass, image_embeddings: torch.Tensor | None
) -> State:
    tokens = span.cache.token_ids
    here = None
    if image_embeddings is not None and work.image_mask is not None:
        # Counted from the end, where embeddings and tokens stop together.
        left = int((tokens[span.start :] == model.config.image_token).sum())
        at = len(image_embeddings) - left
        here = image_embeddings[at : at + int(work.image_mask.sum())]
    state = model.embed(tokens[span.start : span.stop], here)
    for block in model.blocks[: model.config.decoder_start]:
        state = block.forward(*state, work)
    return state


def _decode(model: Model, state: State, work: ForwardPass) -> torch.Tensor:
    for block in model.blocks[model.config.decoder_start :]:
        state = block.forward(*state, work)
    return collapse(*state)


def _decode_last(
    model: Model,
    kept: list[State],
    cache: SequenceCache,
    plan: Plan,
    observer: Observer | None,
) -> torch.Tensor:
    """The decoder over the plan's last positions, whose global rows are written already."""
    span = Span(cache, plan.decoder_from, plan.stop, slice(0, plan.stop - plan.decoder_from))
    work = model.forward_pass([span], observer, write_global=False)
    streams, pre_mix = (torch.cat(part) for part in zip(*kept, strict=True))
    return _decode(model, (streams, pre_mix), work)
