"""Speculative decoding gives the tokens and leaves the caches of plain decoding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_bytes import assert_same, cache_bytes, draft_bytes
from drafting import Coached, drafter, plain_answer, prefilled, prompt_tokens
from golden_model import model as golden_model
from tiny_checkpoint import model as tiny_model

from model_adapter.decoding import SamplingParams, SpeculationStats, generate
from model_adapter.dspark import DraftWindows, SequenceDrafts
from model_adapter.few_rows import FEW_ROWS_MAX
from model_adapter.model import Model

MODELS = {"golden": golden_model, "tiny": tiny_model}
PROMPTS = 27
TOKENS = 8


def drafted_answer(model: Model, prompt, params, drafts: SequenceDrafts, stop_ids=(), stats=None):
    """Tokens and cache of decoding with drafts."""
    cache, logits = prefilled(model, prompt, drafts)
    stream = generate(model, cache, logits, params, stop_ids, drafts, stats=stats)
    return list(stream), cache


def observed_windows(model: Model, prompt, tokens) -> DraftWindows:
    """The draft layers' windows after plain decoding that they watched."""
    drafts = SequenceDrafts(drafter(model))
    cache, _ = prefilled(model, prompt, drafts)
    drafts.take_up(cache.length)
    for token in tokens[:-1]:
        model.decode(cache, token, observer=drafts.observer)
        drafts.take_up(cache.length)
    return drafts.windows


def assert_equals_plain(model: Model, seed: int, params: SamplingParams) -> SpeculationStats:
    prompt, stats = prompt_tokens(seed), SpeculationStats()
    tokens, cache = plain_answer(model, prompt, params)
    share = (0.0, 0.5, 0.9)[seed % 3]
    drafts = Coached(drafter(model), tokens, share, seed)
    drafted, drafted_cache = drafted_answer(model, prompt, params, drafts, stats=stats)
    assert drafted == tokens
    assert_same(cache_bytes(drafted_cache), cache_bytes(cache))
    if seed % 3 == 1:
        windows = observed_windows(model, prompt, tokens)
        assert draft_bytes(drafts.windows) == draft_bytes(windows)
    return stats


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(PROMPTS))
def test_greedy_tokens_and_caches_equal_plain_decoding(name, seed):
    stats = assert_equals_plain(MODELS[name](), seed, SamplingParams(TOKENS))
    assert stats.verified > stats.accepted or stats.accepted > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_so_do_sampled_ones(name, seed):
    assert_equals_plain(MODELS[name](), 100 + seed, SamplingParams(TOKENS, 0.8, 0.9, seed))


@pytest.mark.parametrize("seed", range(3))
def test_so_do_those_of_a_bfloat16_model(seed):
    assert_equals_plain(golden_model(torch.bfloat16), 200 + seed, SamplingParams(TOKENS))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_prompts_around_group_and_window(length):
    prompt = prompt_tokens(5)[:1].repeat(length) + np.arange(length)
    model, params = golden_model(), SamplingParams(8)
    tokens, cache = plain_answer(model, prompt, params)
    drafts = Coached(drafter(model), tokens, 0.6, length)
    drafted, drafted_cache = drafted_answer(model, prompt, params, drafts)
    assert drafted == tokens
    assert_same(cache_bytes(drafted_cache), cache_bytes(cache))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5, FEW_ROWS_MAX])
def test_positions_that_share_a_pass_have_the_bits_that_they_have_alone(name, dtype, count):
    model = golden_model(dtype) if name == "golden" else tiny_model()
    prompt, rest = prompt_tokens(7), prompt_tokens(8)[:count]
    together, alone = model.new_cache(), model.new_cache()
    for cache in (together, alone):
        model.prefill(cache, prompt)
    logits = model.prefill_all_logits(together, rest)
    for row, token in zip(logits, rest, strict=True):
        assert torch.equal(model.decode(alone, int(token)), row)
    assert_same(cache_bytes(together), cache_bytes(alone))


def test_right_guesses_are_all_accepted():
    model, prompt, params = tiny_model(), prompt_tokens(3), SamplingParams(17)
    tokens, _ = plain_answer(model, prompt, params)
    stats = SpeculationStats()
    drafted_answer(model, prompt, params, Coached(drafter(model), tokens, 1.0, 0), stats=stats)
    # 16 tokens behind the first: two passes of seven guesses and the token behind them.
    assert (stats.rounds, stats.verified, stats.accepted) == (2, 14, 14)
    assert stats.acceptance_length == 8.0


def test_without_guesses_every_pass_gives_one_token():
    model, prompt, params = tiny_model(), prompt_tokens(3), SamplingParams(6)
    tokens, cache = plain_answer(model, prompt, params)
    stats, drafts = SpeculationStats(), SequenceDrafts(drafter(model), verify_threshold=2.0)
    drafted, drafted_cache = drafted_answer(model, prompt, params, drafts, stats=stats)
    assert drafted == tokens
    assert (stats.rounds, stats.verified, stats.acceptance_length) == (5, 0, 1.0)
    assert_same(cache_bytes(drafted_cache), cache_bytes(cache))


@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_stop_token_among_right_guesses_ends_it(at):
    model, prompt, params = golden_model(), prompt_tokens(12), SamplingParams(12)
    whole, _ = plain_answer(model, prompt, params)
    stop = whole[at]
    assert stop not in whole[:at]
    tokens, cache = plain_answer(model, prompt, params, {stop})
    drafts = Coached(drafter(model), whole, 1.0, 0)
    drafted, drafted_cache = drafted_answer(model, prompt, params, drafts, {stop})
    assert drafted == tokens == whole[: at + 1]
    assert_same(cache_bytes(drafted_cache), cache_bytes(cache))


@pytest.mark.parametrize("taken", [1, 2, 3, 5, 8])
def test_a_reader_that_stops_early_leaves_what_plain_decoding_leaves(taken):
    model, prompt, params = golden_model(), prompt_tokens(9), SamplingParams(12)
    tokens, _ = plain_answer(model, prompt, params)
    drafts = Coached(drafter(model), tokens, 0.9, 1)
    cache, logits = prefilled(model, prompt, drafts)
    stream = generate(model, cache, logits, params, (), drafts)
    for _ in range(taken):
        next(stream)
    stream.close()
    _, plain_cache = plain_answer(model, prompt, SamplingParams(taken))
    assert_same(cache_bytes(cache), cache_bytes(plain_cache))
    windows = observed_windows(model, prompt, tokens[:taken])
    assert draft_bytes(drafts.windows) == draft_bytes(windows)
    # and both go on alike
    assert torch.equal(model.decode(cache, 7), model.decode(plain_cache, 7))


def test_a_cache_that_is_seen_between_tokens_holds_no_guess():
    model, prompt, params = golden_model(), prompt_tokens(10), SamplingParams(12)
    tokens, _ = plain_answer(model, prompt, params)
    drafts = Coached(drafter(model), tokens, 0.5, 4)
    cache, logits = prefilled(model, prompt, drafts)
    right = [*prompt.tolist(), *tokens]
    for _ in generate(model, cache, logits, params, (), drafts):
        assert cache.token_ids.tolist() == right[: cache.length]
    assert any(len(guesses) > 1 for guesses in drafts.proposed)


def test_the_last_position_of_the_model_can_be_reached():
    whole = golden_model()
    prompt = prompt_tokens(11)
    config = replace(whole.config, positions_max=len(prompt) + 9)
    engram = next(b.engram for b in whole.blocks if b.engram is not None)
    model = Model(config, whole.weights, engram.hasher)
    params = SamplingParams(10)
    tokens, _ = plain_answer(whole, prompt, params)
    drafts = Coached(drafter(model), tokens, 0.9, 1)
    drafted, cache = drafted_answer(model, prompt, params, drafts)
    assert drafted == tokens
    assert cache.length == config.positions_max


def test_guesses_that_stand_for_no_text_are_never_verified():
    model, prompt = golden_model(), prompt_tokens(13)
    drafts = Coached(drafter(model), [], 0.0, 0)
    params = SamplingParams(6, banned_ids=frozenset(range(5, 400)))
    drafted_answer(model, prompt, params, drafts)
    guesses = {token for proposed in drafts.proposed for token in proposed}
    assert guesses
    assert not guesses & {model.config.image_token, 500, *range(5, 400)}
