"""Comparisons that run the whole network on text. Each group yields results; `TEXT_GROUPS` lists
them all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from model_adapter import records
from model_adapter.cache import SequenceCache
from model_adapter.engram import Engram
from model_adapter.forward_pass import Span
from model_adapter.golden.result import Part, Result, equal, relative
from model_adapter.golden.tolerance import Tolerances
from model_adapter.golden.vectors import Vectors
from model_adapter.model import Model

_E2E = Part.END_TO_END


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a group works on. `chunk_tokens`: positions per prefill chunk, all at once where None.
    `mine`: what was compared with each key."""

    model: Model
    vectors: Vectors
    tolerances: Tolerances
    chunk_tokens: int | None = None
    mine: dict[str, torch.Tensor] = field(default_factory=dict)

    def chunk(self, ids: torch.Tensor) -> int:
        """Positions per chunk of these tokens."""
        return self.chunk_tokens or len(ids)

    def relative(self, key: str, mine: torch.Tensor) -> Result:
        """Compare a float tensor with the key's."""
        self.mine[key] = mine
        return relative(_E2E, key, mine, self.vectors.get(key), self.tolerances.for_key(key))

    def equal(self, key: str, mine: torch.Tensor, always: bool = False) -> Result:
        """Compare an integer tensor; `always`: it must be equal in every dtype."""
        tolerance = 0.0 if always else self.tolerances.exact_for_key(key)
        return equal(_E2E, key, mine, self.vectors.get(key), tolerance)


Group = Callable[[Comparison], Iterator[Result]]


class _Recorder:
    """Keeps what the layers show, by stage and layer."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], list[torch.Tensor]] = {}

    def __call__(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        self.seen.setdefault((stage, layer), []).append(tensor.clone())

    def get(self, stage: str, layer: int) -> torch.Tensor:
        """The rows of all chunks; a chunk that could choose among fewer rows is padded with −1."""
        parts = self.seen[stage, layer]
        width = max(part.shape[1] for part in parts)
        return torch.cat(
            [p if p.is_floating_point() else padded_selection(p, width) for p in parts]
        )


def padded_selection(entries: torch.Tensor, width: int) -> torch.Tensor:
    """A selection [T, k] with −1 up to the vectors' width."""
    missing = width - entries.shape[1]
    return torch.nn.functional.pad(entries, (0, max(missing, 0)), value=-1)


def main_values(cache: SequenceCache, layer: int) -> torch.Tensor:
    """A source's dequantised global entries, float32 [rows, D]."""
    return records.unpack(records.MAIN, cache.main(layer).rows)


def index_values(cache: SequenceCache, layer: int) -> torch.Tensor:
    """A source's dequantised index keys, float32 [rows, D]."""
    return records.unpack(records.INDEX, cache.index(layer).rows)


def exact_runs(c: Comparison) -> Iterator[Result]:
    """Every layer on every position, with all intermediates that the vectors have."""
    for run in c.vectors.runs():
        ids = c.vectors.get(f"{run}.input_ids")
        cache, recorder = c.model.new_cache(), _Recorder()
        logits = c.model.prefill_all_logits(cache, ids, c.chunk(ids), observer=recorder)
        for key, match in c.vectors.matching(rf"{run}\.(streams_in|pre_mix_in)\.(\d+)"):
            yield c.relative(key, recorder.get(match[1], int(match[2])))
        for key, match in c.vectors.matching(rf"{run}\.compressed_kv\.(\d+)"):
            yield c.relative(key, main_values(cache, int(match[1])))
        for key, match in c.vectors.matching(rf"{run}\.index_keys\.(\d+)"):
            yield c.relative(key, index_values(cache, int(match[1])))
        for key, match in c.vectors.matching(rf"{run}\.topk_indices\.(\d+)"):
            width = c.vectors.get(key).shape[1]
            selection = recorder.get("selection", int(match[1]))
            yield c.equal(key, padded_selection(selection, width))
        yield c.relative(f"{run}.logits", logits)


def engram_ids(c: Comparison) -> Iterator[Result]:
    """The merged vocabulary and the hashed rows."""
    engrams = [b.engram for b in c.model.blocks if b.engram is not None]
    if "engram.token_map" in c.vectors and engrams:
        merged = torch.from_numpy(engrams[0].hasher.merged)
        yield c.equal("engram.token_map", merged, always=True)
    for run in c.vectors.runs():
        key = f"{run}.engram_hashes"
        if key in c.vectors:
            yield c.equal(key, _hashes(c, run, engrams), always=True)


def _hashes(c: Comparison, run: str, engrams: list[Engram]) -> torch.Tensor:
    ids = c.vectors.get(f"{run}.input_ids")
    cache = c.model.new_cache()
    cache.append_tokens(ids.numpy())
    work = c.model.forward_pass([Span(cache, 0, len(ids), slice(0, len(ids)))])
    return torch.stack([torch.from_numpy(e.rows(work)) for e in engrams], dim=1)


def bounded_prefill(c: Comparison) -> Iterator[Result]:
    """The last position when the decoder ran on the last window only."""
    for run in c.vectors.runs():
        key = f"{run}.bounded_last_logits"
        if key in c.vectors:
            ids = c.vectors.get(f"{run}.input_ids")
            logits = c.model.prefill(c.model.new_cache(), ids, "bounded", c.chunk(ids))
            yield c.relative(key, logits)


def prefix_hits(c: Comparison) -> Iterator[Result]:
    """Resuming from the exact run's global rows by bounded replay."""
    for key, match in c.vectors.matching(r"(\w+)\.hit(\d+)\.last_logits"):
        run, hit = match[1], int(match[2])
        ids = c.vectors.get(f"{run}.input_ids")
        source, cache = c.model.new_cache(), c.model.new_cache()
        c.model.prefill(source, ids, "exact", c.chunk(ids))
        # One block of the whole hit: its length need not be a multiple of any other.
        cache.load_block(0, hit, source.block_sections(0, hit))
        yield c.relative(key, c.model.resume(cache, ids, hit, "bounded", c.chunk(ids)))
        pattern = rf"{run}\.hit{hit}\.suffix_compressed_kv\.(\d+)"
        for suffix_key, suffix in c.vectors.matching(pattern):
            layer = int(suffix[1])
            first = hit // c.model.config.compress_ratios[layer]
            yield c.relative(suffix_key, main_values(cache, layer)[first:])


def greedy_tokens(c: Comparison) -> Iterator[Result]:
    """Greedy decoding behind a prompt, exact mode."""
    if "greedy.output_ids" not in c.vectors:
        return
    cache = c.model.new_cache()
    logits = c.model.prefill(cache, c.vectors.get("greedy.prompt_ids"), "exact")
    tokens, gaps = [], []
    for _ in c.vectors.get("greedy.output_ids"):
        best = logits.topk(2).values
        gaps.append(best[0] - best[1])
        tokens.append(int(logits.argmax()))
        logits = c.model.decode(cache, tokens[-1])
    yield c.equal("greedy.output_ids", torch.tensor(tokens))
    if "greedy.top1_gap" in c.vectors:
        yield c.relative("greedy.top1_gap", torch.stack(gaps))


TEXT_GROUPS: tuple[Group, ...] = (
    exact_runs,
    engram_ids,
    bounded_prefill,
    prefix_hits,
    greedy_tokens,
)
