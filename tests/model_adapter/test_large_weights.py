"""A checkpoint several times larger than what may be dequantised at once runs in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import large_weights
import pytest
import tiny_checkpoint as tiny

from model_adapter.cli import app
from model_adapter.commands.run_generate import parse_bytes
from model_adapter.errors import InputError
from model_adapter.generate import greedy
from model_adapter.model import Model

MIB = 1 << 20
WEIGHT_CACHE_BYTES = 12 * MIB
GROWTH_BYTES = WEIGHT_CACHE_BYTES + 44 * MIB
"""The setting, and what activations, caches and the allocator's slack may take beside it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    made = large_weights.make(path)
    assert made.tensor_bytes > 7 * WEIGHT_CACHE_BYTES
    assert made.tensor_bytes > 1.3 * GROWTH_BYTES
    assert 4 * made.parameters > 45 * WEIGHT_CACHE_BYTES
    return path


def run_limited(checkpoint: Path, weight_cache_bytes: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(checkpoint), str(weight_cache_bytes), str(GROWTH_BYTES)]
    command = [sys.executable, large_weights.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_experts_are_dequantised_by_demand_in_bounded_memory(checkpoint):
    done = run_limited(checkpoint, WEIGHT_CACHE_BYTES)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 0.9 * WEIGHT_CACHE_BYTES < report["cached_bytes"] <= WEIGHT_CACHE_BYTES
    assert report["anonymous_bytes_max"] < GROWTH_BYTES
    # the shards were read, though: their pages are the kernel's to keep or drop
    assert report["mapped_bytes_max"] > GROWTH_BYTES

    model = Model.load(checkpoint)
    cache = model.new_cache()
    logits = model.prefill(cache, large_weights.prompt(), "exact")
    assert list(greedy(model, cache, logits, len(report["tokens"]))) == report["tokens"]
    assert model.weights.cached_bytes > 5 * GROWTH_BYTES


def test_without_the_setting_the_same_limit_is_too_small(checkpoint):
    done = run_limited(checkpoint, 1024 * MIB)
    assert done.returncode != 0
    assert "can't allocate memory" in done.stderr or "MemoryError" in done.stderr


def test_the_command_takes_the_setting(tmp_path, monkeypatch, capsys):
    seen = []
    load = Model.load.__func__

    def watched(cls, *arguments):
        seen.append(load(cls, *arguments))
        return seen[-1]

    monkeypatch.setattr(Model, "load", classmethod(watched))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Which experts does this prompt want?")
    command = ["generate", "--checkpoint", str(tiny.checkpoint()), "--prompt-file", str(prompt)]
    answers = []
    for setting in ([], ["--weight-cache", "200KiB"]):
        app([*command, "--max-tokens", "3", *setting], standalone_mode=False)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    default, small = (model.weights for model in seen)
    assert default.cache_bytes_max == 4 << 30
    assert small.cached_bytes <= small.cache_bytes_max == 200 << 10
    assert default.cached_bytes > 200 << 10


@pytest.mark.parametrize("text", ["much", "-1", "4 giblets", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match=f"'{text}' is no size in bytes; write 512MiB"):
        parse_bytes(text)
