"""`ds41f serve` as a process, and what it refuses."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import tiny_checkpoint as tiny
from serving import openai_client

from model_adapter import cli
from model_adapter.errors import InputError
from model_adapter.serve import ServeLimits
from model_adapter.serve.server import is_loopback, open_socket, parse_listen, url_of

A_WHILE_S = 60


@contextmanager
def process(*arguments):
    """A running server; yields the process and the line by which it says where it is."""
    command = [sys.executable, "-m", "model_adapter.cli", "serve", *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield running, running.stdout.readline().split()
    finally:
        running.kill()
        running.communicate()


def test_serves_what_the_last_server_left_in_the_store(tmp_path):
    arguments = ["--checkpoint", tiny.checkpoint(), "--listen", "127.0.0.1:0"]
    arguments += ["--store", f"file://{tmp_path / 'store'}", "--block-tokens", 32, "--speculate"]
    cached, texts, logs = [], [], []
    for _ in range(3):
        with process(*arguments) as (server, (name, _, url)):
            with openai_client(url) as api:
                answer = api.completions.create(
                    model=name, prompt=tiny.prompt(100).tolist(), max_tokens=4, temperature=0
                )
            server.send_signal(signal.SIGTERM)
            _, log = server.communicate(timeout=A_WHILE_S)
            assert server.returncode == 0
        assert name == "deepseek_v41"
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        texts.append(answer.choices[0].text)
        logs.append(log)
    assert cached == [0, 96, 96]
    assert texts[1] == texts[2]
    assert "prompt 100, hit 96 (ssd 3), replayed 16, generated 4" in logs[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:0"], "0.0.0.0 is an address that other machines reach"),
        (["--listen", "8041"], "--listen '8041' must be host:port"),
        (["--store", "unix:///nowhere/kv.sock", "--deadline-s", "1"], "no daemon answers"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
    ],
)
def test_what_the_caller_can_mend_is_one_line(monkeypatch, capsys, arguments, message):
    given = ["--checkpoint", str(tiny.checkpoint()), "--listen", "127.0.0.1:0", *arguments]
    monkeypatch.setattr("sys.argv", ["ds41f", "serve", *given])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("ds41f: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_port_in_use_is_said():
    with open_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"can't listen on 127.0.0.1:{port}: Address already"):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_addresses(text, expected):
    assert parse_listen(text) == expected
    assert is_loopback(expected[0])


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:70000", "host:-1"])
def test_addresses_that_are_none(text):
    with pytest.raises(InputError, match="must be host:port"):
        parse_listen(text)


def test_only_loopback_is_this_machine_s_own():
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("192.0.2.1")
    with pytest.raises(InputError, match=r"the host 'nowhere\.invalid' is unknown"):
        is_loopback("nowhere.invalid")


def test_the_url_is_what_a_client_takes():
    with open_socket("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_limits_are_at_least_one():
    with pytest.raises(InputError, match="requests_max must be at least 1, not 0"):
        ServeLimits(requests_max=0)
