"""The tower and the aligner compute what ds41f §2 says, here written out number by number."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_adapter.config import ModelConfig
from model_adapter.vision import PlacedImage, TokenType, VisionEncoder, from_patches, read_image
from model_adapter.vision.span import span_types
from model_adapter.vision.tower import VisionTower

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
CONFIG = ModelConfig.load(TINY)
VISION = CONFIG.vision
TENSORS = {k: v for f in TINY.glob("model-*.safetensors") for k, v in load_file(f).items()}


def weight(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return TENSORS[name].to(dtype)


def encoder(**kwargs) -> VisionEncoder:
    return VisionEncoder(VISION, weight, torch.float32, **kwargs)


def picture(vit_rows: int, vit_cols: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    patches = torch.randn(vit_rows * vit_cols, 3, VISION.patch, VISION.patch, generator=rng)
    return from_patches(patches, vit_rows, vit_cols, VISION)


def norm(x: torch.Tensor, name: str) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight(f"{name}.weight")


def linear(x: torch.Tensor, name: str) -> torch.Tensor:
    y = x @ weight(f"{name}.weight").T
    return y + weight(f"{name}.bias") if f"{name}.bias" in TENSORS else y


def turn(head: torch.Tensor, row: int, col: int) -> torch.Tensor:
    """One head of one patch: channel i with channel i + half, by the row, then by the column."""
    half = len(head) // 2
    out = head.clone()
    for i in range(half):
        place, step = (row, i) if i < half // 2 else (col, i - half // 2)
        angle = place * VISION.rope_theta ** (-2 * step / half)
        a, b = head[i], head[half + i]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[half + i] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(x: torch.Tensor, at: str, vit_cols: int) -> torch.Tensor:
    q, k, v = linear(x, f"{at}.wqkv").split(VISION.hidden, dim=1)
    out = torch.empty_like(x)
    width = VISION.hidden // VISION.heads
    for h in range(VISION.heads):
        part = slice(h * width, (h + 1) * width)
        qs, ks = (
            torch.stack([turn(t[n, part], n // vit_cols, n % vit_cols) for n in range(len(x))])
            for t in (q, k)
        )
        out[:, part] = (qs @ ks.T / math.sqrt(width)).softmax(1) @ v[:, part]
    return linear(out, f"{at}.wo")


def tower(patches: torch.Tensor, vit_cols: int) -> torch.Tensor:
    x = linear(patches.double().flatten(1), "vision.patch_embed.proj")
    for b in range(VISION.layers):
        at = f"vision.blocks.{b}"
        x = x + attention(norm(x, f"{at}.norm1"), f"{at}.attn", vit_cols)
        gate, up = linear(norm(x, f"{at}.norm2"), f"{at}.mlp.w1").split(VISION.intermediate, dim=1)
        x = x + linear(gate * gate.sigmoid() * up, f"{at}.mlp.w2")
    return norm(x, "vision.norm")


def aligned(features: torch.Tensor, vit_rows: int, vit_cols: int) -> dict:
    """Image token (row, column) → its embedding."""
    r, found = VISION.downsample, {}
    for row in range(math.ceil(vit_rows / r)):
        for col in range(math.ceil(vit_cols / r)):
            cell = torch.zeros(VISION.hidden, r, r, dtype=torch.float64)
            for dy in range(min(r, vit_rows - row * r)):
                for dx in range(min(r, vit_cols - col * r)):
                    cell[:, dy, dx] = features[(row * r + dy) * vit_cols + col * r + dx]
            x = linear(cell.flatten(), "aligner.w1")
            x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
            found[row, col] = linear(x, "aligner.w2")
    return found


@pytest.mark.parametrize(("vit_rows", "vit_cols"), [(1, 1), (7, 9), (4, 5), (2, 12)])
def test_an_images_span(vit_rows, vit_cols):
    image = picture(vit_rows, vit_cols)
    got = encoder().embed(image)
    tokens = aligned(tower(image.patches, vit_cols), vit_rows, vit_cols)
    marks = {
        TokenType.START: weight("image_start"),
        TokenType.NEWLINE: weight("image_newline"),
        TokenType.END: weight("image_end"),
    }
    places = iter(sorted(tokens))
    want = [
        tokens[next(places)] if kind == TokenType.IMAGE else marks[TokenType(kind)]
        for kind in span_types(image.grid)
    ]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.stack(want), atol=2e-5, rtol=2e-5)


def test_bfloat16_is_close():
    image = read_image(TINY / "picture.png", VISION)
    low = VisionEncoder(VISION, weight, torch.bfloat16).embed(image)
    assert low.dtype == torch.bfloat16
    high = encoder().embed(image)
    assert (low.float() - high).abs().max() < 0.05 * high.abs().max()


def test_rows_of_any_range_are_slices_of_the_spans():
    first, second = picture(7, 9), picture(3, 3, seed=1)
    a, b = PlacedImage(5, first), PlacedImage(30, second)
    vision = encoder()
    whole = vision.rows([a, b], 0, 50)
    assert whole.mask.sum() == len(whole.rows) == first.grid.span_tokens + second.grid.span_tokens
    for start, stop in [(0, 50), (5, 19), (0, 6), (18, 31), (10, 12), (33, 50)]:
        part = vision.rows([a, b], start, stop)
        assert torch.equal(part.mask, whole.mask[start:stop])
        before = int(whole.mask[:start].sum())
        assert torch.equal(part.rows, whole.rows[before : before + len(part.rows)])
    assert vision.rows([a, b], 0, 5) is None
    assert vision.rows([a, b], 19, 30) is None
    assert vision.rows([], 0, 50) is None


def test_embeddings_are_kept_within_the_limit_and_the_same_anew(monkeypatch):
    computed = []
    run = VisionTower.__call__

    def counted(self, patches, *grid):
        computed.append(grid)
        return run(self, patches, *grid)

    monkeypatch.setattr(VisionTower, "__call__", counted)
    vision = encoder(images_kept_max=2)
    one, two, three = (picture(3, 3, seed) for seed in range(3))
    first = vision.embed(one)
    vision.embed(two)
    assert vision.embed(picture(3, 3, seed=0)) is first
    vision.embed(three)
    vision.embed(one)
    assert len(computed) == 3
    vision.embed(two)
    assert len(computed) == 4
    vision.embed(three)
    assert torch.equal(vision.embed(one), first)
