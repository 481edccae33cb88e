"""Cache bytes: the released figures, and against caches that a model really fills."""

from functools import cache
from pathlib import Path

import pytest
import tiny_checkpoint as tiny

from kvstore import DS41F_LAYOUT
from model_adapter.config import ModelConfig
from model_adapter.errors import InputError
from model_adapter.sizes import (
    block_bytes,
    estimate,
    global_bytes_per_token,
    record_sizes,
)

RELEASED = Path(__file__).parents[1] / "golden" / "released"
DOCUMENT = Path(__file__).parents[2] / "docs" / "sizes.md"
FIRST_TOKEN_BYTES = 4


@cache
def released() -> ModelConfig:
    return ModelConfig.load(RELEASED)


def test_released_records():
    sizes = {(r.name, r.ratio): r for r in record_sizes(released())}
    assert sizes["main", 2].record_bytes == sizes["main", 1].record_bytes == 288
    assert sizes["index", 2].record_bytes == sizes["index", 1].record_bytes == 68
    assert sizes["main", 2].layers == (2, 8, 14)
    assert sizes["main", 1].layers == (20,)
    assert sizes["window", 1].record_bytes == sizes["DSpark window", 1].record_bytes == 528
    assert sizes["DSpark window", 1].layers == (40, 41, 42)
    pending = sizes["pending pair row", 1]
    assert (pending.record_bytes, pending.layers) == (4096, (2, 8, 14))
    assert global_bytes_per_token(released()) == 890
    assert block_bytes(released(), 256) == 227_840 == DS41F_LAYOUT.block_bytes


@pytest.mark.parametrize(
    ("tokens", "global_mb"), [(128 << 10, 116.7), (1 << 20, 933.2)], ids=["128K", "1M"]
)
def test_what_a_released_prefill_node_hands_over(tokens, global_mb):
    sizes = estimate(released(), tokens)
    assert sizes.global_kv == 890 * tokens
    assert round(sizes.global_kv / 1e6, 1) == global_mb
    assert sizes.encoder_windows == sizes.decoder_windows == 1_351_680
    assert sizes.dspark_windows == 202_752
    assert sizes.pending == 0
    assert sizes.beside_global == 2_703_360 + 202_752 + FIRST_TOKEN_BYTES
    assert round(sizes.beside_global / 1e6, 1) == 2.9
    assert sizes.handover == sizes.global_kv + sizes.beside_global


@pytest.mark.parametrize(
    ("shown", "tokens"),
    [("8K", 8 << 10), ("32K", 32 << 10), ("128K", 128 << 10), ("1M − 1", (1 << 20) - 1)],
)
def test_the_documented_table_is_this_one(shown, tokens):
    sizes = estimate(released(), tokens)
    windows = sizes.encoder_windows + sizes.decoder_windows
    columns = [sizes.main, sizes.index, sizes.global_kv, windows, sizes.dspark_windows]
    numbers = [f"{n / 1e6:,.3f}" for n in columns]
    numbers.append(f"{sizes.pending / 1e6:.3f}" if sizes.pending else "0")
    numbers.append(f"{sizes.global_kv / 1e6:.1f} + {sizes.beside_global / 1e6:.1f}")
    assert f"| {shown} | {' | '.join(numbers)} |" in DOCUMENT.read_text(encoding="utf-8")


def test_an_odd_length_leaves_pending_rows_and_no_row_for_its_last_token():
    even, odd = estimate(released(), 8192), estimate(released(), 8193)
    assert odd.pending == 3 * 4096
    assert odd.global_kv - even.global_kv == 288 + 68  # layer 20's alone
    assert estimate(released(), 8194).global_kv - even.global_kv == 2 * 890


def test_a_context_shorter_than_the_window_fills_it_in_part():
    assert estimate(released(), 5).encoder_windows == 20 * 5 * 528


@pytest.mark.parametrize("tokens", [0, -1, (1 << 20) + 1])
def test_lengths_outside_the_models_positions_are_refused(tokens):
    with pytest.raises(InputError, match=f"a context of {tokens} tokens is outside"):
        estimate(released(), tokens)


@pytest.mark.parametrize("tokens", [0, 3])
def test_block_sizes_that_do_not_fit_are_refused(tokens):
    with pytest.raises(InputError, match=f"block_tokens {tokens} is not a multiple"):
        block_bytes(released(), tokens)


@pytest.mark.parametrize("tokens", [7, 64, 95])
def test_estimates_are_what_a_filled_cache_holds(tokens):
    model = tiny.model()
    cache = model.new_cache()
    model.prefill(cache, tiny.prompt(tokens), "exact")
    config, sizes = model.config, estimate(model.config, tokens)
    by_role = {"main": 0, "index": 0}
    for spec in config.global_caches:
        by_role[spec.role] += cache.rows(spec).rows.nbytes
    assert (sizes.main, sizes.index) == (by_role["main"], by_role["index"])
    windows = [w.latest(config.window).nbytes for w in cache.windows]
    first = config.decoder_start
    assert sizes.encoder_windows == sum(windows[:first])
    assert sizes.decoder_windows == sum(windows[first:])
    assert sizes.pending == sum(g.pending().nbytes for g in cache.open_groups.values())
    sections = cache.block_sections(0, 2)
    assert sum(s.nbytes for s in sections) == block_bytes(config, 2)
