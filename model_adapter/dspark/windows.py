"""The draft layers' window KV of one sequence."""

import torch

from model_adapter.cache_rows import WindowRows
from model_adapter.config import ModelConfig
from model_adapter.devices import CPU
from model_adapter.records import Records


class DraftWindows:
    """Packed window records of every draft layer, made from the features of the last positions.

    `layers`: one `WindowRows` per draft layer, all over the same positions. A draft at position p
    sees the records of [p − W, p) (ds41f §2), one more than a backbone query has before it.
    """

    def __init__(self, config: ModelConfig, device: torch.device = CPU) -> None:
        self._window = config.window
        self.layers = [
            WindowRows(config.window_row_bytes, config.window + 1, device)
            for _ in config.draft_specs
        ]

    @property
    def end(self) -> int:
        """Position of the next record."""
        return self.layers[0].end

    def visible(self, layer: int) -> Records:
        """What a draft at `end` sees of a draft layer, counted from 0: at most W records."""
        return self.layers[layer].latest(self._window)

    def restart(self, position: int) -> None:
        """Forget everything; the next record is that of `position`."""
        for rows in self.layers:
            rows.restart(position)

    def truncate(self, end: int) -> None:
        """Forget the positions from `end` on; `CacheError` where too many slid out."""
        for rows in self.layers:
            rows.truncate(end)
