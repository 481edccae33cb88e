"""Prefill here, decode there: the same tokens, early blocks, and hand-overs that can't be used."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import tiny_checkpoint as tiny
from cache_bytes import assert_same, cache_bytes, draft_bytes
from drafting import drafter
from image_prompts import START, embeddings, picture, prompt
from tiny_checkpoint import BLOCK_TOKENS

from kvstore import ImageSpan, PutOutcome
from kvstore.errors import Unavailable
from model_adapter.decoding import SamplingParams, generate
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import HandoverLost, HandoverUnusable, SnapshotError
from model_adapter.handover import (
    Announcement,
    HandoverRecord,
    Sampling,
    Waiting,
    announced,
    continued,
    hand_over,
    receive,
)
from model_adapter.handover.record import PROMPT_SUFFIX, RECORD_HEAD_BYTES
from model_adapter.session import CachedSession, SnapshotOutcome, StoreBlocks
from model_adapter.sizes import estimate
from model_adapter.snapshot.plan import header_bytes

IDS = tiny.prompt(5 * BLOCK_TOKENS + 13)
TOKENS = 10
GREEDY = SamplingParams(TOKENS)
SAMPLED = SamplingParams(TOKENS, 0.9, 0.95, seed=7)


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


def drafts_of(speculate: bool) -> SequenceDrafts | None:
    return SequenceDrafts(drafter(tiny.model()), verify_threshold=0) if speculate else None


def handed(client, params=GREEDY, ids=IDS, speculate=False, **options):
    session = tiny.session(client, chunk_tokens=64)
    drafts = drafts_of(speculate)
    return hand_over(session, client, tiny.namespace(), "r", ids, params, drafts=drafts, **options)


def received(client, drafts=None, wait_s=5.0, session=None):
    waiting = Waiting(client, tiny.namespace(), "r", wait_s)
    return receive(waiting, session or tiny.session(client), announced(waiting), drafts)


def answered(client, speculate=False, tokens=TOKENS, stop_ids=()):
    """Tokens and cache at the decode node."""
    drafts, session = drafts_of(speculate), tiny.session(client)
    taken = received(client, drafts, session=session)
    request = session.request(taken.token_ids, tokens, drafts=drafts)
    request.go_on(taken.prefix)
    decode = continued(taken.record, drafts)
    answer = request.answer(None, tokens, stop_ids, None, decode)
    return answer, request.cache, drafts


def one_process(params, speculate=False, rows=None, ids=IDS):
    """The same in one cache, without any store."""
    model, cache, drafts = tiny.model(), tiny.model().new_cache(), drafts_of(speculate)
    observer = drafts.observer if drafts else None
    logits = model.prefill(cache, ids, "bounded", 64, rows, observer=observer)
    return list(generate(model, cache, logits, params, (), drafts)), cache, drafts


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_and_state_are_those_of_one_process(client, params, speculate):
    expected, cache, kept = one_process(params, speculate)
    done = handed(client, params, speculate=speculate)
    assert done.first_token == expected[0]
    answer, mine, drafts = answered(client, speculate)
    assert answer.token_ids == expected
    assert_same(cache_bytes(mine), cache_bytes(cache))
    assert answer.report.snapshot is SnapshotOutcome.HIT
    assert answer.report.hit_tokens == len(IDS)
    if speculate:
        assert draft_bytes(drafts.windows) == draft_bytes(kept.windows)
    # the record is still there: another node that takes over says the same
    assert answered(client, speculate)[0].token_ids == expected


@pytest.mark.parametrize("speculate", [False, True])
def test_nodes_need_not_agree_on_drafts(client, speculate):
    expected, _, _ = one_process(SAMPLED)
    handed(client, SAMPLED, speculate=speculate)
    assert answered(client, speculate=not speculate)[0].token_ids == expected


def test_an_answer_that_ends_with_its_first_token(client):
    expected, _, _ = one_process(GREEDY)
    handed(client)
    assert answered(client, tokens=1)[0].token_ids == expected[:1]
    assert answered(client, stop_ids=expected[:1])[0].token_ids == expected[:1]


def test_images_in_the_prompt(client):
    one = prompt([picture(1)], START, 40)
    images = [placed.image for placed in one.images]
    expected, cache, _ = one_process(GREEDY, rows=embeddings(one), ids=one.token_ids)
    handed(client, ids=one.token_ids, images=images)
    # the names of the images are enough to go on
    session = tiny.session(client)
    taken = received(client, session=session)
    request = session.request(taken.token_ids, TOKENS, spans=one.spans)
    request.go_on(taken.prefix)
    answer = request.answer(None, TOKENS, (), None, continued(taken.record))
    assert answer.token_ids == expected
    assert_same(cache_bytes(request.cache), cache_bytes(cache))
    # and what it left behind is found by the next turn, which has them as pixels
    turn = [*one.token_ids, *expected]
    hit = tiny.session(client).generate(turn, 1, images=images).report
    assert hit.hit_tokens == len(turn) - 1


def test_what_is_handed_over_has_the_size_of_the_arithmetic(client):
    config = tiny.model().config
    for speculate in (False, True):
        done = handed(client, speculate=speculate)
        sizes = estimate(config, len(IDS))
        rows = done.record_bytes - RECORD_HEAD_BYTES - header_bytes(config, speculate)
        without = 0 if speculate else sizes.dspark_windows
        # the first token is in the record's head
        assert done.block_bytes + rows + 4 == sizes.handover - without
        assert done.blocks == 5


class Paced(StoreBlocks):
    """The prefill's blocks, which wait for the decode node to have fetched the ones before."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.stored, self.go = threading.Event(), threading.Event()

    def store(self, *args):
        done = super().store(*args)
        self.stored.set()
        assert self.go.wait(30)
        return done


def test_blocks_are_fetched_while_the_prefill_runs(client, monkeypatch):
    source = Paced(client, tiny.namespace())
    session = CachedSession(tiny.model(), source, chunk_tokens=64)
    args = (session, client, tiny.namespace(), "r", IDS, GREEDY)
    prefill = threading.Thread(target=hand_over, args=args)
    load = StoreBlocks.load
    fetched = []

    def load_watched(self, *args):
        loaded = load(self, *args)
        fetched.append(loaded.blocks)
        source.go.set()
        return loaded

    monkeypatch.setattr(StoreBlocks, "load", load_watched)
    prefill.start()
    assert source.stored.wait(30)
    taken = received(client, wait_s=30)
    prefill.join()
    assert fetched[0] == 2
    assert 2 <= taken.early_blocks <= sum(fetched) == 5
    assert taken.prefix.cache.length == len(IDS)
    assert taken.prefix.loaded.payload_bytes == 5 * tiny.namespace().layout.block_bytes


def test_nothing_came_in_time(client):
    start = time.monotonic()
    with pytest.raises(HandoverLost, match=r"the prompt of r did not come within 0.2 s.*retry"):
        received(client, wait_s=0.2)
    handed(client)
    handle = client.open_namespace(tiny.namespace())
    client.drop_handover(handle, "r")
    with pytest.raises(HandoverLost, match=r"the hand-over of r did not come within 0.2 s"):
        received(client, wait_s=0.2)
    assert time.monotonic() - start < 60


def test_one_that_expired_did_not_come(client):
    handed(client, ttl_s=0.05)
    time.sleep(0.1)
    with pytest.raises(HandoverLost, match="has expired"):
        received(client, wait_s=0.1)


def test_a_store_that_is_away_is_asked_until_the_end(client, monkeypatch):
    wait, match = client.wait_handover, client.match
    away = []

    def match_known(*args):
        assert not away, "blocks are looked for in a store that is away"
        return match(*args)

    monkeypatch.setattr(client, "match", match_known)
    lost = iter(range(3))

    def wait_lost(handle, name, wait_s):
        away[:] = [1] if name == "r" and next(lost, None) is not None else []
        if away:
            raise Unavailable("gone for a while")
        return wait(handle, name, wait_s)

    handed(client)
    monkeypatch.setattr(client, "wait_handover", wait_lost)
    assert received(client, wait_s=20).prefix.cache.length == len(IDS)
    lost = iter(range(10**6))
    with pytest.raises(HandoverLost, match="the store: gone for a while"):
        received(client, wait_s=0.2)


def test_blocks_that_have_gone_make_it_unusable(client):
    handed(client)
    client.flush()
    client.evict()
    with pytest.raises(HandoverUnusable, match=r"only 0 of the 5 blocks.*--recompute"):
        received(client)


def replaced(client, **changes) -> None:
    """Another record in the place of what was handed over."""
    handle = client.open_namespace(tiny.namespace())
    record = HandoverRecord.from_bytes(client.wait_handover(handle, "r", 0))
    if "payload" in changes:
        payload = changes["payload"](bytearray(record.to_bytes()))
    else:
        payload = replace(record, **changes).to_bytes()
    assert client.put_handover(handle, "r", payload) is PutOutcome.STORED


def flipped(payload: bytearray) -> bytearray:
    payload[-1] ^= 1
    return payload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_key": bytes(32)}, "another prompt's"),
        ({"snapshot": b""}, "0 bytes are no snapshot"),
        ({"payload": flipped}, "does not match its checksum"),
        ({"payload": lambda p: p[:-5]}, "a hand-over record with a snapshot of"),
        ({"payload": lambda p: p[:10]}, "10 bytes are not a hand-over record"),
    ],
)
def test_a_record_that_does_not_fit_is_unusable(client, changes, message):
    handed(client)
    replaced(client, **changes)
    with pytest.raises(HandoverUnusable, match=message):
        received(client)


def test_one_of_another_mode_is_unusable(client):
    handed(client)
    with pytest.raises(HandoverUnusable, match="can't go on as a exact"):
        received(client, session=tiny.session(client, mode="exact"))


def test_a_store_that_does_not_take_it_is_named(tmp_path):
    with (
        tiny.store(tmp_path, windows={"budget_bytes": 0}) as client,
        pytest.raises(HandoverLost, match=r"no room for the announced prompt .*NO_SPACE"),
    ):
        handed(client)
    small = {"dram": {"budget_bytes": "64KiB"}, "windows": {"budget_bytes": "1MiB"}}
    with tiny.store(tmp_path / "b", ssd=None, **small) as client:
        first = tiny.prompt(10 * BLOCK_TOKENS, seed=2)
        tiny.session(client).generate(first, 1)
        handle = client.open_namespace(tiny.namespace())
        with (
            client.acquire(handle, handle.block_keys(first)),
            pytest.raises(HandoverLost, match=r"refused \d+ of its blocks"),
        ):
            handed(client, ids=tiny.prompt(40 * BLOCK_TOKENS))


def test_a_name_used_again_hands_out_nothing_of_before(client):
    handed(client)
    session = tiny.session(client)
    session.request = failing(session.request)
    with pytest.raises(RuntimeError, match="stop here"):
        hand_over(session, client, tiny.namespace(), "r", IDS[:50], GREEDY)
    with pytest.raises(HandoverLost, match="the hand-over of r"):
        received(client, wait_s=0.1)


def failing(make):
    def request(*args, **options):
        made = make(*args, **options)

        def prefill():
            raise RuntimeError("stop here")

        made.prefill = prefill
        return made

    return request


ANNOUNCEMENT = Announcement(
    np.arange(300, dtype=np.uint32), (ImageSpan(5, 20, bytes(range(32))),), Sampling(0.5, 0.25, 9)
)


def test_an_announcement_comes_back_as_it_was():
    back = Announcement.from_bytes(ANNOUNCEMENT.to_bytes())
    assert np.array_equal(back.token_ids, ANNOUNCEMENT.token_ids)
    assert (back.images, back.sampling) == (ANNOUNCEMENT.images, ANNOUNCEMENT.sampling)


@pytest.mark.parametrize("whole", [True, False])
def test_damaged_bytes_are_an_error(whole):
    record = HandoverRecord(bytes(32), 300, 5, 1, Sampling(0.5, 0.25, 9), b"snapshot")
    kind, payload = (Announcement, ANNOUNCEMENT.to_bytes())
    if not whole:
        kind, payload = HandoverRecord, record.to_bytes()
        assert kind.from_bytes(payload) == record
    for cut in range(len(payload)):
        with pytest.raises(SnapshotError):
            kind.from_bytes(payload[:cut])
    # the snapshot in a record has a checksum of its own
    for at in range(len(payload) if whole else RECORD_HEAD_BYTES):
        damaged = bytearray(payload)
        damaged[at] ^= 0x40
        with pytest.raises(SnapshotError):
            kind.from_bytes(damaged)


def test_an_announcement_that_can_not_be_read(client):
    handle = client.open_namespace(tiny.namespace())
    client.put_handover(handle, "r" + PROMPT_SUFFIX, b"something else")
    with pytest.raises(HandoverUnusable, match="14 bytes are not an announced prompt"):
        received(client)
