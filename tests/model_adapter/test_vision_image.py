"""Pictures become patches and spans."""

import base64
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from model_adapter.config import ModelConfig, VisionConfig
from model_adapter.errors import ImageError
from model_adapter.vision import (
    TokenType,
    encode_with_images,
    from_patches,
    image_grid,
    image_processor,
    locate_images,
    place_images,
    read_data_url,
    read_image,
)
from model_adapter.vision.span import span_types

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
PICTURE = TINY / "picture.png"
CONFIG = ModelConfig.load(TINY)
VISION = CONFIG.vision
IMAGE = CONFIG.image_token
RELEASED = VisionConfig(
    layers=32,
    hidden=1024,
    heads=16,
    intermediate=2816,
    patch=14,
    rope_theta=1e4,
    downsample=3,
    image_tokens_max=1024,
    pixels_min=295936,
)
SIZES = json.loads((TINY / "image_sizing.json").read_text())["cases"]


def png(picture: Image.Image, **kwargs) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", **kwargs)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("case", SIZES, ids=lambda c: f"{c['width']}x{c['height']}")
def test_golden_size(case):
    grid = image_grid(case["width"], case["height"], RELEASED)
    assert grid.width == case["resized_width"]
    assert grid.height == case["resized_height"]
    assert (grid.vit_rows, grid.vit_cols) == (case["vit_rows"], case["vit_cols"])
    assert (grid.rows, grid.cols) == (case["rows"], case["cols"])


sides = st.integers(1, 100) | st.integers(1, 1 << 20)


@settings(deadline=None)
@given(sides, sides, st.integers(1, 4), st.integers(4, 300), st.sampled_from([None, 1, 8]))
def test_every_picture_has_a_span_within_the_limit(width, height, downsample, limit, wh_ratio):
    config = replace(VISION, downsample=downsample, image_tokens_max=limit, wh_ratio_max=wh_ratio)
    grid = image_grid(width, height, config)
    assert 4 <= grid.span_tokens <= limit
    assert (grid.height, grid.width) == (
        grid.vit_rows * config.patch,
        grid.vit_cols * config.patch,
    )
    assert (grid.rows - 1) * downsample < grid.vit_rows <= grid.rows * downsample
    assert (grid.cols - 1) * downsample < grid.vit_cols <= grid.cols * downsample


@pytest.mark.parametrize("source", [PICTURE, str(PICTURE), PICTURE.read_bytes()])
def test_golden_picture_to_the_bit(source):
    golden = load_file(TINY / "picture.safetensors")
    image = read_image(source, VISION)
    assert [image.grid.vit_rows, image.grid.vit_cols] == golden["grid_hw"].tolist()
    assert image.patches.dtype == torch.bfloat16
    assert torch.equal(image.patches, golden["patches"])


def test_a_data_url_is_its_file():
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    assert read_data_url(url, VISION).digest == read_image(PICTURE, VISION).digest


def test_the_shape_is_kept_on_grey():
    image = read_image(png(Image.new("RGB", (100, 5), "white")), VISION)
    rows = image.patches.unflatten(0, (image.grid.vit_rows, image.grid.vit_cols))
    picture = rows.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
    assert picture.shape == (3, image.grid.height, image.grid.width)
    grey = torch.tensor(127 / 255 * 2 - 1).bfloat16()
    assert torch.all(picture[:, 0] == grey)
    assert torch.all(picture[:, -1] == grey)
    assert torch.all(picture[:, image.grid.height // 2] == 1)


def test_a_picture_beyond_the_ratio_is_stretched():
    config = replace(VISION, wh_ratio_max=2)
    image = read_image(png(Image.new("RGB", (100, 20), "white")), config)
    assert image.grid.vit_cols == 2 * image.grid.vit_rows
    assert torch.all(image.patches == 1)


def test_the_digest_is_of_the_pixels_and_the_grid():
    picture = noise(48, 32)
    digest = read_image(png(picture), VISION).digest
    assert read_image(png(picture, compress_level=1), VISION).digest == digest
    assert read_image(png(picture.convert("RGBA")), VISION).digest == digest
    changed = picture.copy()
    changed.putpixel((47, 31), (0, 0, 0))
    assert read_image(png(changed), VISION).digest != digest
    patches = read_image(png(picture), VISION).patches
    assert from_patches(patches, 8, 12, VISION).digest == digest
    assert from_patches(patches, 12, 8, VISION).digest != digest


def test_the_digest_format():
    patches = torch.arange(48, dtype=torch.float32).reshape(1, 3, 4, 4)
    bf16 = (patches.numpy().view("<u4") >> 16).astype("<u2").tobytes()
    header = b"ds41-kvstore/v1/image\0" + b"\4\0\0\0" + b"\1\0\0\0" + b"\1\0\0\0"
    image = from_patches(patches, 1, 1, VISION)
    assert image.digest == hashlib.sha256(header + bf16).digest()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"", "no picture of PNG, JPEG"),
        (b"GIF89a", "no picture|can't be decoded"),
        (PICTURE.read_bytes()[:200], "can't be decoded"),
        (b"%PDF-1.4 hello", "no picture"),
        (TINY / "missing.png", "missing.png can't be read"),
        (TINY, "tiny-a can't be read"),
    ],
)
def test_unreadable_pictures_are_refused(source, says):
    with pytest.raises(ImageError, match=says):
        read_image(source, VISION)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "file:///etc/passwd",
        "data:image/png,a",
        "/etc/passwd",
        "data:",
    ],
)
def test_only_data_urls_are_taken(url):
    with pytest.raises(ImageError, match="must be data:image"):
        read_data_url(url, VISION)


def test_broken_base64_is_refused():
    with pytest.raises(ImageError, match="not base64"):
        read_data_url("data:image/png;base64,???", VISION)


def test_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(image_processor, "IMAGE_PIXELS_MAX", 1000)
    with pytest.raises(ImageError, match="47×31 pixels is too large"):
        read_image(PICTURE, VISION)
    monkeypatch.setattr(image_processor, "IMAGE_BYTES_MAX", 100)
    for read in (
        lambda: read_image(PICTURE, VISION),
        lambda: read_image(b"x" * 101, VISION),
        lambda: read_data_url("data:image/png;base64," + "A" * 200, VISION),
    ):
        with pytest.raises(ImageError, match="bytes is too large"):
            read()


def test_patches_of_a_wrong_shape_are_refused():
    with pytest.raises(ImageError, match="must have shape"):
        from_patches(torch.zeros(7, 3, 4, 4), 2, 4, VISION)
    with pytest.raises(ImageError, match="64 at most"):
        from_patches(torch.zeros(90 * 90, 3, 4, 4), 90, 90, VISION)


def test_golden_span():
    golden = load_file(TINY / "golden-float32.safetensors")
    rows, cols = golden["image.grid_hw"][0].tolist()
    image = from_patches(golden["image.pixel_values"], rows, cols, VISION)
    ids = golden["image.input_ids"][0].numpy()
    types = golden["image.vision_token_types"][0].numpy()
    prompt = locate_images(ids, [image], IMAGE)
    assert np.array_equal(prompt.token_types(), types)
    assert [(s.start, s.length, s.digest) for s in prompt.spans] == [
        (int(np.argmax(types >= 0)), int((types >= 0).sum()), image.digest)
    ]
    single = ids[(types < 0) | (types == TokenType.START)]
    placed = place_images(single, [image], IMAGE)
    assert np.array_equal(placed.token_ids, ids)
    assert placed.spans == prompt.spans


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 500), max_size=3), st.integers(1, 20))))
def test_placed_images_are_located_again(pieces):
    images = [from_patches(torch.zeros(n, 3, 4, 4), 1, n, VISION) for _, n in pieces]
    single = [token for text, _ in pieces for token in (*text, IMAGE)] + [1]
    placed = place_images(single, images, IMAGE)
    located = locate_images(placed.token_ids, images, IMAGE)
    assert located.spans == placed.spans
    assert (placed.token_ids == IMAGE).sum() == sum(i.grid.span_tokens for i in images)
    for here in placed.images:
        types = placed.token_types()[here.start : here.stop]
        assert np.array_equal(types, span_types(here.image.grid))
    if images:
        with pytest.raises(ImageError):
            locate_images(placed.token_ids, images[:-1], IMAGE)
        with pytest.raises(ImageError):
            locate_images(placed.token_ids[:-2], images, IMAGE)


def test_images_and_placeholders_must_agree():
    image = read_image(PICTURE, VISION)
    with pytest.raises(ImageError, match="2 image placeholders for 1 images"):
        place_images([IMAGE, 5, IMAGE], [image], IMAGE)


def test_a_rendered_prompt_is_encoded_around_its_images():
    image = read_image(PICTURE, VISION)
    text = "ab<｜deepseek_image｜>c<｜deepseek_image｜>"
    prompt = encode_with_images(text, [image, image], lambda t: [ord(c) for c in t], IMAGE)
    n = image.grid.span_tokens
    assert prompt.token_ids.tolist() == [97, 98, *[IMAGE] * n, 99, *[IMAGE] * n]
    assert [s.start for s in prompt.spans] == [2, 3 + n]
