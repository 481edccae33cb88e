"""A checkpoint with many experts, and a program that runs it within a bound on its memory.

As a program: `large_weights.py CHECKPOINT WEIGHT_CACHE_BYTES GROWTH_BYTES`. Behind loading, the
process may grow by so much and no more: RLIMIT_DATA counts private memory that is not a file's.
Mapped shards don't count: the kernel reads their pages as they are touched and drops them when
memory is wanted for something else. Prints one JSON object.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from model_adapter.make_checkpoint import MadeCheckpoint, write_checkpoint
from model_adapter.model import Model
from model_adapter.presets import preset_config

PROMPT_TOKENS = 96
DECODED_TOKENS = 8


def make(directory: Path, experts: int = 96) -> MadeCheckpoint:
    """A `tiny` with many wider experts: nearly all of its weights are theirs."""
    config = preset_config("tiny")
    config["text_config"] |= {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": experts,
        "num_experts_per_tok": 6,
    }
    return write_checkpoint(config, 0, directory)


def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(11, 400, PROMPT_TOKENS)


def status_bytes(name: str) -> int:
    """A field of /proc/self/status, such as VmData or RssAnon."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def run(checkpoint: Path, weight_cache_bytes: int, growth_bytes: int) -> dict[str, object]:
    """Prefill and decode under the limit; peaks are sampled at every block's entry."""
    torch.set_num_threads(1)
    model = Model.load(checkpoint, weight_cache_bytes_max=weight_cache_bytes)
    before = {name: status_bytes(name) for name in ("RssAnon", "RssFile")}
    limit = status_bytes("VmData") + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    anonymous, mapped = 0, 0

    def observe(stage: str, layer: int, tensor: torch.Tensor) -> None:
        nonlocal anonymous, mapped
        anonymous = max(anonymous, status_bytes("RssAnon") - before["RssAnon"])
        mapped = max(mapped, status_bytes("RssFile") - before["RssFile"])

    cache = model.new_cache()
    logits = model.prefill(cache, prompt(), "exact", observer=observe)
    tokens = []
    for _ in range(DECODED_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = model.decode(cache, tokens[-1], observer=observe)
    return {
        "tokens": tokens,
        "logits": logits[:8].tolist(),
        "anonymous_bytes_max": anonymous,
        "mapped_bytes_max": mapped,
        "cached_bytes": model.weights.cached_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
