"""The draft layers against their definition and the golden draft."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafting import drafter, prefilled, prompt_tokens
from golden_model import DIRECTORY, config, error, model, vector
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_adapter import records
from model_adapter.config import ModelConfig
from model_adapter.dspark import (
    Drafter,
    DraftWindows,
    FeatureTap,
    SequenceDrafts,
    verify_count,
)
from model_adapter.errors import ConfigError, InputError
from model_adapter.golden import Status, check_golden
from model_adapter.model import Model

WINDOW = config().window
BLOCK = config().dspark.block_size


def windows_of(features: torch.Tensor, first: int = 0) -> DraftWindows:
    windows = DraftWindows(config())
    windows.restart(first)
    with torch.inference_mode():
        drafter(model()).extend(windows, features)
    return windows


def golden_windows() -> DraftWindows:
    return windows_of(vector("dspark.target_features"))


def golden_draft():
    return drafter(model()).draft(golden_windows(), int(vector("dspark.anchor_token")))


def features_of(prompt, mode="exact", **options) -> torch.Tensor:
    tap = FeatureTap(config().dspark, 1000)
    model().prefill(model().new_cache(), prompt, mode, observer=tap, **options)
    return tap.take()


def test_golden_draft():
    """The tokens; how near the numbers are is `check-golden`'s (test_golden)."""
    assert golden_draft().tokens == tuple(vector("dspark.draft_tokens").tolist())


def test_golden_features():
    features = features_of(vector("greedy.prompt_ids"))
    assert error(features, vector("dspark.target_features")) < 1e-5


def test_chunks_show_the_same_features():
    prompt = vector("greedy.prompt_ids")
    assert error(features_of(prompt, chunk_tokens=9), features_of(prompt)) < 1e-4


def test_a_bounded_prefill_shows_the_last_window():
    prompt = np.arange(5, 105)
    assert len(features_of(prompt, "bounded")) == WINDOW


def test_a_tap_keeps_the_last_positions_and_is_emptied_by_taking():
    tap = FeatureTap(config().dspark, 3)
    streams = torch.arange(2 * 4.0 * 8).reshape(2, 4, 8)
    assert tap.take() is None
    for _ in range(2):
        for layer in (6, *config().dspark.target_layers):
            tap("attention_streams", layer, streams + layer)
            tap("streams_in", layer, streams)
    taken = tap.take()
    assert taken.shape == (3, 24)
    expected = torch.cat([streams.mean(1) + layer for layer in (7, 8, 9)], dim=1)
    assert torch.equal(taken, torch.cat([expected, expected])[-3:])
    assert tap.take() is None


def test_a_draft_sees_the_features_of_one_window_and_no_more():
    features = vector("dspark.target_features")
    whole = golden_draft()
    older, inside = features.clone(), features.clone()
    older[: len(features) - WINDOW] += 1
    inside[len(features) - WINDOW] += 1
    anchor = int(vector("dspark.anchor_token"))
    same = drafter(model()).draft(windows_of(older), anchor)
    other = drafter(model()).draft(windows_of(inside), anchor)
    assert torch.equal(same.base_logits, whole.base_logits)
    assert (other.base_logits - whole.base_logits).abs().amax(1).min() > 1e-4


def test_windows_are_packed_records_of_the_last_positions():
    windows = golden_windows()
    assert windows.end == 40
    for layer in range(config().dspark.layers):
        rows = windows.visible(layer)
        assert rows.shape == (WINDOW, config().window_row_bytes)
        assert rows.dtype == torch.uint8
    values = drafter(model()).window_values(vector("dspark.target_features"), 0)
    packed = records.pack(records.WINDOW, values[1])
    assert np.array_equal(windows.visible(1), packed[-WINDOW:])


def test_windows_can_be_taken_elsewhere():
    here = golden_windows()
    there = DraftWindows(config())
    there.restart(here.end - WINDOW)
    for number, rows in enumerate(there.layers):
        rows.append(here.visible(number).clone())
    draft = drafter(model()).draft(there, int(vector("dspark.anchor_token")))
    assert torch.equal(draft.logits, golden_draft().logits)


def test_every_position_of_a_block_sees_the_anchor():
    one, other = (drafter(model()).draft(golden_windows(), token) for token in (205, 206))
    assert (one.base_logits - other.base_logits).abs().amax(1).min() > 1e-4


def tensor(name: str) -> torch.Tensor:
    shard = json.loads((DIRECTORY / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(DIRECTORY / shard, "pt") as file:
        return file.get_tensor(name).float()


def test_the_markov_head_adds_what_the_token_before_suggests():
    draft = golden_draft()
    embed = tensor("mtp.1.markov_head.embed.weight")
    head = tensor("mtp.1.markov_head.head.weight")
    before = [int(vector("dspark.anchor_token")), *draft.tokens[:-1]]
    term = embed[before] @ head.T
    torch.testing.assert_close(draft.logits - draft.base_logits, term, atol=1e-5, rtol=1e-4)
    assert term.abs().amax(1).min() > 0.1


def test_banned_tokens_are_not_guessed_nor_followed():
    free = golden_draft()
    banned = {free.tokens[0]}
    draft = drafter(model()).draft(golden_windows(), 205, banned)
    assert not banned & set(draft.tokens)
    assert torch.equal(draft.logits[0], free.logits[0])
    assert draft.tokens[0] == int(free.logits[0].topk(2).indices[1])
    assert not torch.equal(draft.logits[1], free.logits[1])


@pytest.mark.parametrize(
    ("threshold", "count"),
    [(0.0, 4), (0.06, 4), (0.07, 3), (0.12, 3), (0.13, 2), (0.4, 2), (0.41, 1), (0.6, 0), (1.1, 0)],
)
def test_verified_is_the_prefix_that_stands_with_the_threshold(threshold, count):
    assert verify_count(torch.tensor([0.5, 0.8, 0.3, 0.5]), threshold) == count


def test_confidences_and_limits_bound_a_proposal():
    anchor = int(vector("dspark.anchor_token"))

    def proposal(threshold: float, limit: int) -> tuple[int, ...]:
        drafts = SequenceDrafts(drafter(model()), threshold)
        cache, _ = prefilled(model(), vector("greedy.prompt_ids"), drafts, "exact")
        drafts.take_up(cache.length)
        return drafts.propose(anchor, limit, ())

    tokens = tuple(vector("dspark.draft_tokens").tolist())
    assert proposal(0.0, 99) == tokens
    assert proposal(0.0, 2) == tokens[:2]
    assert proposal(0.0, 0) == ()
    confidences = vector("dspark.confidence")
    assert proposal(float(confidences[0]) * 0.999, 99) == tokens[:1]
    assert proposal(float(confidences[0]) * 1.001, 99) == ()


def test_positions_that_nobody_observed_are_missing():
    drafts = SequenceDrafts(drafter(model()), 0.0)
    cache, _ = prefilled(model(), prompt_tokens(1), drafts)
    drafts.take_up(cache.length)
    first = len(drafts.windows.visible(0))
    model().prefill(cache, [5, 6, 7], "exact")
    drafts.take_up(cache.length)
    assert first
    assert (drafts.windows.end, len(drafts.windows.visible(0))) == (cache.length, 0)
    model().decode(cache, 8, observer=drafts.observer)
    drafts.take_up(cache.length)
    assert (drafts.windows.end, len(drafts.windows.visible(0))) == (cache.length, 1)
    assert len(drafts.propose(9, 99, ())) == BLOCK


def test_a_resumed_prompt_has_features_of_its_last_window():
    prompt = np.arange(5, 85)
    source, cache = model().new_cache(), model().new_cache()
    model().prefill(source, prompt)
    cache.load_block(0, 40, source.block_sections(0, 40))
    drafts = SequenceDrafts(drafter(model()))
    model().resume(cache, prompt, 40, observer=drafts.observer)
    drafts.take_up(cache.length)
    assert (drafts.windows.end, len(drafts.windows.visible(0))) == (80, WINDOW)


def test_a_model_without_draft_layers_says_so():
    bare = Model(replace(config(), dspark=None), model().weights, None)
    with pytest.raises(InputError, match="no draft layers"):
        Drafter(bare)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dspark_target_layer_ids", [7, 8, 10]),
        ("dspark_target_layer_ids", []),
        ("dspark_target_layer_ids", [8, 7]),
        ("dspark_noise_token_id", 512),
        ("dspark_num_experts_per_tok", 5),
    ],
)
def test_a_draft_config_that_can_not_be_is_refused(key, value):
    raw = json.loads((DIRECTORY / "config.json").read_text())
    raw["text_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict(raw)


def test_a_threshold_below_zero_is_refused():
    with pytest.raises(InputError, match="verify_threshold"):
        SequenceDrafts(drafter(model()), -0.1)


@pytest.fixture
def altered(tmp_path):
    """check_golden's results by key, on vectors that differ in one key."""

    def check(key: str, change) -> dict:
        vectors = load_file(DIRECTORY / "golden-float32.safetensors")
        kept = {k: v for k, v in vectors.items() if k.startswith(("dspark.", "greedy.prompt"))}
        kept[key] = change(kept[key])
        for file in DIRECTORY.iterdir():
            if not file.name.startswith("golden-"):
                shutil.copy(file, tmp_path)
        save_file(kept, tmp_path / "golden-float32.safetensors")
        return {r.key: r for r in check_golden(tmp_path).results}

    return check


def test_a_wrong_golden_draft_fails(altered):
    results = altered("dspark.base_logits", lambda t: t * 1.001)
    assert results["draft: dspark.base_logits"].status is Status.FAIL
    assert results["draft: dspark.draft_logits"].status is Status.OK


def test_features_that_differ_by_more_than_rounding_excuse_nothing(altered):
    results = altered("dspark.target_features", lambda t: t + 1e-3 * t.roll(1, -1))
    assert results["dspark.target_features"].status is Status.FAIL
    assert results["draft: dspark.base_logits"].status is Status.FAIL
    assert results["dspark.base_logits"].tolerance == 1e-4
