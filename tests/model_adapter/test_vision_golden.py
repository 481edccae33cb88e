"""Images through the whole model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvstore import block_keys, snapshot_key
from model_adapter.errors import ImageError
from model_adapter.model import Model
from model_adapter.vision import VisionEncoder, from_patches, locate_images, place_images

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
BLOCK = 4


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(TINY)


@pytest.fixture(scope="module")
def golden() -> dict:
    return load_file(TINY / "golden-float32.safetensors")


def encoder_of(model: Model) -> VisionEncoder:
    return VisionEncoder.of(model.config, model.weights)


def golden_prompt(model: Model, golden: dict):
    rows, cols = golden["image.grid_hw"][0].tolist()
    image = from_patches(golden["image.pixel_values"], rows, cols, model.config.vision)
    return locate_images(golden["image.input_ids"][0].numpy(), [image], model.config.image_token)


def prompt_with(model: Model, *seeds: int):
    """20 tokens of text, an image per seed with 10 tokens behind it, and 12 more."""
    rng = np.random.default_rng(7)
    text = [rng.integers(5, 500, n) for n in (20, *[10] * len(seeds), 12)]
    single = list(text[0])
    images = []
    for seed, behind in zip(seeds, text[1:], strict=False):
        noise = torch.randn(63, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        images.append(from_patches(noise, 7, 9, model.config.vision))
        single += [model.config.image_token, *behind]
    return place_images([*single, *text[-1]], images, model.config.image_token)


def run(model: Model, prompt, **kwargs) -> tuple[torch.Tensor, object]:
    rows = encoder_of(model).rows(prompt.images, 0, len(prompt.token_ids)).rows
    cache = model.new_cache()
    logits = model.prefill_all_logits(cache, prompt.token_ids, image_embeddings=rows, **kwargs)
    return logits, cache


def test_golden_image_logits(model, golden):
    logits, _ = run(model, golden_prompt(model, golden))
    torch.testing.assert_close(logits, golden["image.logits"][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [3, 25])
def test_chunks_may_cut_an_image(model, golden, chunk_tokens):
    logits, _ = run(model, golden_prompt(model, golden), chunk_tokens=chunk_tokens)
    torch.testing.assert_close(logits, golden["image.logits"][0], atol=1e-4, rtol=0)


def test_only_what_follows_an_image_depends_on_it(model):
    one, _ = run(model, prompt_with(model, 1, 2))
    other, _ = run(model, prompt_with(model, 1, 3))
    second = prompt_with(model, 1, 2).images[1].start
    torch.testing.assert_close(one[:second], other[:second], atol=1e-4, rtol=0)
    assert (one[second] - other[second]).abs().max() < 1e-4  # START is the same learned vector
    assert (one[second + 1 :] - other[second + 1 :]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("hit", [40, 24, 60])
def test_a_replay_over_images_does_not_care_where_their_embeddings_come_from(model, hit):
    prompt = prompt_with(model, 1, 2)
    assert any(i.start < hit and hit - model.config.window < i.stop for i in prompt.images)
    _, full = run(model, prompt)

    def resumed(rows: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache()
        for i in range(hit // BLOCK):
            cache.load_block(i, BLOCK, full.block_sections(i, BLOCK))
        return model.resume(cache, prompt.token_ids, hit, image_embeddings=rows)

    kept = encoder_of(model)
    where = (hit - model.config.window, len(prompt.token_ids))
    first = resumed(kept.rows(prompt.images, *where).rows)
    assert torch.equal(resumed(kept.rows(prompt.images, *where).rows), first)
    assert torch.equal(resumed(encoder_of(model).rows(prompt.images, *where).rows), first)


def test_prompts_that_differ_in_pixels_share_no_block_from_the_image_on(model):
    a, same, other = prompt_with(model, 1, 2), prompt_with(model, 1, 2), prompt_with(model, 1, 3)
    assert np.array_equal(a.token_ids, other.token_ids)

    def keys(prompt) -> list[bytes]:
        return block_keys(bytes(32), prompt.token_ids, BLOCK, prompt.spans)

    assert keys(a) == keys(same)
    first = a.images[1].start // BLOCK
    assert keys(a)[:first] == keys(other)[:first]
    assert not set(keys(a)[first:]) & set(keys(other)[first:])
    tails = [
        snapshot_key(bytes(32), p.token_ids[40:], start=40, images=p.spans)
        for p in (a, same, other)
    ]
    assert tails[0] == tails[1] != tails[2]


def test_a_checkpoint_without_vision_says_so(model):
    config = replace(model.config, vision=None)
    with pytest.raises(ImageError, match="no vision part"):
        VisionEncoder.of(config, model.weights)
