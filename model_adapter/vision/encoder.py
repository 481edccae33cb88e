"""Images to the embeddings that enter the streams at their positions."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model_adapter.config import ModelConfig, VisionConfig
from model_adapter.devices import CPU
from model_adapter.errors import ImageError
from model_adapter.vision.aligner import Aligner
from model_adapter.vision.image_processor import ImagePatches
from model_adapter.vision.span import PlacedImage, TokenType, span_types
from model_adapter.vision.tower import GetWeight, VisionTower
from model_adapter.weights import Weights

IMAGES_KEPT_MAX_DEFAULT = 16
_MARKS = {
    TokenType.START: "image_start",
    TokenType.NEWLINE: "image_newline",
    TokenType.END: "image_end",
}


class ImageRows(NamedTuple):
    """What images put into a range of positions.

    `mask`: bool `[positions]`, True within a span, START, NEWLINE and END included. `rows`:
    `[mask.sum(), text hidden]`, the embeddings at those positions in order.
    """

    mask: Tensor
    rows: Tensor


class VisionEncoder:
    """Tower, aligner and the learned vectors around an image.

    The embeddings of the last `images_kept_max` images are kept, so that a chunked prefill or a
    replay across an image takes the same values again; computed anew they are the same too.
    """

    def __init__(
        self,
        config: VisionConfig,
        weight: GetWeight,
        dtype: torch.dtype,
        images_kept_max: int = IMAGES_KEPT_MAX_DEFAULT,
        device: torch.device = CPU,
    ) -> None:
        self.config = config
        self.images_kept_max = images_kept_max
        self._weight = weight
        self._dtype = dtype
        self._device = device
        self._tower = VisionTower(config, weight, dtype)
        self._aligner = Aligner(config.downsample, weight, dtype)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "VisionEncoder":
        """The encoder of a model. Raises `ImageError` where the model has none."""
        if config.vision is None or config.image_token is None:
            raise ImageError("this checkpoint has no vision part: send text only")
        return cls(config.vision, weights.vector, weights.dtype, device=weights.device)

    @torch.inference_mode()
    def embed(self, image: ImagePatches) -> Tensor:
        """The embeddings of an image's whole span, `[grid.span_tokens, text hidden]`."""
        rows = self._kept.pop(image.digest, None)
        if rows is None:
            rows = self._compute(image)
        self._kept[image.digest] = rows
        while len(self._kept) > self.images_kept_max:
            self._kept.popitem(last=False)
        return rows

    def _compute(self, image: ImagePatches) -> Tensor:
        grid = image.grid
        features = self._tower(image.patches.to(self._device), grid.vit_rows, grid.vit_cols)
        tokens = self._aligner(features, grid.vit_rows, grid.vit_cols)
        types = torch.from_numpy(span_types(grid)).to(self._device)
        rows = tokens.new_empty(grid.span_tokens, tokens.shape[-1])
        rows[types == TokenType.IMAGE] = tokens
        for kind, name in _MARKS.items():
            rows[types == kind] = self._weight(name, self._dtype)
        return rows

    def rows(self, images: Sequence[PlacedImage], start: int, stop: int) -> ImageRows | None:
        """What `images` put into positions `[start, stop)`; None where they put nothing.

        Only the images that reach into the range are embedded. `rows` is what `Model.prefill` takes
        as `image_embeddings` for the tokens of that range.
        """
        mask = torch.zeros(stop - start, dtype=torch.bool)
        parts = []
        for placed in images:
            first, last = max(start, placed.start), min(stop, placed.stop)
            if first < last:
                mask[first - start : last - start] = True
                parts.append(self.embed(placed.image)[first - placed.start : last - placed.start])
        return ImageRows(mask, torch.cat(parts)) if parts else None
