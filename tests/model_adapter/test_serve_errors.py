"""Requests that can't be answered, each with a status and OpenAI's form of an error."""

import json
import urllib.error
import urllib.request

import pytest
from serving import NAME, serving

from model_adapter.serve import ServeLimits
from model_adapter.serve.sampling import Choice

LIMITS = ServeLimits(body_bytes_max=20_000, body_s_max=1.0, shutdown_s_max=2)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url():
    with serving(limits=LIMITS) as url:
        yield url


def post(url: str, body, headers=None, path="/chat/completions") -> urllib.request.Request:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json"} | (headers or {})
    return urllib.request.Request(url + path, data, given)


def refused(request: urllib.request.Request) -> tuple[int, bytes]:
    """Status and body of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        return answer.code, answer.read()


def call(*request, **more) -> tuple[int, dict]:
    """Status and JSON of a request that fails."""
    status, body = refused(post(*request, **more))
    return status, json.loads(body)


def chat(**parameters) -> dict:
    return {"model": NAME, "messages": HELLO, "max_tokens": 1} | parameters


WRONG = [
    (chat(n=2), "n", "unsupported_value", "n = 2 is not supported here; leave it out or set it to"),
    (chat(logprobs=True), "logprobs", "unsupported_value", "set it to False"),
    (chat(presence_penalty=0.5), "presence_penalty", "unsupported_value", "0.5"),
    (chat(logit_bias={"5": 1}), "logit_bias", "unsupported_value", "logit_bias"),
    (
        chat(tool_choice="required", tools=[TOOL]),
        "tool_choice",
        "unsupported_value",
        "none or auto",
    ),
    (chat(functions=[TOOL]), "functions", "unsupported_value", "functions"),
    (chat(top_k=5), "top_k", "unknown_parameter", "unknown parameter 'top_k'; there are max_"),
    (chat(stream_options={"x": 1}), "stream_options.x", "unknown_parameter", "stream_options.x"),
    ({"model": NAME}, "messages", "missing_required_parameter", "'messages' is missing"),
    ({"messages": HELLO}, "model", "missing_required_parameter", "'model' is missing"),
    (chat(temperature=2.1), "temperature", "invalid_value", "less than or equal to 2; it is 2.1"),
    (chat(temperature="0"), "temperature", "invalid_value", "it is '0'"),
    (chat(top_p=0), "top_p", "invalid_value", "greater than 0"),
    (chat(max_tokens=0), "max_tokens", "invalid_value", "greater than or equal to 1; it is 0"),
    (chat(seed=2**63), "seed", "invalid_value", "seed"),
    (chat(stop=5), "stop", "invalid_value", "it is 5"),
    (chat(stop=["a"] * 5), "stop", None, "stop has 5 strings; 4 at most"),
    (chat(stop=""), "stop", None, "1 to 1024 characters, not 0"),
    (chat(messages=[]), "messages", None, "at least one message"),
    (chat(messages=[{"role": "king"}]), "messages[0].role", None, "not 'king'"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", None, "not 5"),
    (chat(tools=[{}]), "tools[0]", None, "must be a function with a name"),
    (chat(reasoning_effort=200), "reasoning_effort", None, "not 200"),
    (chat(max_tokens=20000), None, "context_length_exceeded", "this model has 16384 positions"),
    ([], None, None, "the body must be a JSON object"),
    (b"{", None, None, "the body is not JSON"),
    (b"[" * 15000, None, None, "the body is not JSON"),
]


@pytest.mark.parametrize(("body", "param", "code", "message"), WRONG)
def test_what_is_wrong_with_a_request_is_said(url, body, param, code, message):
    status, answer = call(url, body)
    assert status == 400
    error = answer["error"]
    assert message in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": param, "code": code}


def test_a_stream_that_can_not_begin_is_refused_by_its_status(url):
    status, answer = call(url, chat(stream=True, messages=[]))
    assert status == 400
    assert "messages" in answer["error"]["message"]


def test_another_model_is_not_found(url):
    status, answer = call(url, chat(model="gpt-x"))
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "'gpt-x' is not served here; there is 'tiny'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/embeddings", {}, 404), ("/chat/completions", None, 405), ("/models", {}, 405)],
)
def test_routes_and_methods_that_are_not_there(url, path, body, status):
    got, answer = call(url, body, path=path)
    assert got == status
    assert f"/v1{path}" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(url):
    status, answer = call(url, chat(messages=[{"role": "user", "content": "x" * 20_000}]))
    assert status == 413
    assert "more than 20000 bytes" in answer["error"]["message"]


def test_a_body_that_does_not_come(url):
    # the length promises more than is sent
    status, answer = call(url, b"{", {"content-length": "10"})
    assert status == 408
    assert "within 1 s" in answer["error"]["message"]


def test_what_a_web_page_may_send_unasked_is_refused(url):
    status, answer = call(url, chat(), {"content-type": "text/plain"})
    assert status == 415
    assert "not 'text/plain'" in answer["error"]["message"]


def test_a_host_that_is_not_this_one_is_refused(url):
    status, _ = refused(post(url, chat(), {"host": "evil.example:80"}))
    assert status == 400


def test_a_failing_model_is_a_server_error_and_the_next_request_is_answered():
    fails = iter([True, True, False])

    def choose(temperature, top_p, seed):
        def decode(model, cache, logits, max_tokens, stop_ids):
            if next(fails):
                raise RuntimeError("secret")
            yield 5

        return Choice(decode)

    with serving(limits=LIMITS, choose=choose) as url:
        status, answer = call(url, chat())
        assert status == 500
        assert answer["error"]["type"] == "server_error"
        assert answer["error"]["message"] == "the server failed; see its log"
        with urllib.request.urlopen(post(url, chat(stream=True)), timeout=60) as stream:
            *_, last = [line for line in stream.read().decode().splitlines() if line]
        assert json.loads(last.removeprefix("data: ")) == answer
        with urllib.request.urlopen(post(url, chat()), timeout=60) as whole:
            assert json.load(whole)["usage"]["completion_tokens"] == 1
