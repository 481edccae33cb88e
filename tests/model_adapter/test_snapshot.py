"""A sequence's state as bytes: complete, of the size that the arithmetic gives, and checked."""

import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
import xxhash
from cache_bytes import assert_same, cache_bytes, draft_bytes
from drafting import drafter

from model_adapter.cache import SequenceCache
from model_adapter.config import ModelConfig
from model_adapter.dspark import DraftWindows, SequenceDrafts
from model_adapter.errors import CacheError, SnapshotError
from model_adapter.sizes import estimate
from model_adapter.snapshot import Computed, PartKind, read_snapshot, snapshot_bytes
from model_adapter.snapshot.plan import header_bytes

RELEASED = Path(__file__).parents[1] / "golden" / "released" / "config.json"
BLOCK = tiny.BLOCK_TOKENS
COMPUTED = Computed(torch.float32, "bounded")


def state(tokens: int, drafts: SequenceDrafts | None = None) -> SequenceCache:
    cache = tiny.model().new_cache()
    observer = drafts.observer if drafts else None
    tiny.model().prefill(cache, tiny.prompt(tokens), observer=observer)
    if drafts:
        drafts.take_up(cache.length)
    return cache


def restored(payload: bytes, source: SequenceCache, drafts: DraftWindows | None = None):
    cache = tiny.model().new_cache()
    for i in range(source.length // BLOCK):
        cache.load_block(i, BLOCK, source.block_sections(i, BLOCK))
    snapshot = read_snapshot(payload, tiny.model().config, COMPUTED)
    cache.from_snapshot(snapshot, source.token_ids, drafts.layers if drafts else ())
    return cache


@pytest.mark.parametrize("tokens", [1, 16, 31, 32, 33, 77])
def test_a_restored_state_is_the_state(tokens):
    source = state(tokens)
    payload = source.to_snapshot(BLOCK, COMPUTED)
    cache = restored(payload, source)
    assert_same(cache_bytes(source), cache_bytes(cache))
    model = tiny.model()
    for token in tiny.prompt(6, seed=3):
        assert torch.equal(model.decode(source, token), model.decode(cache, token))
    assert_same(cache_bytes(source), cache_bytes(cache))


@pytest.mark.parametrize("tokens", [3, 50])
def test_draft_windows_come_along(tokens):
    drafts = SequenceDrafts(drafter(tiny.model()))
    source = state(tokens, drafts)
    payload = source.to_snapshot(BLOCK, COMPUTED, drafts.windows.layers)
    other = SequenceDrafts(drafter(tiny.model()))
    restored(payload, source, other.windows)
    assert draft_bytes(other.windows) == draft_bytes(drafts.windows)
    assert other.propose(5, 4, ()) == drafts.propose(5, 4, ())
    # and whoever has no use for them leaves them
    restored(payload, source)


def test_draft_windows_that_stand_elsewhere_are_left_out():
    source, drafts = state(50), DraftWindows(tiny.model().config)
    with_them = source.to_snapshot(BLOCK, COMPUTED, drafts.layers)
    assert with_them == source.to_snapshot(BLOCK, COMPUTED)


def test_what_was_taken_back_is_not_in_it():
    source = state(60)
    payload = source.to_snapshot(BLOCK, COMPUTED)
    tiny.model().prefill_all_logits(source, tiny.prompt(7, seed=1))
    source.truncate(60)
    assert source.to_snapshot(BLOCK, COMPUTED) == payload


def test_going_back_behind_it_is_refused():
    source = state(60)
    cache = restored(source.to_snapshot(BLOCK, COMPUTED), source)
    with pytest.raises(CacheError, match="can't go back"):
        cache.truncate(50)


def filled(config: ModelConfig, tokens: int) -> tuple[SequenceCache, DraftWindows]:
    """A cache of any model with its global rows, windows and pending rows; zeros."""
    cache, drafts = SequenceCache(config), DraftWindows(config)
    for spec in config.global_caches:
        cache.rows(spec).append(np.zeros((tokens // spec.ratio, spec.row_bytes), np.uint8))
    for rows in [*cache.windows, *drafts.layers]:
        first = max(tokens - config.window, 0)
        rows.restart(first)
        rows.append(np.zeros((tokens - first, config.window_row_bytes), np.uint8))
        rows.start = 0
    for layer, group in cache.open_groups.items():
        pending = tokens % config.compress_ratios[layer]
        group.restore(tokens, torch.zeros(pending, 2 * config.head_dim))
    cache.append_tokens(np.zeros(tokens, np.int32))
    cache.length = tokens
    return cache, drafts


@pytest.mark.parametrize("tokens", [8192, 8193, 8192 + 255])
def test_released_payloads_have_the_sizes_of_the_arithmetic(tokens):
    config = ModelConfig.load(RELEASED)
    cache, drafts = filled(config, tokens)
    payload = cache.to_snapshot(256, COMPUTED, drafts.layers)
    behind = tokens % 256
    partial = sum(behind // c.ratio * c.row_bytes for c in config.global_caches)
    windows, dspark, pending = 40 * 128 * 528, 3 * 128 * 528, 3 * 4096 * (tokens % 2)
    assert (windows, dspark) == (2_703_360, 202_752)
    assert len(payload) == header_bytes(config, True) + windows + dspark + partial + pending
    assert len(payload) == snapshot_bytes(config, tokens, 256, True)
    # the hand-over of the estimate, less its full blocks and the first token
    whole = estimate(config, tokens)
    rest = whole.beside_global - 4 + whole.global_kv - tokens // 256 * 227_840
    assert len(payload) == rest + header_bytes(config, True)
    assert header_bytes(config, True) < 2048


def test_every_truncation_and_every_flipped_byte_is_an_error():
    payload = bytes(state(45).to_snapshot(BLOCK, COMPUTED))
    config = tiny.model().config
    rng = np.random.default_rng(0)
    cuts = {0, 1, 47, 48, 63, 64, len(payload) - 1, *rng.integers(0, len(payload), 40).tolist()}
    for cut in cuts:
        with pytest.raises(SnapshotError):
            read_snapshot(payload[:cut], config, COMPUTED)
    for at in [*range(200), *rng.integers(0, len(payload), 100).tolist()]:
        damaged = bytearray(payload)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(SnapshotError):
            read_snapshot(damaged, config, COMPUTED)
    with pytest.raises(SnapshotError):
        read_snapshot(payload + b"\0", config, COMPUTED)


def resealed(payload: bytes, at: int, form: str, value: int) -> bytes:
    """A field changed, and the checksum made to fit again: a writer that is wrong."""
    changed = bytearray(payload)
    struct.pack_into(form, changed, at, value)
    digest = xxhash.xxh3_128(changed[:48])
    digest.update(changed[64:])
    changed[48:64] = digest.digest()
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (8, "<I", 2, "of format 2; this program reads format 1"),
        (16, "<Q", 44, "at position 44 holds"),
        (16, "<Q", 0, "at position 0"),
        (16, "<Q", 1 << 60, "at position"),
        (24, "<I", 33, "blocks of 33 tokens"),
        (24, "<I", 64, "rows of section"),
        (24, "<I", 0, "blocks of 0"),
        (28, "<I", 1 << 30, "truncated or torn"),
        (32, "<I", 2, "of a bounded torch.bfloat16 run"),
        (32, "<I", 9, "dtype 9"),
        (36, "<I", 2, "of a exact torch.float32 run"),
        (64, "<I", 4, "where this model has window 0"),
        (64, "<I", 77, "kind 77"),
        (68, "<I", 1, "where this model has window 0"),
        (72, "<Q", 40, "rows of window 0"),
        (80, "<I", 1 << 31, "can't be there"),
        (80, "<I", 0, "lie behind the parts|can't be there|holds 0 rows"),
        (84, "<I", 0, "lie behind the parts|rows of 0 bytes"),
    ],
)
def test_a_wrong_field_is_named_though_the_checksum_fits(at, form, value, message):
    payload = bytes(state(45).to_snapshot(BLOCK, COMPUTED))
    assert resealed(payload, 8, "<I", 1) == payload
    with pytest.raises(SnapshotError, match=message):
        read_snapshot(resealed(payload, at, form, value), tiny.model().config, COMPUTED)


def test_another_model_or_another_use_is_refused():
    payload = state(45).to_snapshot(BLOCK, COMPUTED)
    config = tiny.model().config
    with pytest.raises(SnapshotError, match="parts; this model has"):
        read_snapshot(payload, ModelConfig.load(RELEASED), COMPUTED)
    with pytest.raises(SnapshotError, match="position 45, where 46 was asked for"):
        read_snapshot(payload, config, COMPUTED, 46)
    with pytest.raises(SnapshotError, match="block_tokens 32, where 64 was asked for"):
        read_snapshot(payload, config, COMPUTED, 45, 64)


def test_a_cache_that_does_not_fit_stays_as_it_was():
    source = state(45)
    snapshot = read_snapshot(source.to_snapshot(BLOCK, COMPUTED), tiny.model().config, COMPUTED)
    assert (snapshot.position, snapshot.blocks) == (45, 1)
    assert [p.kind for p in snapshot.pending] == [PartKind.PENDING] * 2
    empty = tiny.model().new_cache()
    with pytest.raises(CacheError, match="needs a fresh cache with 32 tokens loaded"):
        empty.from_snapshot(snapshot, source.token_ids)
    with pytest.raises(CacheError, match="needs a fresh cache"):
        source.from_snapshot(snapshot, source.token_ids)
    empty.load_block(0, BLOCK, source.block_sections(0, BLOCK))
    with pytest.raises(CacheError, match="44 token ids for a snapshot at position 45"):
        empty.from_snapshot(snapshot, source.token_ids[:44])
    assert empty.loaded_tokens == 32
    empty.from_snapshot(snapshot, source.token_ids)
    assert_same(cache_bytes(source), cache_bytes(empty))
    with pytest.raises(CacheError, match="an empty cache"):
        tiny.model().new_cache().to_snapshot(BLOCK, COMPUTED)
