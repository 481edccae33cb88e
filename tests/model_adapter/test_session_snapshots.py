"""A hit whose windows are there goes on as if it had never stopped; without them it is a replay."""

import time
from functools import cache

import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
from cache_bytes import assert_same, cache_bytes, draft_bytes
from drafting import Coached, drafter
from image_prompts import START, embeddings, picture, prompt
from tiny_checkpoint import BLOCK_TOKENS, WINDOW

from kvstore import PutOutcome
from model_adapter.decoding import SamplingParams, generate
from model_adapter.dspark import SequenceDrafts
from model_adapter.generate import greedy
from model_adapter.model import Model
from model_adapter.session import CachedSession, PrefixOutcome, SnapshotOutcome, StoreBlocks

TOKENS = 4
IDS = tiny.prompt(150)


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


class Watched(CachedSession):
    """Keeps the cache of the last request. How fast this machine computes decides nothing."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.choice.computed = lambda tokens, seconds: None

    def request(self, *args, **options):
        self.last = super().request(*args, **options)
        return self.last


def watched(client, **options) -> Watched:
    return Watched(tiny.model(), StoreBlocks(client, tiny.namespace()), **options)


def uninterrupted(turns, model: Model, rows=None, mode="bounded", answers=TOKENS):
    """The cache of a conversation that stays in the process, and its answers. `turns`: what each
    adds to what is there; the last token of an answer is run with the next turn."""
    cache, said = model.new_cache(), []
    for i, added in enumerate(turns):
        ids = [*said[-1][-1:], *added] if said else added
        logits = model.prefill(cache, ids, mode, image_embeddings=rows if i == 0 else None)
        said.append(list(greedy(model, cache, logits, answers)))
    return cache, said


def test_turns_shorter_than_a_block_go_on_where_they_stopped(client):
    ids = tiny.prompt(9).tolist()
    first = watched(client).generate(ids, TOKENS)
    again = watched(client).generate([*ids, *first.token_ids, 20, 21], TOKENS)
    assert len(ids) + TOKENS + 2 < BLOCK_TOKENS
    assert again.report.outcome is PrefixOutcome.HIT
    assert again.report.hit_tokens == len(ids) + TOKENS - 1


def conversation(lengths) -> list[list[int]]:
    return [tiny.prompt(n, seed=40 + i).tolist() for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        ("bounded", (70, 9, 5)),  # within a block, at the end of a compression group
        ("exact", (71, 31, 40)),  # within a compression group, where a bounded one starts over
        ("bounded", (71, 31, 40)),
        ("bounded", (2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS - TOKENS, 1)),  # at a block's end
        ("bounded", (9, BLOCK_TOKENS, 2)),  # before the first block is full
    ],
)
def test_turns_equal_a_run_that_was_never_interrupted(client, mode, lengths):
    turns = conversation(lengths)
    cache, said = uninterrupted(turns, tiny.model(), mode=mode)
    session = watched(client, mode=mode)
    ids: list[int] = []
    for i, added in enumerate(turns):
        ids += added
        answer = session.generate(ids, TOKENS)
        assert answer.token_ids == said[i]
        report = answer.report
        if i:
            # all but the last token of the answer before, which was never run
            assert report.hit_tokens == len(ids) - len(added) - 1
            assert report.replayed_tokens == 0
            assert report.encoder_positions == len(added) + 1
            assert (report.outcome, report.snapshot) == (PrefixOutcome.HIT, SnapshotOutcome.HIT)
        ids += answer.token_ids
    assert_same(cache_bytes(session.last.cache), cache_bytes(cache))


def test_a_prompt_that_parts_behind_the_last_prompt_goes_on_there(client):
    """As where the next turn drops the reasoning of the last answer."""
    first = tiny.prompt(101)
    then = np.concatenate([first, tiny.prompt(30, seed=9)])
    tiny.session(client).generate(first, 20)
    answer = tiny.session(client).generate(then, TOKENS)
    assert (answer.report.hit_tokens, answer.report.replayed_tokens) == (101, 0)
    model, cache = tiny.model(), tiny.model().new_cache()
    model.prefill(cache, first)
    logits = model.prefill(cache, then[101:])
    assert answer.token_ids == list(greedy(model, cache, logits, TOKENS))


def test_it_equals_one_prefill_in_chunks_that_end_there(client):
    ids = tiny.prompt(150)
    tiny.session(client).generate(ids[:101], 1)
    session = watched(client)
    answer = session.generate(ids, TOKENS)
    assert answer.report.hit_tokens == 101
    model, cache = tiny.model(), tiny.model().new_cache()
    logits = model.prefill(cache, ids, chunk_tokens=101)
    assert answer.token_ids == list(greedy(model, cache, logits, TOKENS))
    assert_same(cache_bytes(session.last.cache), cache_bytes(cache))


def test_the_longest_that_lies_on_the_prompt_is_taken(client):
    ids = tiny.prompt(200)
    for length in (60, 90, 130):
        tiny.session(client).generate(ids[:length], 1)
    other = np.concatenate([ids[:120], tiny.prompt(30, seed=5)])
    assert tiny.session(client).generate(ids, 1).report.hit_tokens == 130
    assert tiny.session(client).generate(other, 1).report.hit_tokens == 90
    # the same prompt again has no token to compute behind its own end
    assert tiny.session(client).generate(ids[:90], 1).report.hit_tokens == 60


def test_images_in_the_prompt(client):
    one = prompt([picture(1)], START, 9)
    images = [placed.image for placed in one.images]
    turns = [one.token_ids.tolist(), tiny.prompt(20, seed=4).tolist()]
    cache, said = uninterrupted(turns, tiny.model(), rows=embeddings(one))
    session = watched(client)
    first = session.generate(turns[0], TOKENS, images=images)
    ids = [*turns[0], *first.token_ids, *turns[1]]
    second = session.generate(ids, TOKENS, images=images)
    assert [first.token_ids, second.token_ids] == said
    assert second.report.hit_tokens == len(ids) - 20 - 1
    assert_same(cache_bytes(session.last.cache), cache_bytes(cache))
    # the same tokens with another picture share nothing from the picture on
    others = [placed.image for placed in prompt([picture(2)], START, 9).images]
    report = session.generate(ids, 1, images=others).report
    assert (report.hit_tokens, report.snapshot) == (BLOCK_TOKENS, SnapshotOutcome.MISS)


def speculating(answer, seed: int):
    """Draft layers' guesses, some of them right, and a `decode` that verifies them."""
    drafts = Coached(drafter(tiny.model()), answer, 0.6, seed)

    def decode(model, cache, logits, max_tokens, stop_ids):
        params = SamplingParams(max_tokens, 0.8, 0.95, seed=3)
        yield from generate(model, cache, logits, params, stop_ids, drafts)

    return drafts, decode


def test_behind_speculative_decoding_draft_windows_included(client):
    model, added, tokens = tiny.model(), tiny.prompt(4, seed=8).tolist(), 12
    params = [SamplingParams(n, 0.8, 0.95, seed=3) for n in (tokens, 2)]
    kept = SequenceDrafts(drafter(model))
    cache, ids = model.new_cache(), tiny.prompt(75).tolist()
    logits = model.prefill(cache, ids, observer=kept.observer)
    said = list(generate(model, cache, logits, params[0], (), kept))
    drafts, decode = speculating(said, 1)
    session = watched(client)
    assert session.generate(ids, tokens, decode=decode, drafts=drafts).token_ids == said
    longer = [*ids, *said, *added]
    logits = model.prefill(cache, longer[cache.length :], observer=kept.observer)
    expected = list(generate(model, cache, logits, params[1], (), kept))
    drafts, decode = speculating(expected, 2)
    answer = session.generate(longer, 2, decode=decode, drafts=drafts)
    assert answer.token_ids == expected
    assert answer.report.hit_tokens == len(ids) + tokens - 1
    assert_same(cache_bytes(session.last.cache), cache_bytes(cache))
    # most of them came with the snapshot
    assert draft_bytes(drafts.windows) == draft_bytes(kept.windows)


def test_without_snapshots_every_hit_is_a_replay(client):
    ids = tiny.prompt(150)
    off = tiny.session(client, snapshots=False)
    assert off.generate(ids[:101], 1).report.stored_snapshots == 0
    tiny.session(client).generate(ids[:102], 1)
    report = off.generate(ids, 1).report
    assert report.snapshot is SnapshotOutcome.OFF
    assert (report.hit_tokens, report.replayed_tokens) == (3 * BLOCK_TOKENS, WINDOW)


def test_a_short_snapshot_does_not_stand_in_the_way_of_a_long_hit(client):
    ids = tiny.prompt(200)
    tiny.session(client, snapshots=False).generate(ids, 1)
    tiny.session(client).generate(ids[:70], 1)
    report = tiny.session(client).generate(ids, 1).report
    assert report.snapshot is SnapshotOutcome.SHORTER
    assert (report.hit_tokens, report.replayed_tokens) == (6 * BLOCK_TOKENS, WINDOW)


@cache
def replayed(blocks: int) -> list[int]:
    """The answer to `IDS` behind a replay of so many blocks."""
    return tiny.replayed(IDS, tiny.rows_of(IDS)[:blocks], TOKENS)


def replays(client, blocks: int, outcome: SnapshotOutcome) -> None:
    """The next request takes a replay of so many blocks, and says why."""
    answer = tiny.session(client).generate(IDS, TOKENS)
    report = answer.report
    assert report.snapshot is outcome
    assert report.hit_tokens == blocks * BLOCK_TOKENS
    assert report.replayed_tokens == WINDOW
    assert answer.token_ids == replayed(blocks)
    assert report.store_error is None


def warmed(client) -> np.ndarray:
    ids = IDS
    assert tiny.session(client).generate(ids[:101], 1).report.stored_snapshots == 1
    client.flush()  # what is not on SSD yet can't be evicted
    return ids


def test_evicted_blocks_leave_a_shorter_replay(client):
    ids = warmed(client)
    handle = client.open_namespace(tiny.namespace())
    assert client.evict(handle, handle.block_keys(ids)[2:3]) == 1
    replays(client, 2, SnapshotOutcome.MISS)


def test_blocks_that_go_between_lookup_and_reading_leave_a_replay(client, monkeypatch):
    warmed(client)
    acquire = client.acquire
    evicted = []

    def acquire_too_late(handle, keys, *rest):
        if not evicted:
            evicted.append(client.evict(handle, keys[2:3]))
        return acquire(handle, keys, *rest)

    monkeypatch.setattr(client, "acquire", acquire_too_late)
    replays(client, 2, SnapshotOutcome.GONE)
    assert evicted == [1]


@pytest.mark.parametrize("damage", ["gone", "truncated", "flipped", "foreign"])
def test_a_payload_that_is_gone_or_wrong_leaves_a_replay(client, monkeypatch, caplog, damage):
    ids = warmed(client)
    get = client.get_window

    def get_damaged(handle, key):
        payload = bytearray(get(handle, key))
        if damage == "gone":
            return None
        if damage == "flipped":
            payload[len(payload) // 2] ^= 4
        if damage == "foreign":
            cache = tiny.model().new_cache()
            tiny.model().prefill(cache, ids[:100])
            return bytes(cache.to_snapshot(BLOCK_TOKENS, tiny.session(client)._way.computed))
        return bytes(payload[:-1] if damage == "truncated" else payload)

    monkeypatch.setattr(client, "get_window", get_damaged)
    gone = damage == "gone"
    replays(client, 3, SnapshotOutcome.GONE if gone else SnapshotOutcome.UNUSABLE)
    assert gone or "going on without a window snapshot" in caplog.text


def test_an_expired_one_leaves_a_replay(client):
    ids = warmed(client)
    handle = client.open_namespace(tiny.namespace())
    payload = client.get_window(handle, handle.snapshot_key(ids[:101]))
    assert client.put_snapshot(handle, ids[:101], payload, ttl_s=0.05) is PutOutcome.STORED
    time.sleep(0.1)
    replays(client, 3, SnapshotOutcome.MISS)


def test_a_pool_that_is_too_small_refuses_and_the_request_goes_on(tmp_path):
    ids = tiny.prompt(101)
    for windows in ({"budget_bytes": 0}, {"payload_bytes_max": 4096}):
        with tiny.store(tmp_path, windows=windows) as client:
            answer = tiny.session(client).generate(ids, TOKENS)
            report = answer.report
        assert (report.stored_snapshots, report.refused_snapshots) == (0, 2)
        assert report.store_error is None
        assert len(answer.token_ids) == TOKENS


def test_one_of_another_mode_or_dtype_is_a_miss(client, tmp_path):
    ids = warmed(client)
    exact = tiny.session(client, mode="exact").generate(ids, 1).report
    assert exact.snapshot is SnapshotOutcome.UNUSABLE
    assert exact.replayed_tokens == WINDOW
    tiny.session(client).generate(ids[:101], 1)
    model = Model.load(tiny.checkpoint(), torch.bfloat16)
    session = CachedSession(model, StoreBlocks(client, tiny.namespace()))
    longer = np.concatenate([ids[:101], tiny.prompt(9)])
    assert session.generate(longer, 1).report.snapshot is SnapshotOutcome.UNUSABLE


def test_bfloat16_goes_on_too(client):
    model = Model.load(tiny.checkpoint(), torch.bfloat16)
    turns = conversation((75, 20))
    cache, said = uninterrupted(turns, model)
    session = Watched(model, StoreBlocks(client, tiny.namespace()))
    first = session.generate(turns[0], TOKENS)
    second = session.generate([*turns[0], *first.token_ids, *turns[1]], TOKENS)
    assert [first.token_ids, second.token_ids] == said
    assert second.report.snapshot is SnapshotOutcome.HIT
    assert_same(cache_bytes(session.last.cache), cache_bytes(cache))


def test_the_end_of_a_prompt_is_kept_once_the_first_token_is_out(client, monkeypatch):
    order = []
    put = client.put_snapshot

    def put_watched(handle, ids, payload, **options):
        order.append(("snapshot", len(ids)))
        return put(handle, ids, payload, **options)

    monkeypatch.setattr(client, "put_snapshot", put_watched)
    session = tiny.session(client)
    answer = session.generate(tiny.prompt(50), 3, on_token=lambda t: order.append(("token", t)))
    tokens = [("token", t) for t in answer.token_ids]
    assert order == [tokens[0], ("snapshot", 50), *tokens[1:], ("snapshot", 52)]
    assert answer.report.stored_snapshots == 2
    # an answer of one token ends where it began
    order.clear()
    assert session.generate(tiny.prompt(60), 1).report.stored_snapshots == 1
