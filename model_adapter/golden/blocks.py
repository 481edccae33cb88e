"""Comparisons of one block alone, fed from the vectors' `streams_in` and `pre_mix_in`.

What a block takes from earlier ones comes from the vectors as well: global rows, index keys and
selections of its sources. Only the candidate blocks, which the vectors lack, come from the
candidate source's own run.
"""

from collections.abc import Iterator

import torch

from model_adapter import records
from model_adapter.cache import SequenceCache
from model_adapter.config import LayerMode, LayerSpec
from model_adapter.forward_pass import Selection, Span
from model_adapter.golden.end_to_end import (
    Comparison,
    index_values,
    main_values,
    padded_selection,
)
from model_adapter.golden.result import Part, Result, equal, relative
from model_adapter.hyper_connections import collapse

_ALONE = Part.BLOCKS


def blocks_alone(c: Comparison) -> Iterator[Result]:
    """Every block of every run whose streams the vectors have."""
    for run in c.vectors.runs():
        if f"{run}.streams_in.0" in c.vectors:
            yield from _RunBlocks(c, run).results()


class _RunBlocks:
    def __init__(self, c: Comparison, run: str) -> None:
        self._c = c
        self._run = run
        self._ids = c.vectors.get(f"{run}.input_ids")
        self._candidates: torch.Tensor | None = None

    def results(self) -> Iterator[Result]:
        for spec in self._c.model.config.layer_specs:
            yield from self._block(spec)

    @torch.inference_mode()
    def _block(self, spec: LayerSpec) -> list[Result]:
        model, i = self._c.model, spec.index
        cache = self._fed_cache(spec)
        count = len(self._ids)
        work = model.forward_pass([Span(cache, 0, count, slice(0, count))])
        work.selections[0] = self._fed_selection(spec)
        streams = self._get(f"streams_in.{i}").to(model.weights.dtype)
        state = model.blocks[i].forward(streams, self._get(f"pre_mix_in.{i}"), work)
        if i == model.config.candidate_source and work.selections[0] is not None:
            self._candidates = work.selections[0].blocks
        results = [self._out(i, *state)]
        if i + 1 < model.config.layers:
            results.append(self._relative(i, f"pre_mix_in.{i + 1}", state[1]))
        if spec.mode is LayerMode.FULL:
            results.append(self._relative(i, f"compressed_kv.{i}", main_values(cache, i)))
            results.append(self._relative(i, f"index_keys.{i}", index_values(cache, i)))
        if spec.selects and work.selections[0] is not None:
            results.append(self._selection(i, work.selections[0].entries))
        return results

    def _out(self, i: int, streams: torch.Tensor, pre_mix: torch.Tensor) -> Result:
        if i + 1 < self._c.model.config.layers:
            return self._relative(i, f"streams_in.{i + 1}", streams)
        return self._relative(i, "logits", self._c.model.logits(collapse(streams, pre_mix)))

    def _selection(self, i: int, entries: torch.Tensor) -> Result:
        theirs = self._get(f"topk_indices.{i}").cpu()
        mine = padded_selection(entries, theirs.shape[1])
        name = self._name(i, f"topk_indices.{i}")
        return equal(_ALONE, name, mine, theirs, self._c.tolerances.exact)

    def _fed_cache(self, spec: LayerSpec) -> SequenceCache:
        """A fresh cache with the rows that the block reads but does not write."""
        cache = self._c.model.new_cache()
        cache.append_tokens(self._ids.numpy())
        source = spec.kv_source
        if source is not None and source != spec.index:
            main = self._get(f"compressed_kv.{source}").float()
            index = self._get(f"index_keys.{source}").float()
            cache.main(source).append(records.pack(records.MAIN, main))
            cache.index(source).append(records.pack(records.INDEX, index))
        return cache

    def _fed_selection(self, spec: LayerSpec) -> Selection | None:
        source = spec.index_source
        if source is None or spec.mode is LayerMode.FULL:
            return None
        entries = self._get(f"topk_indices.{source}").long()
        return Selection(entries, self._candidates)

    def _relative(self, i: int, key: str, mine: torch.Tensor) -> Result:
        theirs = self._get(key)
        return relative(_ALONE, self._name(i, key), mine, theirs, self._c.tolerances.block)

    def _name(self, i: int, key: str) -> str:
        return f"block {i}: {self._run}.{key}"

    def _get(self, key: str) -> torch.Tensor:
        return self._c.vectors.get(f"{self._run}.{key}").to(self._c.model.device)
