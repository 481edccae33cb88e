"""The vision transformer: patches to patch features (ds41f §2, Vision)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as fn

from model_adapter.config import VisionConfig

NORM_EPS = 1e-6

GetWeight = Callable[[str, torch.dtype], Tensor]
"""A tensor of the checkpoint by its name on disk, in a dtype (`Weights.vector`)."""


class VisionTower:
    """The ViT. It asks for each weight when it needs it, so memory is the getter's to bound."""

    def __init__(self, config: VisionConfig, weight: GetWeight, dtype: torch.dtype) -> None:
        self.config = config
        self.weight = weight
        self.dtype = dtype

    def __call__(self, patches: Tensor, vit_rows: int, vit_cols: int) -> Tensor:
        """Features of one image's patches: `[N, 3, patch, patch]` → `[N, hidden]` in `dtype`.

        N = `vit_rows` · `vit_cols`, row by row; every patch attends to every other.
        """
        x = self._linear("vision.patch_embed.proj", patches.flatten(1).to(self.dtype))
        rotation = self._rotation(vit_rows, vit_cols, x.device)
        for b in range(self.config.layers):
            at = f"vision.blocks.{b}"
            x = x + self._attention(f"{at}.attn", self._norm(f"{at}.norm1", x), rotation)
            x = x + self._mlp(f"{at}.mlp", self._norm(f"{at}.norm2", x))
        return self._norm("vision.norm", x)

    def _linear(self, name: str, x: Tensor, *, bias: bool = True) -> Tensor:
        offset = self.weight(f"{name}.bias", self.dtype) if bias else None
        return fn.linear(x, self.weight(f"{name}.weight", self.dtype), offset)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weight(f"{name}.weight", torch.float32)
        return fn.rms_norm(x.float(), weight.shape, weight, NORM_EPS).to(x.dtype)

    def _attention(self, at: str, x: Tensor, rotation: Tensor) -> Tensor:
        qkv = self._linear(f"{at}.wqkv", x)
        q, k, v = qkv.unflatten(-1, (3, self.config.heads, -1)).permute(1, 2, 0, 3)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        # A batch of one: without it the CPU kernel that never holds the N × N scores is not taken.
        y = fn.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self._linear(f"{at}.wo", y.transpose(0, 1).flatten(1))

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{at}.w1", x, bias=False).chunk(2, dim=-1)
        return self._linear(f"{at}.w2", fn.silu(gate) * up, bias=False)

    def _rotation(self, vit_rows: int, vit_cols: int, device: torch.device) -> Tensor:
        """cos and sin of every patch's angles, fp32 `[2, N, head width / 2]`."""
        d = self.config.hidden // self.config.heads // 2
        channels = torch.arange(0, d, 2, dtype=torch.float32, device=device)
        frequencies = self.config.rope_theta ** -(channels / d)
        rows = torch.arange(vit_rows, device=device).repeat_interleave(vit_cols)
        cols = torch.arange(vit_cols, device=device).repeat(vit_rows)
        angles = torch.cat([torch.outer(rows, frequencies), torch.outer(cols, frequencies)], dim=1)
        return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the first half of each head with the second, `[heads, N, head width]`, in fp32."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
