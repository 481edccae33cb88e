"""Prompts with pictures of random pixels, for the tiny model."""

import io

import numpy as np
import tiny_checkpoint as tiny
import torch
from PIL import Image

from model_adapter.vision import ImagePrompt, VisionEncoder, place_images, read_image

START = 40
"""Where the image begins: within the second block."""
IMAGE_TOKEN = 511


def picture(seed: int, form: str = "PNG", **options) -> bytes:
    """84 × 72 random pixels, which make a span of 51 tokens: 7 rows of 6, and the marks."""
    pixels = np.random.default_rng(seed).integers(0, 256, (84, 72, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def prompt(pictures: list[bytes], *texts: int) -> ImagePrompt:
    """Text of so many tokens before, between and behind the pictures; a longer one begins like a
    shorter one."""
    images = [read_image(data, tiny.model().config.vision) for data in pictures]
    ids: list[int] = []
    for i, length in enumerate(texts):
        ids += tiny.prompt(length, seed=i).tolist()
        ids += [IMAGE_TOKEN] * (i < len(images))
    return place_images(ids, images, IMAGE_TOKEN)


def embeddings(prompt: ImagePrompt, start: int = 0) -> torch.Tensor:
    """Of the image tokens from position `start` on."""
    encoder = VisionEncoder.of(tiny.model().config, tiny.model().weights)
    return encoder.rows(prompt.images, start, len(prompt.token_ids)).rows
