"""Images: read, cut, embedded, and placed among the tokens (ds41f §2, Vision)."""

from model_adapter.vision.encoder import ImageRows, VisionEncoder
from model_adapter.vision.image_processor import (
    ImagePatches,
    from_patches,
    read_data_url,
    read_image,
)
from model_adapter.vision.sizing import ImageGrid, image_grid
from model_adapter.vision.span import (
    ImagePrompt,
    PlacedImage,
    TokenType,
    encode_with_images,
    locate_images,
    place_images,
)

__all__ = [
    "ImageGrid",
    "ImagePatches",
    "ImagePrompt",
    "ImageRows",
    "PlacedImage",
    "TokenType",
    "VisionEncoder",
    "encode_with_images",
    "from_patches",
    "image_grid",
    "locate_images",
    "place_images",
    "read_data_url",
    "read_image",
]
