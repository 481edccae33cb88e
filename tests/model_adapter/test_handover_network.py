"""A hand-over to another host over a line with latency and loss, and over one that is cut."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import netns
import pytest
from nodes import Node, until
from test_handover_processes import BOTH, SHORT, TOKENS, answer

ROOT = Path(__file__).parents[2]
PORT = 7701
LINES = {
    "20 ms, 2 % lost": ("netem", "delay", "20ms", "5ms", "loss", "2%"),
    # a queue of a few packets, which loses those that find it full
    "8 Mbit/s, short queue": ("tbf", "rate", "8mbit", "burst", "3kb", "limit", "9kb"),
}

pytestmark = pytest.mark.long


@pytest.fixture
def line():
    if reason := netns.why_not():
        pytest.skip(reason)
    with netns.line() as made:
        yield made


def listens(namespace: str) -> bool:
    """Whether somebody does on `PORT`, seen from its own host."""
    import socket

    found = []

    def look():
        netns.enter(namespace)
        with socket.socket() as s:
            s.settimeout(1.0)
            found.append(s.connect_ex((netns.NEAR, PORT)) == 0)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found == [True]


@pytest.fixture
def store(line, tmp_path):
    """The words that name the store of the near host."""
    command = ["ip", "netns", "exec", line.near, sys.executable, "-m", "kvstore", "serve"]
    command += ["--listen", f"tcp://{netns.NEAR}:{PORT}", "--dram", "16MiB"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: listens(line.near) or process.poll() is not None, "listening")
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield ["--store", f"dns:///{netns.NEAR}:{PORT}", "--request-id", "r"]
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("quality", LINES)
def test_a_bad_line_costs_time_and_nothing_else(line, store, tmp_path, quality):
    try:
        line.shape(*LINES[quality])
    except subprocess.CalledProcessError as e:
        pytest.skip(f"this kernel has no {LINES[quality][0]}: {e.stderr.strip()}")
    (tmp_path / "prompt").write_text(SHORT)
    flags = ["--prompt-file", tmp_path / "prompt"]
    far = Node(tmp_path, "decode", *BOTH, *store, "--ids", "--max-tokens", TOKENS, at=line.far)
    near = Node(tmp_path, "prefill", *BOTH, *store, *flags, at=line.near)
    assert near.end() == 0, near.err
    assert far.end() == 0, far.err
    assert far.ids == answer(SHORT, TOKENS)
    # and the other way: blocks and record go out over the line
    (tmp_path / "prompt").write_text(SHORT[200:])
    far = Node(tmp_path, "prefill", *BOTH, *store, *flags, at=line.far)
    assert far.end() == 0, far.err
    near = Node(tmp_path, "decode", *BOTH, *store, "--ids", "--max-tokens", TOKENS, at=line.near)
    assert near.end() == 0, near.err
    assert near.ids == answer(SHORT[200:], TOKENS)
    assert line.dropped() > 0


def test_a_line_that_is_cut_ends_within_the_deadlines(line, store, tmp_path):
    waiting = Node(
        *(tmp_path, "decode", *BOTH, *store, "--ids"),
        *("--wait-s", 4, "--deadline-s", 2),
        at=line.far,
    )
    time.sleep(1.0)
    line.cut()
    start = time.monotonic()
    assert waiting.end() == 3
    assert "the prompt of r did not come within 4 s" in waiting.err
    assert time.monotonic() - start < 60
    late = Node(*(tmp_path, "decode", *BOTH, *store, "--wait-s", 1, "--deadline-s", 1), at=line.far)
    assert late.end() == 3, late.err
