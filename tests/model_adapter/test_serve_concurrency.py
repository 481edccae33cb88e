"""Several clients at once, too many, and those that go away."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tiny_checkpoint as tiny
from serving import NAME, chatting, tokenizer

from model_adapter.serve import ServeLimits
from model_adapter.serve.sampling import Choice
from model_adapter.tokenizer import decode_answer, encode_prompt

A_WHILE_S = 30.0
LETTER = 70


class Talker:
    """A `choose` whose model talks on and on, a token at a time as it is let to."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.said = 0

    def __call__(self, temperature, top_p, seed) -> Choice:
        def decode(model, cache, logits, max_tokens, stop_ids):
            self.begun.release()
            try:
                for _ in range(max_tokens):
                    assert self.allowed.acquire(timeout=A_WHILE_S)
                    self.said += 1
                    yield LETTER
            finally:
                self.ended.release()

        return Choice(decode)


def ask(api, prompt="Hello", **options):
    options = {"max_tokens": 8, "temperature": 0} | options
    return api.completions.create(model=NAME, prompt=prompt, **options)


def health(api) -> dict:
    return api.get("/../health", cast_to=object)


def until(condition) -> bool:
    end = time.monotonic() + A_WHILE_S
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return true


def test_concurrent_requests_get_the_answers_that_they_get_alone():
    prompts = [f"Number {i} of several" * (i + 1) for i in range(6)]
    expected = [
        decode_answer(tokenizer(), tiny.plain(encode_prompt(tokenizer(), p), 8)) for p in prompts
    ]
    with chatting() as api, ThreadPoolExecutor(len(prompts)) as pool:
        whole = list(pool.map(lambda p: ask(api, p).choices[0].text, prompts))
        streams = list(pool.map(lambda p: list(ask(api, p, stream=True)), prompts))
    # an end token would be shown by the expectation only
    expected = [text.partition("<｜end▁of▁sentence｜>")[0] for text in expected]
    assert whole == expected
    assert ["".join(c.choices[0].text for c in s) for s in streams] == expected


def test_more_requests_than_there_is_room_for_are_turned_away():
    talker = Talker()
    limits = ServeLimits(requests_max=2, shutdown_s_max=2)
    with chatting(choose=talker, limits=limits) as api, ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(ask, api) for _ in range(2)]
        assert until(lambda: health(api)["waiting"] == 1)
        assert health(api) == {"status": "ok", "requests": 2, "waiting": 1}
        with pytest.raises(openai.InternalServerError) as caught:
            ask(api)
        assert caught.value.status_code == 503
        assert caught.value.code == "overloaded"
        assert caught.value.response.headers["retry-after"] == "1"
        talker.allowed.release(16)
        assert [f.result(A_WHILE_S).usage.completion_tokens for f in inside] == [8, 8]
        talker.allowed.release(8)
        assert ask(api).usage.completion_tokens == 8


def test_the_official_client_comes_back_by_itself():
    talker = Talker()
    limits = ServeLimits(requests_max=1, shutdown_s_max=2)
    with chatting(choose=talker, limits=limits) as api, ThreadPoolExecutor(2) as pool:
        one = pool.submit(ask, api)
        assert talker.begun.acquire(timeout=A_WHILE_S)
        two = pool.submit(ask, api.with_options(max_retries=5))
        talker.allowed.release(16)
        assert one.result(A_WHILE_S).usage.completion_tokens == 8
        assert two.result(A_WHILE_S).usage.completion_tokens == 8


@pytest.mark.parametrize("let_be_said", [0, 3])
def test_a_reader_that_goes_away_ends_its_answer_at_the_next_token(let_be_said):
    talker = Talker()
    with chatting(choose=talker) as api:
        stream = ask(api, stream=True, max_tokens=1000)
        for _ in range(let_be_said):
            talker.allowed.release()
            next(stream)
        assert talker.begun.acquire(timeout=A_WHILE_S)
        stream.close()
        assert until(lambda: health(api)["requests"] == 0)
        talker.allowed.release(100)
        assert talker.ended.acquire(timeout=A_WHILE_S)
        # the token that was being made when the reader went is the last, if one was
        assert talker.said in (let_be_said, let_be_said + 1)


def test_a_client_that_waits_no_longer_ends_its_answer():
    talker = Talker()
    with chatting(choose=talker) as api:
        with pytest.raises(openai.APITimeoutError):
            ask(api.with_options(timeout=0.5), max_tokens=1000)
        assert talker.begun.acquire(timeout=A_WHILE_S)
        assert until(lambda: health(api)["requests"] == 0)
        talker.allowed.release(100)
        assert talker.ended.acquire(timeout=A_WHILE_S)
        assert talker.said == 1


def test_a_waiting_client_that_goes_away_is_never_answered():
    talker = Talker()
    with chatting(choose=talker) as api, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, api)
        assert talker.begun.acquire(timeout=A_WHILE_S)
        with pytest.raises(openai.APITimeoutError):
            ask(api.with_options(timeout=0.5), max_tokens=1000)
        assert until(lambda: health(api) == {"status": "ok", "requests": 1, "waiting": 0})
        talker.allowed.release(8)
        assert first.result(A_WHILE_S).usage.completion_tokens == 8
        assert not talker.begun.acquire(timeout=0.2)


def test_a_client_that_takes_nothing_is_given_up():
    talker = Talker()
    talker.allowed.release(1_000_000)
    limits = ServeLimits(send_s_max=0.3, shutdown_s_max=2)
    body = json.dumps({"model": NAME, "prompt": "Hello", "max_tokens": 16000, "stream": True})
    with chatting(choose=talker, limits=limits) as api, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((api.base_url.host, api.base_url.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        client.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        assert talker.begun.acquire(timeout=A_WHILE_S)
        assert until(lambda: health(api)["requests"] == 0)
        sent = b""
        client.settimeout(A_WHILE_S)
        while part := client.recv(1 << 16):
            sent += part
    assert sent.startswith(b"HTTP/1.1 200 OK")
    assert b"[DONE]" not in sent


def test_a_silent_stream_is_kept_alive():
    talker = Talker()
    limits = ServeLimits(keep_alive_s=0.05, shutdown_s_max=2)
    with chatting(choose=talker, limits=limits) as api:
        with api.completions.with_streaming_response.create(
            model=NAME, prompt="Hello", max_tokens=1, stream=True
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            talker.allowed.release()
            rest = [line for line in lines if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 3


def test_a_server_that_is_stopped_ends_running_and_waiting_answers():
    talker = Talker()
    limits = ServeLimits(shutdown_s_max=1)
    with ThreadPoolExecutor(2) as pool:
        with chatting(choose=talker, limits=limits) as api:
            running = pool.submit(lambda: list(ask(api, stream=True, max_tokens=1000)))
            assert talker.begun.acquire(timeout=A_WHILE_S)
            waiting = pool.submit(ask, api)
            assert until(lambda: health(api)["waiting"] == 1)
            talker.allowed.release()
            stopping = threading.Timer(2.5, talker.allowed.release)
            stopping.start()
        for answer in (running, waiting):
            with pytest.raises(openai.APIConnectionError):
                answer.result(A_WHILE_S)
    assert not [t for t in threading.enumerate() if t.name == "model"]
