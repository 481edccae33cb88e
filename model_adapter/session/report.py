"""What one request took from the store, computed and left there."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from kvstore import Tier


class PrefixOutcome(Enum):
    """What became of the request's prefix."""

    NO_STORE = "no store"
    """The session runs without one."""
    HIT = "hit"
    MISS = "miss"
    TOO_SHORT = "too short"
    """A hit no longer than the window: replaying would cost as much as computing."""
    DECLINED = "declined"
    """A hit that would have taken longer to fetch than to compute."""
    LOST = "lost"
    """The store failed before anything was taken from it."""


class SnapshotOutcome(Enum):
    """What became of the window snapshot that a hit may resume from."""

    OFF = "off"
    """The session does without, or has no store."""
    HIT = "hit"
    """The request went on at its exact position; nothing was replayed."""
    MISS = "miss"
    """None lies on the prompt."""
    SHORTER = "shorter"
    """A replay from the blocks that hit computes less than going on at the snapshot."""
    GONE = "gone"
    """It, or a block before it, was there for the lookup and not any more."""
    UNUSABLE = "unusable"
    """Its bytes are not a state of this model; the log says why."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request in numbers; times are seconds, sizes payload bytes.

    `hit_tokens`: taken from the store: whole blocks, or exactly up to a snapshot.
    `replayed_tokens`: of those, run again through the encoder; none from a snapshot.
    `encoder_positions`, `decoder_positions`: positions that each half of the network computed
    before the first token; a warm request's encoder computes the replay and the suffix, its decoder
    the last window (ds41f §5). `hit_blocks`: by the tier that held them. `present_blocks`: offered,
    but there already. `fetch_s`: lookup and reading, part of `ttft_s`. `store_s`: storing blocks
    and snapshots, not part of it. `store_error`: the first failure of the store, which cost the
    request nothing but its hit. `snapshot`: whether the hit was resumed from one, of
    `snapshot_bytes`; `stored_snapshots`, `refused_snapshots`: those left for later requests.
    `read_ahead_s`: how long reading went on beside the computation, and `waited_s`, how much of
    that the computation waited for; both 0 where all was read before (`fetch_s`).
    """

    outcome: PrefixOutcome
    prompt_tokens: int
    generated_tokens: int
    hit_tokens: int
    replayed_tokens: int
    encoder_positions: int
    decoder_positions: int
    hit_blocks: Mapping[Tier, int]
    fetched_bytes: int
    stored_blocks: int
    present_blocks: int
    refused_blocks: int
    stored_bytes: int
    fetch_s: float
    ttft_s: float
    store_s: float
    total_s: float
    store_error: str | None = None
    snapshot: SnapshotOutcome = SnapshotOutcome.OFF
    snapshot_bytes: int = 0
    stored_snapshots: int = 0
    refused_snapshots: int = 0
    read_ahead_s: float = 0.0
    waited_s: float = 0.0

    @property
    def tiers(self) -> str:
        """The tiers of the hit for a table, such as `ssd 12, dram 4`; a dash where nothing hit."""
        parts = [f"{str(tier.name).lower()} {n}" for tier, n in self.hit_blocks.items() if n]
        return ", ".join(parts) or "–"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        blocks = {str(tier.name).lower(): n for tier, n in self.hit_blocks.items()}
        named = {"outcome": self.outcome.value, "snapshot": self.snapshot.value}
        return asdict(self) | named | {"hit_blocks": blocks}
