"""Choosing tokens, and decoding one sequence without drafts."""

import math
from itertools import islice

import numpy as np
import pytest
import torch
from golden_model import model, vector

from model_adapter.decoding import Sampler, SamplingParams, generate, never_generated
from model_adapter.errors import InputError

LOGITS = torch.tensor([0.1, 2.0, -1.0, 2.0, 0.5, 1.5])


def sampler(never=(), **params) -> Sampler:
    return Sampler(SamplingParams(max_tokens=1, **params), never)


def drawn(chooser: Sampler, logits: torch.Tensor, count: int) -> np.ndarray:
    return np.array([chooser.token(logits, i) for i in range(count)])


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_equals():
    assert sampler().token(LOGITS, 0) == 1
    assert sampler(never={1}).token(LOGITS, 0) == 3
    assert sampler(banned_ids=frozenset({1, 3})).token(LOGITS, 0) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_banned_ids_are_never_drawn_and_logits_stay_as_they_are(temperature):
    logits = LOGITS.clone()
    tokens = drawn(sampler(never={1, 3}, temperature=temperature, seed=1), logits, 200)
    assert not np.isin(tokens, [1, 3]).any()
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    count = 4000
    tokens = drawn(sampler(temperature=temperature, seed=7), LOGITS, count)
    expected = (LOGITS.double() / temperature).softmax(0).numpy() * count
    seen = np.bincount(tokens, minlength=len(LOGITS))
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom: one seed in a thousand is above


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [
        (0.01, {2}),
        (0.49, {2}),
        (0.51, {2, 0}),
        (0.74, {2, 0}),
        (0.76, {2, 0, 3}),
        (1.0, {*range(4)}),
    ],
)
def test_top_p_keeps_the_likeliest_that_reach_it(top_p, allowed):
    logits = torch.tensor([0.25, 0.0625, 0.5, 0.1875]).log()
    tokens = drawn(sampler(temperature=1.0, top_p=top_p, seed=3), logits, 400)
    assert set(tokens.tolist()) == allowed


def test_what_is_kept_keeps_its_proportions():
    logits = torch.tensor([0.25, 0.0625, 0.5, 0.1875]).log()
    tokens = drawn(sampler(temperature=1.0, top_p=0.7, seed=5), logits, 3000)
    assert np.mean(tokens == 2) == pytest.approx(2 / 3, abs=0.03)


def test_a_token_depends_on_seed_and_number_alone():
    one, same = (sampler(temperature=1.0, seed=11) for _ in range(2))
    forwards = [one.token(LOGITS, i) for i in range(50)]
    assert [same.token(LOGITS, i) for i in reversed(range(50))] == forwards[::-1]
    other = sampler(temperature=1.0, seed=12)
    assert [other.token(LOGITS, i) for i in range(50)] != forwards
    assert len(set(forwards)) > 2


def test_a_seed_that_was_drawn_can_be_used_again():
    first = sampler(temperature=1.0)
    again = sampler(temperature=1.0, seed=first.seed)
    assert list(drawn(first, LOGITS, 20)) == list(drawn(again, LOGITS, 20))
    assert sampler().seed != sampler().seed


def test_any_integer_is_a_seed():
    seeds = (-1, 0, 2**63, 2**64 + 5)
    assert [sampler(seed=s).seed for s in seeds] == [2**64 - 1, 0, 2**63, 5]


def test_huge_and_tiny_temperatures():
    assert set(drawn(sampler(temperature=1e-30, seed=0), LOGITS, 60).tolist()) == {1, 3}
    flat = drawn(sampler(temperature=1e30, seed=0), LOGITS, 300)
    assert len(set(flat.tolist())) == len(LOGITS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
    ],
)
def test_impossible_values_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=rf"{name} {value}"):
        SamplingParams(**({"max_tokens": 1} | wrong))


def test_placeholders_are_never_generated():
    config = model().config
    assert never_generated(config) == {510, 500}
    cache = model().new_cache()
    logits = model().prefill(cache, [5, 6, 7])
    logits[510] = logits[500] = 1e6
    assert next(generate(model(), cache, logits, SamplingParams(1))) not in (510, 500)


def answer(params: SamplingParams, stop_ids=(), **options) -> list[int]:
    cache = model().new_cache()
    logits = model().prefill(cache, vector("greedy.prompt_ids"), "exact")
    return list(generate(model(), cache, logits, params, stop_ids, **options))


def test_greedy_decoding_gives_the_golden_tokens():
    assert answer(SamplingParams(16)) == vector("greedy.output_ids").tolist()


def test_it_ends_with_the_stop_token_or_with_max_tokens():
    golden = vector("greedy.output_ids").tolist()
    assert answer(SamplingParams(16), {golden[3], golden[5]}) == golden[:4]
    assert answer(SamplingParams(2), {golden[3]}) == golden[:2]
    assert answer(SamplingParams(1)) == golden[:1]


def test_seeds_decide_the_answer():
    answers = [answer(SamplingParams(8, 1.0, 0.95, seed)) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_request_goes_on_elsewhere():
    params = SamplingParams(8, 1.2, 0.9, 21)
    whole = answer(params)
    here, there = model().new_cache(), model().new_cache()
    prompt = vector("greedy.prompt_ids")
    logits = model().prefill(here, prompt, "exact")
    first = list(islice(generate(model(), here, logits, params), 3))
    logits = model().prefill(there, [*prompt.tolist(), *first], "exact")
    rest = generate(model(), there, logits, SamplingParams(5, 1.2, 0.9, 21), drawn=3)
    assert first + list(rest) == whole


def test_the_last_token_is_not_in_the_cache():
    cache = model().new_cache()
    logits = model().prefill(cache, [5, 6, 7])
    for count, _ in enumerate(generate(model(), cache, logits, SamplingParams(4))):
        assert cache.length == 3 + count
