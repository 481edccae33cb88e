"""The golden checkpoint, once per test process."""

from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from model_adapter.config import ModelConfig
from model_adapter.model import Model

DIRECTORY = Path(__file__).parents[1] / "golden" / "tiny-a"


@cache
def model(dtype: torch.dtype = torch.float32) -> Model:
    return Model.load(DIRECTORY, dtype)


@cache
def config() -> ModelConfig:
    return ModelConfig.load(DIRECTORY)


@cache
def vector(key: str) -> torch.Tensor:
    """A float32 golden vector without its batch axis."""
    with safe_open(DIRECTORY / "golden-float32.safetensors", "pt") as file:
        return file.get_tensor(key)[0]


def error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """‖a−b‖/‖b‖."""
    return float((mine - theirs).norm() / theirs.norm())
