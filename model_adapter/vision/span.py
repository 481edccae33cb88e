"""Where images stand among the tokens of a prompt (ds41f §2, Vision).

A span is START, per row its IMAGE tokens and a NEWLINE, END. All have the image token id; what each
one is follows from the picture's grid, and which picture it is from nothing but the picture. Hence
whatever names a prompt by its tokens needs `ImagePrompt.spans` beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore import ImageSpan
from model_adapter.chat.tokens import IMAGE
from model_adapter.errors import ImageError
from model_adapter.vision.image_processor import ImagePatches
from model_adapter.vision.sizing import ImageGrid

Ids = npt.NDArray[np.int64]


class TokenType(IntEnum):
    """What a token of a prompt with images is."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


def span_types(grid: ImageGrid) -> npt.NDArray[np.int8]:
    """The `TokenType` of every token of a span, int8 `[grid.span_tokens]`."""
    row = [TokenType.IMAGE] * grid.cols + [TokenType.NEWLINE]
    return np.array([TokenType.START, *row * grid.rows, TokenType.END], dtype=np.int8)


@dataclass(frozen=True)
class PlacedImage:
    """A picture whose span begins at token `start` of its prompt."""

    start: int
    image: ImagePatches

    @property
    def stop(self) -> int:
        """The token behind the span."""
        return self.start + self.image.grid.span_tokens

    @property
    def span(self) -> ImageSpan:
        """The image's part in the names of blocks."""
        return ImageSpan(self.start, self.stop - self.start, self.image.digest)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt's tokens and its images. `token_ids`: int64 `[S]`, spans included."""

    token_ids: Ids
    images: tuple[PlacedImage, ...]

    @property
    def spans(self) -> list[ImageSpan]:
        """What `kvstore.block_keys` takes, in order of position."""
        return [placed.span for placed in self.images]

    def token_types(self) -> npt.NDArray[np.int8]:
        """The `TokenType` of every token, int8 `[S]`."""
        types = np.full(len(self.token_ids), TokenType.TEXT, dtype=np.int8)
        for placed in self.images:
            types[placed.start : placed.stop] = span_types(placed.image.grid)
        return types


def place_images(
    token_ids: Ids | Sequence[int], images: Sequence[ImagePatches], image_token: int
) -> ImagePrompt:
    """Puts a span in the place of every single `image_token` of `token_ids`.

    Raises `ImageError` unless there are as many image tokens as images.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    places = np.flatnonzero(ids == image_token)
    if len(places) != len(images):
        raise ImageError(
            f"the prompt has {len(places)} image placeholders for {len(images)} images"
        )
    lengths = np.ones(len(ids), dtype=np.int64)
    lengths[places] = [image.grid.span_tokens for image in images]
    starts = np.cumsum(lengths) - lengths
    placed = (
        PlacedImage(int(start), image) for start, image in zip(starts[places], images, strict=True)
    )
    return ImagePrompt(np.repeat(ids, lengths), tuple(placed))


def locate_images(
    token_ids: Ids | Sequence[int], images: Sequence[ImagePatches], image_token: int
) -> ImagePrompt:
    """The prompt whose `token_ids` hold the spans of `images` already, in their order.

    Raises `ImageError` where the image tokens are not exactly those spans.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    is_image = ids == image_token
    at, placed = 0, []
    for image in images:
        behind = np.flatnonzero(is_image[at:])
        here = PlacedImage(at + int(behind[0]) if len(behind) else len(ids), image)
        at = here.stop
        if at > len(ids) or not is_image[here.start : at].all():
            raise ImageError(
                f"image {len(placed)} needs {image.grid.span_tokens} image tokens from token "
                f"{here.start} on; the prompt of {len(ids)} tokens has fewer there"
            )
        placed.append(here)
    if is_image[at:].any():
        extra = int(is_image[at:].sum())
        raise ImageError(f"{extra} image tokens behind the last of {len(images)} images")
    return ImagePrompt(ids, tuple(placed))


def encode_with_images(
    text: str,
    images: Sequence[ImagePatches],
    encode: Callable[[str], Sequence[int]],
    image_token: int,
) -> ImagePrompt:
    """A rendered chat prompt as tokens, each image placeholder as its image's span.

    `encode`: text → token ids, adding none. The placeholder never reaches it: tokenizers spell it
    differently, its id is the config's. Raises `ImageError` where placeholders and images differ in
    number, as they do when a message spells the placeholder out.
    """
    first, *rest = text.split(IMAGE)
    ids = list(encode(first))
    for part in rest:
        ids.append(image_token)
        ids += encode(part)
    return place_images(ids, images, image_token)
