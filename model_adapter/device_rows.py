"""Packed global rows of one sequence in a device's memory, filled from the store's HBM.

For an engine that computes on a GPU: what the store holds there comes device to device, past the
host; the rest by way of the host. Rows stay packed (890 B per token at the released layout);
`tiles` dequantises them some at a time, as attention and the indexer go over them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore import Client, Layout, Lease, Outcome, Tier
from model_adapter.records import INDEX, MAIN, Kind, unpack

TILE_ROWS_DEFAULT = 4096
_KINDS: dict[str, Kind] = {"main": MAIN, "index": INDEX}


@dataclass(frozen=True, slots=True)
class Filled:
    """What came in: `blocks`, from the first on, and the tiers that they came from. Blocks from HBM
    are unverified: their bytes did not pass the host."""

    blocks: int
    tiers: Counter[Tier]


class DeviceRows:
    """Room for `tokens` positions on `device`. `sections`: uint8 [rows, row bytes] each, in the
    layout's order."""

    def __init__(self, layout: Layout, tokens: int, device: torch.device | str) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.sections = [
            torch.empty((-(-tokens // s.ratio), s.row_bytes), dtype=torch.uint8, device=self.device)
            for s in layout.sections
        ]

    def load(self, client: Client, lease: Lease, first: int = 0) -> Filled:
        """Take the blocks of a lease from the `first` on, up to the first that is not there.

        `client` takes from HBM what it has opened (`Client.open_hbm`). The copies are done when
        this returns. Raises the client's errors.
        """
        keys = lease.keys[first:]
        views = client.view_hbm(lease, keys) if keys else []
        for i, view in enumerate(views):
            if view is not None:
                self._put(first + i, [_tensor(section) for section in view.sections])
        self._finish()
        # only now: a copy that was under way may have read another block's bytes
        intact = client.intact(lease, [view.key for view in views if view is not None])
        there = [
            view is not None and (intact or client.intact(lease, [view.key])) for view in views
        ]
        tiers: Counter[Tier] = Counter()
        for i, in_hbm in enumerate(there):
            tier = Tier.HBM if in_hbm else self._by_host(client, lease, keys[i], first + i)
            if tier is None:
                return Filled(i, tiers)
            tiers[tier] += 1
        return Filled(len(keys), tiers)

    def _by_host(self, client: Client, lease: Lease, key: bytes, block: int) -> Tier | None:
        (data,) = client.read(lease, [key])
        if data.outcome is not Outcome.HIT:
            return None
        sections = [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in data.sections]
        self._put(block, sections)
        self._finish()
        return data.tier

    def _put(self, block: int, sections: Sequence[torch.Tensor]) -> None:
        step = self.layout.block_tokens
        for spec, rows, data in zip(self.layout.sections, self.sections, sections, strict=True):
            n = step // spec.ratio
            rows[block * n : (block + 1) * n].copy_(data.view(n, spec.row_bytes), non_blocking=True)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def tiles(
        self, section: int, rows: int, tile_rows: int = TILE_ROWS_DEFAULT
    ) -> Iterator[torch.Tensor]:
        """The first `rows` rows of a section as values, float32 [up to `tile_rows`, D] at a time,
        on the device."""
        kind = _KINDS[self.layout.sections[section].role]
        for at in range(0, rows, tile_rows):
            yield _values(kind, self.sections[section][at : min(at + tile_rows, rows)])


def _tensor(section: Any) -> torch.Tensor:
    """A section of the store's as a tensor, without a copy where it lies on a GPU."""
    if isinstance(section, np.ndarray):
        return torch.from_numpy(section.copy())
    return torch.from_dlpack(section)


def _values(kind: Kind, records: torch.Tensor) -> torch.Tensor:
    if records.device.type == "cpu":
        return unpack(kind, records.numpy())
    from kernels import gpu

    with torch.cuda.device(records.device):
        stream = torch.cuda.current_stream()
        stream.synchronize()  # the kernels run on CuPy's stream
        values = torch.from_dlpack(gpu.dequantize(kind, records, "float32"))
        torch.cuda.synchronize()
    return values
