"""The comparison of a prompt with an image: span, encoder and the whole network."""

from collections.abc import Iterator

import torch

from model_adapter.errors import GoldenError
from model_adapter.golden.end_to_end import Comparison
from model_adapter.golden.result import Result
from model_adapter.vision import VisionEncoder, from_patches, locate_images


def image_prompt(c: Comparison) -> Iterator[Result]:
    """Exact forward over the prompt, and what each of its tokens is."""
    config = c.model.config
    if "image.input_ids" not in c.vectors:
        return
    if config.vision is None or config.image_token is None:
        raise GoldenError(f"{c.vectors.path} has an image, the checkpoint no vision part")
    ids = c.vectors.get("image.input_ids")
    rows, columns = c.vectors.get("image.grid_hw").tolist()
    patches = c.vectors.get("image.pixel_values")
    image = from_patches(patches, rows, columns, config.vision)
    prompt = locate_images(ids.numpy(), [image], config.image_token)
    if "image.vision_token_types" in c.vectors:
        types = torch.from_numpy(prompt.token_types())
        yield c.equal("image.vision_token_types", types, always=True)
    embedded = VisionEncoder.of(config, c.model.weights).rows(prompt.images, 0, len(ids))
    assert embedded is not None
    logits = c.model.prefill_all_logits(
        c.model.new_cache(), ids, len(ids), image_embeddings=embedded.rows
    )
    yield c.relative("image.logits", logits)
