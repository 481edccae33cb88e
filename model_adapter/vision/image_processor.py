"""Pictures to patches: read, resize, pad, normalise, cut (ds41f §2, Vision)."""

import base64
import binascii
import hashlib
import io
import os
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from model_adapter.config import VisionConfig
from model_adapter.errors import ImageError
from model_adapter.vision.sizing import ImageGrid, grid_of_patches, image_grid

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
IMAGE_BYTES_MAX = 32 << 20
IMAGE_PIXELS_MAX = 64 << 20
PAD_COLOUR = (127, 127, 127)
_DIGEST_CONTEXT = b"ds41-kvstore/v1/image\0"


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """A picture as the vision tower takes it.

    `patches`: bfloat16 `[vit_rows · vit_cols, 3, patch, patch]` in [−1, 1], row by row. `digest`:
    32 bytes, SHA-256 of `"ds41-kvstore/v1/image\\0"` ‖ patch, vit_rows, vit_cols as u32le ‖ the
    patches as bf16 little-endian: all that decides the embeddings, the weights aside. Two files
    that show the same pixels have one digest.
    """

    patches: torch.Tensor
    grid: ImageGrid
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.patches, self.grid))


def _digest(patches: torch.Tensor, grid: ImageGrid) -> bytes:
    h = hashlib.sha256(_DIGEST_CONTEXT)
    for number in (patches.shape[-1], grid.vit_rows, grid.vit_cols):
        h.update(number.to_bytes(4, "little"))
    h.update(patches.contiguous().view(torch.int16).numpy().astype("<i2", copy=False).data)
    return h.digest()


def from_patches(
    patches: torch.Tensor, vit_rows: int, vit_cols: int, config: VisionConfig
) -> ImagePatches:
    """Patches cut elsewhere, rounded to bfloat16. Raises `ImageError` on a wrong shape."""
    shape = (vit_rows * vit_cols, 3, config.patch, config.patch)
    if patches.shape != shape:
        raise ImageError(f"patches must have shape {shape}, not {tuple(patches.shape)}")
    grid = grid_of_patches(vit_rows, vit_cols, config)
    if grid.span_tokens > config.image_tokens_max:
        raise ImageError(
            f"{vit_rows}×{vit_cols} patches make {grid.span_tokens} tokens; "
            f"an image has {config.image_tokens_max} at most"
        )
    return ImagePatches(patches.to(torch.bfloat16), grid)


def read_image(source: bytes | str | os.PathLike[str], config: VisionConfig) -> ImagePatches:
    """The patches of a picture: its bytes, or the path of its file.

    Of an animation the first frame; transparency is dropped, not blended; the orientation tag is
    not applied. Raises `ImageError` for a file that is unreadable, no picture of `FORMATS`, or
    larger than `IMAGE_BYTES_MAX` or `IMAGE_PIXELS_MAX`.
    """
    data = source if isinstance(source, bytes) else _read_file(source)
    _check_bytes(len(data))
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > IMAGE_PIXELS_MAX:
                raise ImageError(
                    f"a picture of {picture.width}×{picture.height} pixels is too large; "
                    f"{IMAGE_PIXELS_MAX} pixels at most"
                )
            rgb = picture.convert("RGB")
    except UnidentifiedImageError as e:
        raise ImageError(f"{len(data)} bytes are no picture of {', '.join(FORMATS)}") from e
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        raise ImageError(f"the picture can't be decoded: {e}") from e
    return cut(rgb, config)


def read_data_url(url: str, config: VisionConfig) -> ImagePatches:
    """The patches of a picture in a `data:…;base64,` URL, as a chat message carries it.

    Nothing is fetched and no file is opened for a URL. Raises `ImageError`, also for other URLs.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise ImageError(f"an image URL must be data:image/…;base64,… and not {head[:60]!r}")
    _check_bytes(len(body) * 3 // 4)
    try:
        return read_image(base64.b64decode(body, validate=True), config)
    except binascii.Error as e:
        raise ImageError(f"the data URL is not base64: {e}") from e


def cut(picture: Image.Image, config: VisionConfig) -> ImagePatches:
    """The patches of an RGB picture.

    It keeps its shape and is centred on grey; one that passes `wh_ratio_max` is stretched instead.
    """
    grid = image_grid(picture.width, picture.height, config)
    size = (grid.width, grid.height)
    bicubic = Image.Resampling.BICUBIC
    ratio = config.wh_ratio_max
    if ratio is not None and picture.width >= ratio * picture.height:
        resized = picture.resize(size, bicubic)
    else:
        resized = ImageOps.pad(picture, size, bicubic, color=PAD_COLOUR)
    pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32)) / 255
    p = config.patch
    patches = pixels.reshape(grid.vit_rows, p, grid.vit_cols, p, 3).permute(0, 2, 4, 1, 3)
    patches = ((patches - 0.5) / 0.5).to(torch.bfloat16)
    return ImagePatches(patches.reshape(-1, 3, p, p).contiguous(), grid)


def _read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        _check_bytes(os.stat(path).st_size)
        with open(path, "rb") as file:
            return file.read(IMAGE_BYTES_MAX + 1)
    except OSError as e:
        raise ImageError(f"{os.fspath(path)} can't be read: {e.strerror}") from e


def _check_bytes(size: int) -> None:
    if size > IMAGE_BYTES_MAX:
        raise ImageError(f"a picture of {size} bytes is too large; {IMAGE_BYTES_MAX} at most")
