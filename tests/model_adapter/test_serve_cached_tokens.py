"""What the endpoint says of the store: cached tokens that grow turn by turn, and a lost store."""

import os
import signal
import time

import pytest
import tiny_checkpoint as tiny
from serving import NAME, chatting, tokenizer
from tiny_checkpoint import BLOCK_TOKENS

import kvstore
from model_adapter.demo.conversations import training_texts
from model_adapter.demo.daemon import Daemon
from model_adapter.dspark import Drafter
from model_adapter.serve.sampling import Choosing
from model_adapter.tokenizer import decode_answer

TEXTS = [text[:300] for text in training_texts()]


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


def ask(api, messages, **options):
    options = {"max_tokens": 12, "temperature": 0} | options
    return api.chat.completions.create(model=NAME, messages=messages, **options)


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_cached_tokens_grow_turn_by_turn(client):
    messages = [{"role": "system", "content": TEXTS[0]}]
    usages = []
    with chatting(client) as api:
        for turn in range(4):
            messages.append({"role": "user", "content": TEXTS[turn + 1]})
            answer = ask(api, messages)
            messages.append(answer.choices[0].message.to_dict())
            usages.append(answer.usage)
    hits = [u.prompt_tokens_details.cached_tokens for u in usages]
    assert hits[0] == 0
    for before, now, hit in zip(usages, usages[1:], hits[1:], strict=False):
        # all of the last prompt, and of its answer as far as its text is the tokens that were drawn
        assert before.prompt_tokens <= hit < now.prompt_tokens
    assert hits == sorted(set(hits))


def test_without_snapshots_they_are_whole_blocks(client):
    messages = [{"role": "user", "content": TEXTS[0]}]
    session = tiny.session(client, snapshots=False)
    with chatting(session=session) as api:
        first = ask(api, messages)
        messages += [first.choices[0].message.to_dict(), {"role": "user", "content": TEXTS[1]}]
        second = ask(api, messages)
    least = first.usage.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert least <= cached(second) < second.usage.prompt_tokens
    assert cached(second) % BLOCK_TOKENS == 0


def test_a_stream_says_it_too(client):
    messages = [{"role": "user", "content": TEXTS[0]}]
    with chatting(client) as api:
        first = ask(api, messages)
        *_, last = ask(api, messages, stream=True, stream_options={"include_usage": True})
    assert cached(first) == 0
    tokens = first.usage.prompt_tokens
    hit = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(last) == hit > 0


def test_completions_share_the_prefixes_of_token_ids(client):
    ids = tiny.prompt(150).tolist()
    with chatting(client) as api:
        answers = [
            api.completions.create(model=NAME, prompt=ids, max_tokens=4, temperature=0)
            for _ in range(2)
        ]
    assert [cached(a) for a in answers] == [0, 128]
    replayed = tiny.replayed(ids, tiny.rows_of(ids)[:4], 4)
    assert answers[1].choices[0].text == decode_answer(tokenizer(), replayed)


def test_a_store_that_is_lost_costs_the_hits_and_one_that_is_back_brings_them(tmp_path):
    messages = [{"role": "user", "content": TEXTS[0]}]
    with (
        Daemon(tmp_path, 4 << 20, 256 << 20) as daemon,
        kvstore.connect(daemon.url, deadline_s=2.0) as client,
        chatting(client) as api,
    ):
        cold = ask(api, messages)
        warm = ask(api, messages)
        client.flush()
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()
        lost = [ask(api, messages) for _ in range(2)]
        with Daemon(tmp_path, 4 << 20, 256 << 20):
            deadline = time.monotonic() + 30
            while not cached(back := ask(api, messages)) and time.monotonic() < deadline:
                pass
    assert cached(warm) == cached(back) > 0
    assert [cached(a) for a in (cold, *lost)] == [0, 0, 0]
    for answer in lost:
        assert answer.choices[0].message.content == cold.choices[0].message.content
    assert back.choices[0].message.content == warm.choices[0].message.content


def test_drafts_change_no_answer():
    messages = [{"role": "user", "content": TEXTS[0]}]
    drawn = []

    class Counting(Drafter):
        def draft(self, *args):
            draft = super().draft(*args)
            drawn.append(draft)
            return draft

    def answers(choose):
        ways = ({"max_tokens": 20}, {"temperature": 1.2, "seed": 5})
        with chatting(choose=choose) as api:
            return [ask(api, messages, **way).choices[0].message.content for way in ways]

    assert answers(Choosing()) == answers(Choosing(Counting(tiny.model())))
    assert len(drawn) > 2
