"""How many patches and tokens a picture of a given size becomes (ds41f §2, Vision)."""

import math
from dataclasses import dataclass

from model_adapter.config import VisionConfig
from model_adapter.errors import ImageError


@dataclass(frozen=True)
class ImageGrid:
    """A picture's place on the grid.

    `height`, `width`: pixels after resizing, multiples of the patch. `vit_rows`, `vit_cols`:
    patches. `rows`, `cols`: image tokens, each of `downsample`² patches, the last ones perhaps of
    fewer.
    """

    height: int
    width: int
    vit_rows: int
    vit_cols: int
    rows: int
    cols: int

    @property
    def span_tokens(self) -> int:
        """Tokens of the span: START, per row its images and NEWLINE, END."""
        return span_tokens(self.rows, self.cols)


def span_tokens(rows: int, cols: int) -> int:
    """Tokens that a grid of `rows` × `cols` image tokens takes."""
    return rows * (cols + 1) + 2


def grid_of_patches(vit_rows: int, vit_cols: int, config: VisionConfig) -> ImageGrid:
    """The grid that has `vit_rows` × `vit_cols` patches."""
    patch, ratio = config.patch, config.downsample
    return ImageGrid(
        height=vit_rows * patch,
        width=vit_cols * patch,
        vit_rows=vit_rows,
        vit_cols=vit_cols,
        rows=-(-vit_rows // ratio),
        cols=-(-vit_cols // ratio),
    )


def image_grid(width: int, height: int, config: VisionConfig) -> ImageGrid:
    """The grid for a picture of `width` × `height` pixels.

    The picture grows to `pixels_min` and is rounded up to whole patches; where its span would then
    pass `image_tokens_max`, it shrinks to the largest size of its shape that does not. Raises
    `ImageError` for a picture without pixels.
    """
    if width < 1 or height < 1:
        raise ImageError(f"a picture of {width}×{height} pixels can't be shown")
    if config.wh_ratio_max is not None:
        width = min(width, height * config.wh_ratio_max)
    if width * height < config.pixels_min:
        factor = math.sqrt(config.pixels_min / (width * height))
        width, height = int(width * factor), int(height * factor)
    patch = config.patch
    grid = grid_of_patches(-(-height // patch), -(-width // patch), config)
    if grid.span_tokens <= config.image_tokens_max:
        return grid
    return grid_of_patches(*_shrunk(width, height, config), config)


def _shrunk(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """Rows and columns of patches of the largest picture of this shape within the token limit."""
    ratio = config.downsample
    cell = config.patch * ratio
    budget = config.image_tokens_max - 2
    # With real numbers, rows · (cols + 1) = budget and rows / cols = height / width.
    cols = math.sqrt(budget * width / height + 0.25) - 0.5
    rows = cols * height / width
    if cols < 1:
        return budget // 2 * ratio, ratio
    if rows < 1:
        return ratio, (budget - 1) * ratio
    scale = min(math.floor(cols) * cell / width, math.floor(rows) * cell / height)
    patches = (math.floor(side * scale / config.patch) for side in (height, width))
    vit_rows, vit_cols = (max(1, count) for count in patches)
    return vit_rows, vit_cols
