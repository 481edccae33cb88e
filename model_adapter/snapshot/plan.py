"""Which parts a model's snapshot has at a position, and how large it is (ds41f §4, §5)."""

from collections.abc import Iterator
from dataclasses import dataclass

from model_adapter.config import ModelConfig
from model_adapter.snapshot.format import HEAD_BYTES, PART_BYTES, PartKind

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part. `rows`: how many at most; fewer only where a window began later than `rows` before
    the position. `start`: None for windows, whose start is the state's own."""

    kind: PartKind
    number: int
    row_bytes: int
    rows: int
    start: int | None = None


def part_plans(
    config: ModelConfig, position: int, block_tokens: int, drafts: bool
) -> Iterator[PartPlan]:
    """The parts in their order. `drafts`: with the draft layers' windows."""
    window = min(config.window, position)
    for layer in range(config.layers):
        yield PartPlan(PartKind.WINDOW, layer, config.window_row_bytes, window)
    for number in range(len(config.draft_specs) if drafts else 0):
        yield PartPlan(PartKind.DRAFT_WINDOW, number, config.window_row_bytes, window)
    full = position // block_tokens * block_tokens
    for number, spec in enumerate(config.global_caches):
        first = full // spec.ratio
        rows = position // spec.ratio - first
        yield PartPlan(PartKind.SECTION, number, spec.row_bytes, rows, first)
    for layer in config.kv_sources:
        ratio = config.compress_ratios[layer]
        if ratio > 1:
            rows = position % ratio
            row_bytes = 2 * config.head_dim * _FLOAT32_BYTES
            yield PartPlan(PartKind.PENDING, layer, row_bytes, rows, position - rows)


def header_bytes(config: ModelConfig, drafts: bool) -> int:
    """What a snapshot has beside its rows."""
    return HEAD_BYTES + PART_BYTES * sum(1 for _ in part_plans(config, 1, 1, drafts))


def snapshot_bytes(config: ModelConfig, position: int, block_tokens: int, drafts: bool) -> int:
    """Size of the snapshot of a sequence whose windows are full, header included."""
    plans = part_plans(config, position, block_tokens, drafts)
    return header_bytes(config, drafts) + sum(plan.rows * plan.row_bytes for plan in plans)
