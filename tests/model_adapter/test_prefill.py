"""Prefill, decode and resume: chunks, halves, windows, and what is written where."""

import numpy as np
import pytest
import torch
from golden_model import config, error, model, vector

from model_adapter.cache import SequenceCache
from model_adapter.errors import CacheError, InputError
from model_adapter.golden.rounding import part_at_a_midpoint
from model_adapter.records import WINDOW, host, pack, unpack

BLOCK = 8


def window() -> int:
    return config().window


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(11, 500, count)


def global_rows(cache: SequenceCache) -> list[np.ndarray]:
    return [host(cache.rows(spec).rows) for spec in config().global_caches]


def window_rows(cache: SequenceCache) -> list[np.ndarray]:
    return [host(w.latest(window())) for w in cache.windows]


def assert_same_rows(a: SequenceCache, b: SequenceCache, share: float = 0.005) -> None:
    """Equal but for codes that another order of sums moved across a rounding midpoint."""
    for mine, theirs in zip(global_rows(a), global_rows(b), strict=True):
        assert mine.shape == theirs.shape
        assert np.mean(mine != theirs) < share


class WindowValues:
    """An observer that keeps window values before rounding, and what else a test wants to see."""

    def __init__(self, also=lambda stage, layer, tensor: None) -> None:
        self._seen: dict[int, list[torch.Tensor]] = {}
        self._also = also

    def __call__(self, stage: str, layer: int, tensor: torch.Tensor) -> None:
        if stage == "window_kv":
            self._seen.setdefault(layer, []).append(tensor.clone())
        self._also(stage, layer, tensor)

    def layers(self) -> list[torch.Tensor]:
        return [torch.cat(self._seen[layer]) for layer in sorted(self._seen)]


def alike_up_to(mine: WindowValues, theirs: WindowValues) -> int:
    """Positions that two runs have alike: all, or those before the first value that lies on a
    rounding midpoint and was rounded the other way. No position depends on a later one."""
    pairs = [
        (a[: len(b)], b[: len(a)]) for a, b in zip(mine.layers(), theirs.layers(), strict=True)
    ]
    rows = [codes_of(a).ne(codes_of(b)).any(-1).nonzero() for a, b in pairs]
    if not any(map(len, rows)):
        return len(pairs[0][0])
    assert part_at_a_midpoint(*zip(*pairs, strict=True))
    return min(int(r[0]) for r in rows if len(r))


def codes_of(values: torch.Tensor) -> torch.Tensor:
    return unpack(WINDOW, pack(WINDOW, values))


def loaded(source: SequenceCache, hit: int) -> SequenceCache:
    cache = model().new_cache()
    for i in range(hit // BLOCK):
        cache.load_block(i, BLOCK, source.block_sections(i, BLOCK))
    return cache


@pytest.fixture(scope="module")
def exact():
    cache, values = model().new_cache(), WindowValues()
    logits = model().prefill_all_logits(cache, vector("long.input_ids"), observer=values)
    return cache, logits, values


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 33, 1024])
@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_chunks_change_nothing(mode, chunk_tokens):
    prompt = vector("mid.input_ids")
    whole, cut = model().new_cache(), model().new_cache()
    expected = model().prefill(whole, prompt, mode, chunk_tokens=len(prompt))
    logits = model().prefill(cut, prompt, mode, chunk_tokens=chunk_tokens)
    assert_same_rows(cut, whole)
    assert error(logits, expected) < 5e-3
    assert cut.length == whole.length == len(prompt)


@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_chunks_select_the_same(chunk_tokens):
    prompt = vector("long.input_ids")

    def selections(chunk: int) -> tuple[dict[int, list], WindowValues]:
        seen: dict[int, list] = {}

        def keep(stage, layer, tensor):
            if stage == "selection":
                rows = [set(row[row >= 0].tolist()) for row in tensor]
                seen.setdefault(layer, []).extend(rows)

        values = WindowValues(keep)
        model().prefill(model().new_cache(), prompt, "exact", chunk, observer=values)
        return seen, values

    (whole, values), (cut, cut_values) = selections(len(prompt)), selections(chunk_tokens)
    assert whole.keys() == cut.keys() == set(config().index_sources)
    for layer in whole:
        same = [a == b for a, b in zip(whole[layer], cut[layer], strict=True)]
        assert len(same) == len(prompt)
        assert same.count(False) <= 3 or all(same[: alike_up_to(cut_values, values)])


def test_decoding_is_an_exact_prefill_token_by_token(exact):
    _, expected, values = exact
    cache, mine = model().new_cache(), WindowValues()
    prompt = vector("long.input_ids")[:40]
    logits = torch.stack([model().decode(cache, int(t), mine) for t in prompt])
    if error(logits, expected[:40]) >= 1e-4:
        alike = alike_up_to(mine, values)
        assert alike
        assert error(logits[:alike], expected[:alike]) < 1e-4


def test_a_prefill_may_come_in_parts(exact):
    rows, expected, _ = exact
    prompt = vector("long.input_ids")
    cache = model().new_cache()
    for part in (prompt[:33], prompt[33:34], prompt[34:101], prompt[101:]):
        logits = model().prefill(cache, part, "exact")
    assert_same_rows(cache, rows)
    assert error(logits, expected[-1]) < 5e-3


def test_bounded_decoder_sees_the_last_window_only():
    prompt = ids(50)
    cache = model().new_cache()
    model().prefill(cache, prompt)
    starts = [w.start for w in cache.windows]
    first = config().decoder_start
    assert starts == [0] * first + [50 - window()] * (config().layers - first)
    assert all(w.end == 50 for w in cache.windows)


def test_bounded_and_exact_leave_the_same_global_rows():
    bounded, exact = model().new_cache(), model().new_cache()
    model().prefill(bounded, ids(70))
    model().prefill(exact, ids(70), "exact")
    assert_same_rows(bounded, exact)


def test_prompts_within_the_window_are_the_same_in_both_modes():
    prompt = ids(window())
    a = model().prefill(model().new_cache(), prompt, "bounded")
    assert torch.equal(a, model().prefill(model().new_cache(), prompt, "exact"))


def test_short_continuation_uses_the_decoder_windows_that_are_there():
    """Windows hit: nothing is replayed, and the decoder goes on where it stood (ds41f §5)."""
    cache = model().new_cache()
    model().prefill(cache, ids(40))
    model().counters.reset()
    model().prefill(cache, ids(window() - 1, seed=1))
    counters = model().counters
    assert counters.encoder_positions == counters.decoder_positions == window() - 1
    assert counters.replayed_positions == 0
    assert cache.windows[-1].start == 40 - window()


@pytest.mark.parametrize(("prompt_tokens", "hit"), [(100, 64), (65, 64), (33, 24), (120, 24)])
def test_a_warm_turn_computes_only_replay_window_and_suffix(prompt_tokens, hit):
    prompt = ids(prompt_tokens)
    source = model().new_cache()
    model().prefill(source, prompt)
    cache = loaded(source, hit)
    model().counters.reset()
    model().resume(cache, prompt, hit)
    counters = model().counters
    assert counters.replayed_positions == window()
    assert counters.encoder_positions == window() + prompt_tokens - hit
    assert counters.decoder_positions == window()
    assert cache.length == prompt_tokens


def test_exact_resume_runs_the_replay_through_every_layer():
    prompt = ids(60)
    source = model().new_cache()
    model().prefill(source, prompt, "exact")
    model().counters.reset()
    model().resume(loaded(source, 40), prompt, 40, "exact")
    assert model().counters.decoder_positions == model().counters.encoder_positions == 36


def test_resume_reads_loaded_rows_and_never_writes_them():
    """The rows loaded are not those that this model computes: they stay, and they are used."""
    prompt = ids(90)
    source = model().new_cache()
    model().prefill(source, prompt)
    other = model().new_cache()
    model().prefill(other, ids(90, seed=5))
    cache, plain = loaded(other, 48), loaded(source, 48)
    logits = model().resume(cache, prompt, 48)
    for spec, kept in zip(config().global_caches, global_rows(cache), strict=True):
        count = 48 // spec.ratio
        assert np.array_equal(kept[:count], other.rows(spec).rows[:count])
        assert len(kept) == 90 // spec.ratio
    assert error(logits, model().resume(plain, prompt, 48)) > 1e-3


def resumed(source: SequenceCache, hit: int, **options):
    """A resume's cache and logits, and its window values before rounding, layer by layer."""
    cache, values = loaded(source, hit), WindowValues()
    logits = model().resume(cache, vector("long.input_ids"), hit, observer=values, **options)
    return cache, logits, values.layers()


# Passes over few positions sum in an order of their own (`few_rows`), so that a code may flip.
FLIPPED_SHARE, FLIPPED_ERROR = 0.05, 0.1


@pytest.mark.parametrize("chunk_tokens", [5, 16, 40])
def test_resume_in_chunks(exact, chunk_tokens):
    whole, expected, values = resumed(exact[0], 72)
    cut, logits, cut_values = resumed(exact[0], 72, chunk_tokens=chunk_tokens)
    if part_at_a_midpoint(cut_values, values):
        assert_same_rows(cut, whole, FLIPPED_SHARE)
        assert error(logits, expected) < FLIPPED_ERROR
    else:
        assert_same_rows(cut, whole)
        assert error(logits, expected) < 5e-3


def test_decoding_goes_on_behind_a_resume_as_behind_a_decode(exact):
    """Windows, open groups and token history are those of a cache that grew by itself."""
    prompt = vector("long.input_ids")
    resumed, grown = loaded(exact[0], 72), loaded(exact[0], 72)
    model().resume(resumed, prompt[:93], 72, "exact")
    model().resume(grown, prompt[:81], 72, "exact")
    for token in prompt[81:93]:
        model().decode(grown, int(token))
    assert_same_rows(resumed, grown)
    for mine, theirs in zip(window_rows(resumed), window_rows(grown), strict=True):
        assert np.mean(mine != theirs) < 0.005
    a, b = (model().decode(cache, int(prompt[93])) for cache in (resumed, grown))
    assert error(a, b) < 5e-3


def test_rows_behind_the_hit_are_dropped(exact):
    prompt = vector("long.input_ids")
    expected = model().resume(loaded(exact[0], 72), prompt, 72)
    assert torch.equal(model().resume(loaded(exact[0], 96), prompt, 72), expected)


def test_chunks_are_reported_as_they_finish():
    ends = []
    model().prefill(
        model().new_cache(),
        ids(50),
        chunk_tokens=20,
        on_chunk=lambda cache: ends.append((cache.length, cache.loaded_tokens)),
    )
    assert ends == [(20, 20), (40, 40), (50, 50)]


@pytest.mark.parametrize("hit", [8, 16, 56, 64])
def test_hits_that_can_not_be_taken(exact, hit):
    prompt = vector("long.input_ids")[:56]
    with pytest.raises(InputError, match=f"a hit of {hit} tokens can't be resumed"):
        model().resume(loaded(exact[0], hit), prompt, hit)


def test_hits_that_do_not_fit_the_cache(exact):
    prompt = vector("long.input_ids")
    with pytest.raises(InputError, match="only 24 were loaded"):
        model().resume(loaded(exact[0], 24), prompt, 40)
    with pytest.raises(InputError, match="multiple of 2"):
        model().resume(loaded(exact[0], 24), prompt, 23)
    used = model().new_cache()
    model().prefill(used, prompt[:30])
    with pytest.raises(InputError, match="a cache of 30"):
        model().resume(used, prompt, 24)
    with pytest.raises(InputError, match="use resume"):
        model().prefill(loaded(exact[0], 24), prompt)


def test_usable_hits_are_longer_than_the_window():
    assert model().usable_hit_tokens(window()) == 0
    assert model().usable_hit_tokens(window() + 2) == window() + 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one"),
        ([[1, 2]], "at least one"),
        ([1, 512], "token id 512 is outside the vocabulary of 512"),
        ([1, -1], "token id -1"),
        ([0.5], "must be integers"),
        ([5] * 4097, "4097 tokens pass the model's 4096 positions"),
        ([5, 510, 510], "2 image tokens, but embeddings for 0"),
    ],
)
def test_tokens_that_can_not_be(tokens, message):
    cache = model().new_cache()
    with pytest.raises(InputError, match=message):
        model().prefill(cache, tokens)
    assert cache.length == len(cache.token_ids) == 0


def test_modes_and_chunks_that_can_not_be():
    with pytest.raises(InputError, match="mode 'fast' is unknown"):
        model().prefill(model().new_cache(), [5], "fast")
    with pytest.raises(InputError, match="chunk_tokens must be at least 1, not 0"):
        model().prefill(model().new_cache(), [5], chunk_tokens=0)


def test_a_failure_half_way_spoils_the_cache():
    cache = model().new_cache()

    def fail(_):
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        model().prefill(cache, ids(30), chunk_tokens=10, on_chunk=fail)
    with pytest.raises(CacheError, match=r"failed half-way.*disk gone"):
        model().decode(cache, 5)


@pytest.mark.parametrize("back", [1, 5, 20])
def test_taking_tokens_back_leaves_nothing_behind(back):
    prompt, wrong, right = ids(45), ids(back, seed=3), ids(20, seed=4)
    plain, rolled = model().new_cache(), model().new_cache()
    for cache in (plain, rolled):
        model().prefill(cache, prompt, "exact")
    for token in wrong:
        model().decode(rolled, int(token))
    rolled.truncate(45)
    for token in right:
        expected = model().decode(plain, int(token))
        assert torch.equal(model().decode(rolled, int(token)), expected)
    for mine, theirs in zip(global_rows(rolled), global_rows(plain), strict=True):
        assert np.array_equal(mine, theirs)


def test_image_positions_pass_engram_untouched_and_hide_the_past_from_it():
    prompt = ids(30)
    prompt[10:14] = config().image_token
    other = prompt.copy()
    other[7:10] = ids(3, seed=9)
    rows = torch.randn(4, config().hidden, generator=torch.Generator().manual_seed(0))
    engram = model().blocks[1].engram
    assert engram is not None
    for tokens in (prompt, other):
        cache = model().new_cache()
        model().prefill(cache, tokens, image_embeddings=rows)
    a = engram.hasher.rows(1, prompt, 0)
    b = engram.hasher.rows(1, other, 0)
    assert (a[:10] != b[:10]).any()
    assert np.array_equal(a[14:], b[14:])
