"""A sequence at one exact position, as bytes: what a window snapshot and a hand-over carry.

Window records of every layer, the draft layers' too where there are any; the global rows behind the
last full block; the rows of open compression groups. With the full blocks and the token ids beside
it a sequence goes on where it stood, and nothing is run again. `docs/snapshot.md` has the format
byte for byte; `SequenceCache.to_snapshot` and `from_snapshot` make and take it.
"""

from model_adapter.snapshot.format import Computed, Part, PartKind, pack, unpack
from model_adapter.snapshot.plan import PartPlan, part_plans, snapshot_bytes
from model_adapter.snapshot.read import Snapshot, read_snapshot

__all__ = [
    "Computed",
    "Part",
    "PartKind",
    "PartPlan",
    "Snapshot",
    "pack",
    "part_plans",
    "read_snapshot",
    "snapshot_bytes",
    "unpack",
]
