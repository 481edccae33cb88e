"""The hierarchical indexer: which global entries a position attends to (ds41f §2, report §2.3.2).

Scores every visible index key against the position's index queries and keeps the best k. The scan
streams over the packed keys in tiles of bounded size, so that memory does not grow with the length
of the sequence. The candidate source also keeps the best blocks of consecutive entries; later
Reindex layers look only there, and unpack only those.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from model_adapter import records
from model_adapter.config import LayerMode, LayerSpec, ModelConfig
from model_adapter.few_rows import linear, queries_per_step
from model_adapter.forward_pass import ForwardPass, Selection, Span
from model_adapter.records import Records
from model_adapter.rope import rotate_
from model_adapter.topk import RunningTopK, packed
from model_adapter.weights import Weights

QUERY_ROWS_MAX = 128
SCAN_TILE_BYTES_MAX = 8 << 20
"""Bounds a tile's scores, queries × heads × keys, and its unpacked keys, both in float32."""


@dataclass(frozen=True, slots=True)
class _Queries:
    """Some positions' index queries: `q` float32 [Q, heads, D], `w` [Q, heads] in the model's
    dtype, `visible` int64 [Q]: entries below it may be chosen (ascending)."""

    q: torch.Tensor
    w: torch.Tensor
    visible: torch.Tensor

    @property
    def limit(self) -> int:
        return int(self.visible[-1])


@dataclass(frozen=True, slots=True)
class _Tile:
    """Scores float32 [Q, N] of the entries `numbers` int64 [N]; −∞ where not choosable."""

    numbers: torch.Tensor
    scores: torch.Tensor


class Indexer:
    """The index queries of one Full or Reindex layer, over the keys of its KV source."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Weights) -> None:
        assert spec.kv_source is not None
        self._prefix = f"{spec.prefix}.attn.indexer"
        self._layer = spec.index
        self._source = spec.kv_source
        self._ratio = spec.ratio
        self._heads = config.index_heads
        self._topk = config.index_topk
        self._scale = (config.index_dim * config.index_heads) ** -0.5
        self._block_size = config.candidate_block_size
        self._blocks_kept = config.candidate_blocks
        self._chooses_blocks = spec.index == config.candidate_source
        self._restricted = (
            spec.mode is LayerMode.REINDEX
            and config.candidate_source is not None
            and config.layer_specs[config.candidate_source].kv_source == spec.kv_source
            and spec.index > config.candidate_source
        )
        self._weights = weights

    def select(self, q_latent: torch.Tensor, x: torch.Tensor, work: ForwardPass) -> None:
        """Set the pass's selections from q_latent [T, q rank] and the normed input x [T, H]."""
        q, w = self._queries(q_latent, x, work)
        for i, span in enumerate(work.spans):
            previous = work.selections[i]
            candidates = previous.blocks if self._restricted and previous else None
            visible = (work.positions[span.rows] + 1) // self._ratio
            count = span.stop - span.start
            parts = [
                self._select_rows(
                    _Queries(q[span.rows][rows], w[span.rows][rows], visible[rows]),
                    span,
                    None if candidates is None else candidates[rows],
                )
                for rows in _slices(count, queries_per_step(count, QUERY_ROWS_MAX))
            ]
            chosen = _joined(parts)
            if not self._chooses_blocks and previous is not None:
                chosen.blocks = previous.blocks
            work.selections[i] = chosen
            work.observe("selection", self._layer, chosen.entries)

    def _queries(
        self, q_latent: torch.Tensor, x: torch.Tensor, work: ForwardPass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = linear(q_latent, self._weights.matrix(f"{self._prefix}.wq_b"))
        q = q.unflatten(1, (self._heads, -1))
        rotate_(q, work.rotations(self._ratio).unsqueeze(1))
        w = linear(x, self._weights.matrix(f"{self._prefix}.weights_proj"))
        return records.unpack(records.INDEX, records.pack(records.INDEX, q)), w * self._scale

    def _select_rows(
        self, queries: _Queries, span: Span, candidates: torch.Tensor | None
    ) -> Selection:
        keys = span.cache.index(self._source).rows
        if candidates is not None:
            return Selection(self._best(queries, self._scan_blocks(queries, keys, candidates)))
        few_blocks = queries.limit <= self._blocks_kept * self._block_size
        if queries.limit <= self._topk and (few_blocks or not self._chooses_blocks):
            return Selection(_all_visible(queries.visible, queries.limit))
        tiles = self._scan_all(queries, keys)
        if few_blocks or not self._chooses_blocks:
            return Selection(self._best(queries, tiles))
        return self._best_and_blocks(queries, tiles)

    def _best(self, queries: _Queries, tiles: Iterator[_Tile]) -> torch.Tensor:
        best = RunningTopK(len(queries.q), self._topk, queries.q.device)
        for tile in tiles:
            best.add(packed(tile.scores, tile.numbers))
        return best.numbers()

    def _best_and_blocks(self, queries: _Queries, tiles: Iterator[_Tile]) -> Selection:
        """Top-k entries, and the best blocks by their best entry; the latest visible block is
        always among them."""
        size = self._block_size
        best = RunningTopK(len(queries.q), self._topk, queries.q.device)
        blocks = RunningTopK(len(queries.q), self._blocks_kept, queries.q.device)
        latest = (queries.visible - 1).div(size, rounding_mode="floor").unsqueeze(1)
        for tile in tiles:
            best.add(packed(tile.scores, tile.numbers))
            missing = -tile.scores.shape[1] % size
            padded = functional.pad(tile.scores, (0, missing), value=-torch.inf)
            numbers = tile.numbers[::size] // size
            top = padded.unflatten(1, (-1, size)).amax(2)
            blocks.add(packed(top.masked_fill(numbers == latest, torch.inf), numbers))
        return Selection(best.numbers(), blocks.numbers())

    def _scan_all(self, queries: _Queries, keys: Records) -> Iterator[_Tile]:
        """Every entry that any of the queries sees, in order."""
        for part in _slices(queries.limit, self._tile_entries(queries)):
            numbers = torch.arange(part.start, part.stop, device=keys.device)
            yield _Tile(numbers, self._scores(queries, keys[part], numbers))

    def _scan_blocks(
        self, queries: _Queries, keys: Records, candidates: torch.Tensor
    ) -> Iterator[_Tile]:
        """The entries of the candidate blocks [Q, b] of any of the queries, in order."""
        union = candidates[candidates >= 0].unique()
        member = candidates.new_zeros((len(candidates), len(union) + 1), dtype=torch.bool)
        at = torch.searchsorted(union, candidates.clamp_min(0))
        within = torch.arange(self._block_size, device=keys.device)
        member.scatter_(1, at.masked_fill(candidates < 0, len(union)), True)
        for part in _slices(len(union), self._tile_entries(queries) // self._block_size):
            numbers = union[part].unsqueeze(1) * self._block_size + within
            allowed = member[:, part].repeat_interleave(self._block_size, dim=1)
            inside = numbers.flatten() < queries.limit
            numbers, allowed = numbers.flatten()[inside], allowed[:, inside]
            if not len(numbers):
                return
            scores = self._scores(queries, keys.index_select(0, numbers), numbers)
            yield _Tile(numbers, scores.masked_fill_(~allowed, -torch.inf))

    def _tile_entries(self, queries: _Queries) -> int:
        """Keys per tile: a multiple of the block size within the tile's bound."""
        per_key = max(len(queries.q) * self._heads, queries.q.shape[-1]) * 4
        blocks = SCAN_TILE_BYTES_MAX // (per_key * self._block_size)
        return max(blocks, 1) * self._block_size

    def _scores(self, queries: _Queries, keys: Records, numbers: torch.Tensor) -> torch.Tensor:
        """Σ_h relu(q_h·k_j)·w_h, each product and term rounded to the model's dtype.

        Sums over the heads run in one order for every entry, so that equal keys score equal.
        """
        k = records.unpack(records.INDEX, keys)
        dots = (queries.q.flatten(0, 1) @ k.T).to(queries.w.dtype).unflatten(0, (-1, self._heads))
        terms = dots.relu_().mul_(queries.w.unsqueeze(2))
        scores = terms.sum(dim=1).float()
        if int(numbers[-1]) >= int(queries.visible[0]):
            scores.masked_fill_(numbers >= queries.visible.unsqueeze(1), -torch.inf)
        return scores


def _all_visible(visible: torch.Tensor, limit: int) -> torch.Tensor:
    numbers = torch.arange(limit, device=visible.device)
    return torch.where(numbers < visible.unsqueeze(1), numbers, -1)


def _joined(parts: list[Selection]) -> Selection:
    """One selection from those of consecutive positions."""
    entries = _padded([p.entries for p in parts])
    chosen = [p.blocks for p in parts if p.blocks is not None]
    if not chosen:
        return Selection(entries)
    # Positions whose blocks all fit may choose any: all blocks that the kept number allows for.
    every = torch.arange(chosen[0].shape[1], device=entries.device)
    blocks = [every.expand(len(p.entries), -1) if p.blocks is None else p.blocks for p in parts]
    return Selection(entries, _padded(blocks))


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    width = max(p.shape[1] for p in parts)
    return torch.cat([functional.pad(p, (0, width - p.shape[1]), value=-1) for p in parts])


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, total)) for at in range(0, total, step))
