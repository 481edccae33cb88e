"""From patch features to embeddings of the language model (ds41f §2, Vision)."""

import torch
from torch import Tensor
from torch.nn import functional as fn

from model_adapter.vision.tower import GetWeight


class Aligner:
    """Joins `downsample`² patches into one image token and maps it to the text width."""

    def __init__(self, downsample: int, weight: GetWeight, dtype: torch.dtype) -> None:
        self.downsample = downsample
        self.weight = weight
        self.dtype = dtype

    def __call__(self, features: Tensor, vit_rows: int, vit_cols: int) -> Tensor:
        """`[vit_rows · vit_cols, hidden]` → `[⌈vit_rows/r⌉ · ⌈vit_cols/r⌉, text hidden]`."""
        r = self.downsample
        grid = features.unflatten(0, (vit_rows, vit_cols))
        grid = fn.pad(grid, (0, 0, 0, -vit_cols % r, 0, -vit_rows % r))
        # Channel, then row and column within the cell.
        cells = grid.unflatten(1, (-1, r)).unflatten(0, (-1, r)).permute(0, 2, 4, 1, 3)
        return self._linear("w2", fn.gelu(self._linear("w1", cells.flatten(2).flatten(0, 1))))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weight(f"aligner.{name}.{p}", self.dtype) for p in ("weight", "bias"))
        return fn.linear(x, weight, bias)
