"""CSA2: attention over the window and the selected global entries (ds41f §2, report §2.3).

A position sees the window keys of its own layer and the global entries that its index source
selected, and nothing else; K and V are the same vector. Global KV stays packed: only the selected
rows are gathered and unpacked, some positions at a time, so that memory depends neither on the
length of the sequence nor on that of the chunk. The window keys of a chunk are unpacked once.
Attention sees values that went through the quantiser, for the newest position too, so that a cached
row and a fresh one cannot differ.
"""

import math

import torch

from model_adapter import records
from model_adapter.compressor import Compressor
from model_adapter.config import LayerMode, LayerSpec, ModelConfig
from model_adapter.few_rows import by_row, linear, queries_per_step
from model_adapter.forward_pass import ForwardPass, Span
from model_adapter.indexer import Indexer
from model_adapter.norms import rms_norm
from model_adapter.rope import rotate_
from model_adapter.weights import Weights

QUERY_ROWS_MAX = 128
GATHER_BYTES_MAX = 32 << 20
"""Bounds the unpacked entries of one step: queries × selected × D in float32."""


class Attention:
    """The attention of one layer, in whichever of its modes."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Weights) -> None:
        self._config = config
        self._spec = spec
        self._prefix = f"{spec.prefix}.attn"
        self._weights = weights
        self._scale = config.head_dim**-0.5
        self.compressor = Compressor(config, spec, weights) if spec.mode is LayerMode.FULL else None
        self._indexer = Indexer(config, spec, weights) if spec.selects else None

    def forward(self, x: torch.Tensor, work: ForwardPass) -> torch.Tensor:
        """x [T, H], normed; returns [T, H]. Appends window rows, and global rows if it owns any."""
        c = self._config
        rotation = work.rotations(self._spec.ratio)
        q_latent = self._normed(self._linear(x, "wq_a"), "q_norm")
        q = self._linear(q_latent, "wq_b").unflatten(1, (c.heads, c.head_dim))
        rotate_(q, rotation.unsqueeze(1))
        kv = self.window_kv(x, rotation)
        work.observe("window_kv", self._spec.index, kv)
        fresh = records.pack(records.WINDOW, kv)
        if self.compressor is not None and work.write_global:
            self.compressor.append(x, work)
        if self._indexer is not None:
            self._indexer.select(q_latent, x, work)
        out = self._attend_rows(q, fresh, work)
        rotate_(out, rotation.conj().unsqueeze(1))
        return self._project(out)

    def window_kv(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Window KV of inputs [T, H] at the rotation's positions, before it is packed: [T, D]."""
        return rotate_(self._normed(self._linear(x, "wkv"), "kv_norm"), rotation)

    def _attend_rows(
        self, q: torch.Tensor, fresh: records.Records, work: ForwardPass
    ) -> torch.Tensor:
        """q [T, heads, D] over what it sees; `fresh`: the window records of the same rows."""
        out = torch.empty_like(q)
        for i, span in enumerate(work.spans):
            self._attend_span(q[span.rows], fresh[span.rows], work, i, out[span.rows])
        return out

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Heads [T, heads, D] through wo_a, each group by its own slice, and wo_b."""
        c = self._config
        wo_a = self._weights.matrix(f"{self._prefix}.wo_a").unflatten(0, (c.o_groups, c.o_rank))
        grouped = out.flatten(1).unflatten(1, (c.o_groups, -1))
        latent = by_row(lambda g: torch.bmm(g.transpose(0, 1), wo_a.mT).transpose(0, 1), grouped)
        return self._linear(latent.flatten(1), "wo_b")

    def _attend_span(
        self,
        q: torch.Tensor,
        fresh: records.Records,
        work: ForwardPass,
        i: int,
        out: torch.Tensor,
    ) -> None:
        """Attention of one span's q [T, heads, D] into out; appends its window rows."""
        span = work.spans[i]
        window = span.cache.windows[self._spec.index]
        older = window.latest(self._config.window - 1)
        first_key = span.start - len(older)
        keys = torch.cat(
            [records.unpack(records.WINDOW, older), records.unpack(records.WINDOW, fresh)]
        )
        window.append(fresh)
        selection = work.selections[i]
        entries = None
        if self._spec.kv_source is not None and selection is not None:
            entries = selection.entries
        step = queries_per_step(len(q), self._query_rows(entries))
        for at in range(0, len(q), step):
            rows = slice(at, min(at + step, len(q)))
            low = max(span.start + rows.start - self._config.window + 1 - first_key, 0)
            high = span.start + rows.stop - first_key
            out[rows] = self._attend(
                q[rows],
                keys[low:high],
                self._hidden(rows.stop - rows.start, high - low, q.device),
                None if entries is None else self._gather(span, entries[rows]),
            )

    def _hidden(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """bool [queries, keys]: the window keys that a query does not see. The last query stands at
        the last key."""
        at = torch.arange(keys, device=device)
        age = at[keys - queries :].unsqueeze(1) - at
        return (age < 0) | (age >= self._config.window)

    def _gather(self, span: Span, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected rows unpacked, float32 [Q, k, D], and bool [Q, k]: which are none."""
        assert self._spec.kv_source is not None
        used = int((entries >= 0).sum(1).max()) if entries.numel() else 0
        entries = entries[:, :used]
        rows = span.cache.main(self._spec.kv_source).rows
        packed = rows.index_select(0, entries.clamp_min(0).flatten())
        return records.unpack(records.MAIN, packed.unflatten(0, entries.shape)), entries < 0

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        hidden: torch.Tensor | None,
        selected: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """q [Q, heads, D] over window keys [K, D], but for the `hidden` ones [Q, K], and the
        selected entries; float32 throughout."""
        count, heads = q.shape[:2]
        q = q.float() * self._scale
        scores = (q.flatten(0, 1) @ keys.T).unflatten(0, (count, heads))
        if hidden is not None:
            scores.masked_fill_(hidden.unsqueeze(1), -math.inf)
        sink = self._weights.vector(f"{self._prefix}.attn_sink")
        parts = [sink.view(1, heads, 1).expand(count, heads, 1), scores]
        if selected is not None:
            entries, none = selected
            more = torch.bmm(q, entries.transpose(1, 2))
            parts.append(more.masked_fill_(none.unsqueeze(1), -math.inf))
        weights = torch.cat(parts, dim=2).softmax(dim=2)
        on_window = weights[:, :, 1 : 1 + len(keys)]
        out = (on_window.flatten(0, 1) @ keys).unflatten(0, (count, heads))
        if selected is not None:
            out = torch.baddbmm(out, weights[:, :, 1 + len(keys) :], selected[0])
        return out

    def _query_rows(self, entries: torch.Tensor | None) -> int:
        selected = 0 if entries is None else entries.shape[1]
        per_query = max(selected, 1) * self._config.head_dim * 4
        return max(1, min(QUERY_ROWS_MAX, GATHER_BYTES_MAX // per_query))

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._weights.matrix(f"{self._prefix}.{name}"))

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights.vector(f"{self._prefix}.{name}.weight")
        return rms_norm(x, weight, self._config.norm_eps)
