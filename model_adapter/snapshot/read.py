"""Whether a payload is the state of this model at the position it is wanted for."""

from dataclasses import dataclass, field

from model_adapter.config import ModelConfig
from model_adapter.errors import SnapshotError
from model_adapter.snapshot.format import Buffer, Computed, Part, PartKind, unpack
from model_adapter.snapshot.plan import PartPlan, part_plans


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checked snapshot; rows are views of its payload. Each list is in order of number; `drafts`
    is empty where the writer had no draft windows."""

    position: int
    block_tokens: int
    windows: list[Part] = field(default_factory=list)
    drafts: list[Part] = field(default_factory=list)
    sections: list[Part] = field(default_factory=list)
    pending: list[Part] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Full blocks before it, which lie elsewhere."""
        return self.position // self.block_tokens


def read_snapshot(
    payload: Buffer,
    config: ModelConfig,
    computed: Computed,
    position: int | None = None,
    block_tokens: int | None = None,
) -> Snapshot:
    """Check a payload against the model, how it computes, and what is expected of it.

    `position`, `block_tokens`: that it must have. Raises `SnapshotError` saying what does not fit.
    """
    content = unpack(payload)
    if content.computed != computed:
        theirs, ours = content.computed, computed
        raise SnapshotError(
            f"a snapshot of a {theirs.mode} {theirs.dtype} run can't go on as a {ours.mode} "
            f"{ours.dtype} one"
        )
    for name, wanted in (("position", position), ("block_tokens", block_tokens)):
        found = getattr(content, name)
        if wanted not in (None, found):
            raise SnapshotError(f"a snapshot with {name} {found}, where {wanted} was asked for")
    if not 1 <= content.position <= config.positions_max or content.block_tokens < 1:
        raise SnapshotError(
            f"a snapshot at position {content.position} in blocks of {content.block_tokens}"
        )
    if content.block_tokens % config.group_tokens:
        raise SnapshotError(
            f"a snapshot in blocks of {content.block_tokens} tokens, which is not a multiple of "
            f"the compression ratios (least common multiple {config.group_tokens})"
        )
    return _sorted(config, content.position, content.block_tokens, content.parts)


def _sorted(config: ModelConfig, position: int, block_tokens: int, parts: list[Part]) -> Snapshot:
    drafts = any(part.kind is PartKind.DRAFT_WINDOW for part in parts)
    plans = list(part_plans(config, position, block_tokens, drafts))
    if len(plans) != len(parts):
        raise SnapshotError(f"a snapshot of {len(parts)} parts; this model has {len(plans)}")
    snapshot = Snapshot(position, block_tokens)
    lists = {
        PartKind.WINDOW: snapshot.windows,
        PartKind.DRAFT_WINDOW: snapshot.drafts,
        PartKind.SECTION: snapshot.sections,
        PartKind.PENDING: snapshot.pending,
    }
    for part, plan in zip(parts, plans, strict=True):
        _check(part, plan, position)
        lists[part.kind].append(part)
    return snapshot


def _check(part: Part, plan: PartPlan, position: int) -> None:
    count, row_bytes = part.rows.shape
    where = f"{plan.kind.name.lower()} {plan.number}"
    if (part.kind, part.number, row_bytes) != (plan.kind, plan.number, plan.row_bytes):
        raise SnapshotError(
            f"a snapshot holds {part.kind.name.lower()} {part.number} with rows of {row_bytes} "
            f"bytes, where this model has {where} with rows of {plan.row_bytes}"
        )
    rows, start = plan.rows, plan.start
    if start is None:
        start = part.start
        rows = min(rows, position - start)
    if (count, part.start) != (rows, start):
        raise SnapshotError(
            f"a snapshot at position {position} holds {count} rows of {where} from {part.start} "
            f"on, where {rows} from {start} on belong"
        )
