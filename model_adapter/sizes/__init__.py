"""How large a DS4.1F of a given config is: parameters by part, cache bytes by record.

From the config alone; neither a checkpoint nor torch is needed.
"""

from model_adapter.sizes.caches import (
    CacheEstimate,
    RecordSize,
    block_bytes,
    estimate,
    global_bytes_per_token,
    record_sizes,
)
from model_adapter.sizes.parameters import Group, PartSize, part_sizes, total

__all__ = [
    "CacheEstimate",
    "Group",
    "PartSize",
    "RecordSize",
    "block_bytes",
    "estimate",
    "global_bytes_per_token",
    "part_sizes",
    "record_sizes",
    "total",
]
