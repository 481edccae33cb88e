"""Sequences that decode together have the tokens, logits and caches that they have alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_bytes import assert_same, cache_bytes
from drafting import plain_answer, prompt_tokens
from golden_model import model as golden_model
from tiny_checkpoint import model as tiny_model

from model_adapter.decoding import Batch, SamplingParams, decode_batch, generate
from model_adapter.errors import InputError
from model_adapter.few_rows import FEW_ROWS_MAX
from model_adapter.model import Model

LENGTHS = (1, 7, 16, 33, 70)


def prefilled(model: Model, length: int):
    cache = model.new_cache()
    tokens = np.random.default_rng(length).integers(5, 500, length)
    return cache, model.prefill(cache, tokens)


@pytest.mark.parametrize(
    "load",
    [golden_model, lambda: golden_model(torch.bfloat16), tiny_model],
    ids=["golden", "bfloat16", "tiny"],
)
def test_logits_and_caches_equal_those_of_each_alone(load):
    model = load()
    together = [prefilled(model, n)[0] for n in LENGTHS]
    alone = [prefilled(model, n)[0] for n in LENGTHS]
    rng = np.random.default_rng(0)
    for _ in range(3):
        tokens = rng.integers(5, 500, len(LENGTHS)).tolist()
        logits = decode_batch(model, together, tokens)
        expected = [model.decode(c, t) for c, t in zip(alone, tokens, strict=True)]
        assert torch.equal(logits, torch.stack(expected))
    for a, b in zip(together, alone, strict=True):
        assert_same(cache_bytes(a), cache_bytes(b))


def test_more_sequences_than_share_a_pass():
    model = tiny_model()
    lengths = range(2, 2 + FEW_ROWS_MAX + 3)
    together = [prefilled(model, n)[0] for n in lengths]
    logits = decode_batch(model, together, list(lengths))
    alone = torch.stack([model.decode(prefilled(model, n)[0], n) for n in lengths])
    assert torch.equal(logits, alone)


def test_positions_are_counted():
    model = tiny_model()
    caches = [prefilled(model, n)[0] for n in (3, 5)]
    model.counters.reset()
    decode_batch(model, caches, [7, 8])
    counters = model.counters
    assert (counters.encoder_positions, counters.decoder_positions) == (2, 2)


def requests() -> list[tuple[np.ndarray, SamplingParams, set[int]]]:
    """Prompts, parameters and stop ids, the last one stopping on its third token."""
    greedy, _ = plain_answer(golden_model(), prompt_tokens(4), SamplingParams(3))
    return [
        (prompt_tokens(1), SamplingParams(6), set()),
        (prompt_tokens(2), SamplingParams(3, 0.9, 0.8, 5), set()),
        (prompt_tokens(3), SamplingParams(9, 1.3, 1.0, 6), set()),
        (prompt_tokens(4), SamplingParams(9), {greedy[2]}),
    ]


def test_answers_equal_those_of_each_alone():
    model = golden_model()
    batch, answers, caches, ended = Batch(model), {}, {}, {}
    waiting = requests()
    steps = 0
    while waiting or batch:
        if waiting:  # one joins before every step
            prompt, params, stop_ids = waiting.pop(0)
            cache = model.new_cache()
            number = batch.add(cache, model.prefill(cache, prompt), params, stop_ids)
            answers[number], caches[number] = [], cache
        for number, token, finished in batch.step():
            answers[number].append(token)
            if finished:
                ended[number] = steps
        steps += 1
    assert ended == {0: 5, 1: 3, 2: 10, 3: 5}
    for number, request in enumerate(requests()):
        tokens, cache = plain_answer(model, *request)
        assert answers[number] == tokens
        assert_same(cache_bytes(caches[number]), cache_bytes(cache))


def test_a_sequence_may_leave_early():
    model, batch = golden_model(), Batch(golden_model())
    (prompt, params, _), (other, _, _) = requests()[:2]
    caches = [model.new_cache() for _ in range(2)]
    first, second = (
        batch.add(c, model.prefill(c, p), params)
        for c, p in zip(caches, (prompt, other), strict=True)
    )
    tokens = [batch.step() for _ in range(3)]
    batch.remove(first)
    assert [number for number, _, _ in batch.step()] == [second]
    batch.remove(first)
    assert len(batch) == 1
    alone, cache = plain_answer(model, prompt, SamplingParams(3))
    assert [step[0][1] for step in tokens] == alone
    assert_same(cache_bytes(caches[0]), cache_bytes(cache))


def test_a_request_that_began_elsewhere_goes_on_in_a_batch():
    model, params = golden_model(), SamplingParams(6, 1.1, 0.9, 31)
    prompt = prompt_tokens(6, 15)
    whole, _ = plain_answer(model, prompt, params)
    cache = model.new_cache()
    stream = generate(model, cache, model.prefill(cache, prompt), params)
    begun = [next(stream) for _ in range(2)]
    stream.close()
    batch = Batch(model)
    logits = model.decode(cache, begun[-1])
    batch.add(cache, logits, replace(params, max_tokens=4), drawn=2)
    rest = [batch.step()[0][1] for _ in range(4)]
    assert begun + rest == whole
    assert not batch


def wrong_batches():
    model = golden_model()
    one, other = (prefilled(model, n)[0] for n in (4, 5))
    loaded = model.new_cache()
    source = prefilled(model, 40)[0]
    loaded.load_block(0, 32, source.block_sections(0, 32))
    yield [], [], "0 caches"
    yield [one, other], [5], "2 caches and 1 tokens"
    yield [one, one], [5, 6], "twice"
    yield [one, other], [5, 512], "512 is outside"
    yield [one, other], [5, -1], "-1 is outside"
    yield [one, other], [5, model.config.image_token], "1 image tokens"
    yield [one, loaded], [5, 6], "use resume"


@pytest.mark.parametrize("number", range(7))
def test_impossible_batches_compute_nothing(number):
    caches, tokens, message = list(wrong_batches())[number]
    before = [cache_bytes(c) for c in caches]
    with pytest.raises(InputError, match=message):
        decode_batch(golden_model(), caches, tokens)
    for cache, then in zip(caches, before, strict=True):
        assert_same(cache_bytes(cache), then)
        cache.check_usable()


def test_a_batch_has_room_for_so_many_each_once_and_within_the_model():
    model = golden_model()
    batch = Batch(model, sequences_max=2)
    cache, logits = prefilled(model, 4)
    batch.add(cache, logits, SamplingParams(2))
    with pytest.raises(InputError, match="in the batch already"):
        batch.add(cache, logits, SamplingParams(2))
    other, _ = prefilled(model, 5)
    limit = model.config.positions_max
    with pytest.raises(InputError, match=f"the model's {limit} positions"):
        batch.add(other, logits, SamplingParams(limit - 3))
    batch.add(other, logits, SamplingParams(limit - 4))
    with pytest.raises(InputError, match="full: 2"):
        batch.add(prefilled(model, 6)[0], logits, SamplingParams(2))
    assert len(batch) == 2
