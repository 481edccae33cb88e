"""What a request takes from the store, computes and leaves there."""

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import BLOCK_TOKENS, WINDOW

from kvstore import Tier
from model_adapter.errors import InputError
from model_adapter.session import CachedSession, PrefixOutcome, StoreBlocks, generate_with_store

TOKENS = 8


def test_a_warm_turn_computes_the_replay_and_the_suffix_only(tmp_path):
    ids = tiny.prompt(150)
    with tiny.store(tmp_path) as client:
        cold = tiny.session(client).generate(ids, TOKENS).report
        warm = tiny.session(client).generate(ids, TOKENS).report
    assert (cold.outcome, warm.outcome) == (PrefixOutcome.MISS, PrefixOutcome.HIT)
    assert (cold.encoder_positions, cold.decoder_positions) == (150, WINDOW)
    hit = 4 * BLOCK_TOKENS
    assert warm.hit_tokens == hit
    assert warm.replayed_tokens == WINDOW
    assert warm.encoder_positions == WINDOW + (150 - hit)
    assert warm.decoder_positions == WINDOW
    assert warm.fetched_bytes == 4 * tiny.namespace().layout.block_bytes
    assert warm.hit_blocks == {Tier.DRAM: 4}
    assert (warm.stored_blocks, warm.present_blocks) == (0, 0)


def test_exact_mode_runs_every_computed_position_through_both_halves(tmp_path):
    ids = tiny.prompt(150)
    with tiny.store(tmp_path) as client:
        cold = tiny.session(client, mode="exact").generate(ids, TOKENS).report
        warm = tiny.session(client, mode="exact").generate(ids, TOKENS).report
    assert (cold.encoder_positions, cold.decoder_positions) == (150, 150)
    computed = WINDOW + (150 - 4 * BLOCK_TOKENS)
    assert (warm.encoder_positions, warm.decoder_positions) == (computed, computed)


def test_answers_are_those_of_the_model_alone(tmp_path):
    ids = tiny.prompt(150)
    with tiny.store(tmp_path) as client:
        cold = tiny.session(client).generate(ids, TOKENS)
        warm = tiny.session(client).generate(ids, TOKENS)
    assert cold.token_ids == tiny.plain(ids, TOKENS)
    assert warm.token_ids == tiny.replayed(ids, tiny.rows_of(ids)[:4], TOKENS)


def test_blocks_outlive_the_process_of_the_store(tmp_path):
    ids = tiny.prompt(150)
    with tiny.store(tmp_path) as client:
        tiny.session(client).generate(ids, TOKENS)
    with tiny.store(tmp_path) as client:
        warm = tiny.session(client).generate(ids, TOKENS)
    assert warm.report.hit_blocks == {Tier.SSD: 4}
    assert warm.report.tiers == "ssd 4"
    assert warm.token_ids == tiny.replayed(ids, tiny.rows_of(ids)[:4], TOKENS)


def test_a_hit_on_the_whole_prompt_gives_up_its_last_block(tmp_path):
    ids = tiny.prompt(4 * BLOCK_TOKENS)
    with tiny.store(tmp_path) as client:
        tiny.session(client).generate(ids, 1)
        warm = tiny.session(client).generate(ids, 1)
    assert warm.report.hit_tokens == 3 * BLOCK_TOKENS
    assert warm.token_ids == tiny.replayed(ids, tiny.rows_of(ids)[:3], 1)
    # the block was there, so the recomputed one, which a replay approximates, is not taken
    assert (warm.report.stored_blocks, warm.report.present_blocks) == (0, 1)


def test_a_hit_within_the_window_is_not_taken(tmp_path):
    ids = tiny.prompt(WINDOW + 8)
    with tiny.store(tmp_path) as client:
        source = StoreBlocks(client, tiny.namespace(block_tokens=WINDOW))
        for expected in (PrefixOutcome.MISS, PrefixOutcome.TOO_SHORT):
            report = CachedSession(tiny.model(), source).generate(ids, 1).report
            assert report.outcome is expected
            assert report.encoder_positions == len(ids)
            assert report.fetched_bytes == 0


def test_a_prompt_without_a_full_block_asks_for_none(tmp_path):
    with tiny.store(tmp_path) as client:
        report = tiny.session(client).generate(tiny.prompt(BLOCK_TOKENS - 1), 1).report
        assert report.outcome is PrefixOutcome.MISS
        assert client.stat().lookup_blocks["miss"] == 0


def test_generated_tokens_are_kept_for_the_next_turn(tmp_path):
    ids = tiny.prompt(2 * BLOCK_TOKENS + 10)
    with tiny.store(tmp_path) as client:
        first = tiny.session(client).generate(ids, 30)
        # the last token is known but was never run, so only 29 of the 30 stand in the cache
        assert first.report.stored_blocks == (len(ids) + 29) // BLOCK_TOKENS == 3
        longer = np.concatenate([ids, first.token_ids, tiny.prompt(5, seed=1)])
        second = tiny.session(client, snapshots=False).generate(longer, 1)
    assert second.report.hit_tokens == 3 * BLOCK_TOKENS > len(ids)


def test_another_session_hits_what_the_prompts_share(tmp_path):
    shared = tiny.prompt(3 * BLOCK_TOKENS + 7)
    with tiny.store(tmp_path) as client:
        for seed in (1, 2):
            ids = np.concatenate([shared, tiny.prompt(70, seed)])
            report = tiny.session(client).generate(ids, 1).report
            assert report.hit_tokens == (0 if seed == 1 else 3 * BLOCK_TOKENS)


def test_the_first_writer_wins(tmp_path):
    ids = tiny.prompt(5 * BLOCK_TOKENS + 1)
    prefix = ids[: 3 * BLOCK_TOKENS + 1]
    with tiny.store(tmp_path) as client:
        tiny.session(client, snapshots=False).generate(prefix, 1)
        handle = client.open_namespace(tiny.namespace())
        keys = handle.block_keys(ids)
        tiny.session(client, snapshots=False).generate(ids, 1)  # blocks 3 and 4, behind a replay
        with client.acquire(handle, keys) as lease:
            kept = [bytes(s) for b in client.read(lease, keys[3:]) for s in b.sections]
        # a writer that computed them in full offers other bytes for the same keys
        cache = tiny.model().new_cache()
        tiny.model().prefill(cache, ids)
        offered = StoreBlocks(client, tiny.namespace()).store(ids, 0, cache)
        assert (offered.stored, offered.present) == (0, 5)
        mine = [bytes(s) for i in (3, 4) for s in cache.block_sections(i, BLOCK_TOKENS)]
        assert mine != kept
        with client.acquire(handle, keys) as lease:
            now = [bytes(s) for b in client.read(lease, keys[3:]) for s in b.sections]
    assert now == kept


def test_blocks_are_stored_as_chunks_finish(tmp_path):
    ids = tiny.prompt(150)
    seen = []

    class Watched(StoreBlocks):
        def store(self, token_ids, first, cache, images):
            counters = tiny.model().counters.snapshot()
            seen.append((first, cache.length, counters.decoder_positions))
            return super().store(token_ids, first, cache, images)

    with tiny.store(tmp_path) as client:
        source = Watched(client, tiny.namespace())
        report = CachedSession(tiny.model(), source, chunk_tokens=64).generate(ids, 1).report
    assert seen == [(0, 64, 0), (2, 128, 0)]
    assert report.stored_blocks == 4


@pytest.mark.parametrize("batch_bytes_max", [1, 8 << 20])
def test_batches_change_nothing(tmp_path, batch_bytes_max):
    ids = tiny.prompt(150)
    with tiny.store(tmp_path) as client:
        source = StoreBlocks(client, tiny.namespace(), batch_bytes_max)
        session = CachedSession(tiny.model(), source)
        session.generate(ids, 1)
        warm = session.generate(ids, TOKENS)
    assert warm.report.hit_tokens == 4 * BLOCK_TOKENS
    assert warm.token_ids == tiny.replayed(ids, tiny.rows_of(ids)[:4], TOKENS)


def test_a_full_store_refuses_and_the_request_goes_on(tmp_path):
    ids = tiny.prompt(40 * BLOCK_TOKENS)
    with tiny.store(tmp_path, dram={"budget_bytes": "64KiB"}, ssd=None) as client:
        lease = None
        first = tiny.session(client).generate(ids[: 10 * BLOCK_TOKENS], 1)
        handle = client.open_namespace(tiny.namespace())
        lease = client.acquire(handle, handle.block_keys(ids[: 10 * BLOCK_TOKENS]))
        assert lease.blocks == first.report.stored_blocks == 10
        second = tiny.session(client).generate(ids, 1)
        lease.release()
    assert second.report.hit_tokens == 10 * BLOCK_TOKENS
    assert second.report.refused_blocks > 0
    assert second.report.store_error is None


def test_without_a_store(tmp_path):
    ids = tiny.prompt(100)
    answer = CachedSession(tiny.model()).generate(ids, TOKENS)
    assert answer.report.outcome is PrefixOutcome.NO_STORE
    assert answer.token_ids == tiny.plain(ids, TOKENS)
    assert answer.report.to_json()["hit_blocks"] == {}


def test_stops_behind_a_stop_token_and_reports_each_token(tmp_path):
    ids = tiny.prompt(100)
    expected = tiny.plain(ids, TOKENS)
    seen = []
    answer = CachedSession(tiny.model()).generate(ids, TOKENS, (expected[2],), seen.append)
    assert answer.token_ids == seen == expected[:3]


def test_one_call_for_one_request(tmp_path):
    ids = tiny.prompt(100)
    with tiny.store(tmp_path) as client:
        answer = generate_with_store(tiny.model(), client, tiny.namespace(), ids, 3)
    assert answer.token_ids == tiny.plain(ids, 3)
    assert answer.report.stored_blocks == 3


def test_refuses_prompts_that_can_not_be_right():
    session = CachedSession(tiny.model())
    limit = tiny.model().config.positions_max
    with pytest.raises(InputError, match="a prompt of 0 tokens"):
        session.generate([], 1)
    with pytest.raises(InputError, match="max_tokens 0"):
        session.generate([5], 0)
    with pytest.raises(InputError, match=f"pass the model's {limit} positions"):
        session.generate(np.zeros(limit, np.uint32), 2)
