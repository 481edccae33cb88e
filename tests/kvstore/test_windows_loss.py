"""The daemon goes, stalls or restarts under window snapshots and hand-over records: a miss or a
clear error within the deadline, never wrong bytes, never a hang."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import ROOT, STORE_SETTINGS, Daemon, Door, fresh_namespace

from kvstore import Namespace, NamespaceHandle, PutOutcome, connect, connect_async
from kvstore.errors import Unavailable

STORED = PutOutcome.STORED
TOKENS = np.arange(40, dtype=np.uint32)
PAYLOAD = np.random.default_rng(3).bytes(400_000)
SOON_S = 20.0
"""Far less than the waits below."""
WAYS = [("", "sync"), ("?data=grpc", "async")]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", STORE_SETTINGS)
    yield daemon.start()
    daemon.kill()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests that leave it as it was."""
    daemon = Daemon(f"unix://{tmp_path_factory.mktemp('loss')}/kv.sock", None, STORE_SETTINGS)
    yield daemon.start()
    daemon.kill()


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way))
def door(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Door]:
    query, flavour = request.param
    door = Door(daemon.url + query, flavour == "async")
    yield door
    door.close()


def filled(door: Door) -> NamespaceHandle:
    ns = door.open()
    assert door.do(door.client.put_snapshot(ns, TOKENS, PAYLOAD)) is STORED
    assert door.do(door.client.put_handover(ns, "r", PAYLOAD)) is STORED
    return ns


def until_answered(call: Callable[[], Any]) -> Any:
    ends_s = time.monotonic() + SOON_S
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < ends_s
            time.sleep(0.02)


def test_a_restarted_daemon_has_lost_them_and_says_so(daemon: Daemon, door: Door) -> None:
    ns, client = filled(door), door.client
    daemon.kill()
    for call in (
        lambda: client.get_window(ns, ns.snapshot_key(TOKENS)),
        lambda: client.wait_handover(ns, "r", 60.0),
        lambda: client.put_handover(ns, "r", PAYLOAD),
        lambda: client.drop_handover(ns, "r"),
    ):
        started_s = time.monotonic()
        assert type(door.fails(call)) is Unavailable
        assert time.monotonic() - started_s < SOON_S
    daemon.start()
    key = ns.snapshot_key(TOKENS)
    assert until_answered(lambda: door.do(client.get_window(ns, key))) is None
    assert door.do(client.wait_handover(ns, "r", 0.0)) is None
    assert door.do(client.match(ns, ns.block_keys(TOKENS))).snapshots == ()
    assert door.do(client.put_handover(ns, "r", PAYLOAD)) is STORED
    assert door.do(client.wait_handover(ns, "r", 0.0)) == PAYLOAD


@pytest.mark.parametrize(
    ("number", "query", "flavour"),
    [(signal.SIGKILL, *WAYS[0]), (signal.SIGTERM, *WAYS[1])],
)
def test_a_wait_ends_with_its_daemon(daemon: Daemon, number: int, query: str, flavour: str) -> None:
    door = Door(daemon.url + query, flavour == "async")
    ns = filled(door)
    threading.Timer(0.3, daemon.signal, (number,)).start()
    started_s = time.monotonic()
    error = door.fails(lambda: door.client.wait_handover(ns, "never", 300.0))
    assert type(error) is Unavailable, error
    assert 0.2 < time.monotonic() - started_s < SOON_S
    assert daemon.wait() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    door.close()


@pytest.mark.parametrize(("query", "flavour"), WAYS)
def test_a_daemon_that_stands_still_costs_the_deadline(
    lasting: Daemon, query: str, flavour: str
) -> None:
    daemon, door = lasting, Door(lasting.url + query, flavour == "async")
    ns, client = filled(door), door.client
    getattr(client, "_client", client).deadline_s = 0.4
    daemon.signal(signal.SIGSTOP)
    try:
        for call in (
            lambda: client.wait_handover(ns, "r", 0.2),
            lambda: client.get_window(ns, ns.snapshot_key(TOKENS)),
            lambda: client.put_snapshot(ns, TOKENS, PAYLOAD),
        ):
            started_s = time.monotonic()
            assert type(door.fails(call)) is Unavailable
            assert time.monotonic() - started_s < SOON_S
    finally:
        daemon.signal(signal.SIGCONT)
    getattr(client, "_client", client).deadline_s = 20.0
    got = until_answered(lambda: door.do(client.get_window(ns, ns.snapshot_key(TOKENS))))
    assert got == PAYLOAD
    door.do(client.drop_handover(ns, "r"))
    door.close()


def test_a_wait_outlives_a_daemons_longest_call(tmp_path: Path) -> None:
    settings = {**STORE_SETTINGS, "server.deadline_s_max": 0.6}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        with connect(daemon.url) as client, connect(daemon.url) as writer:
            ns = client.open_namespace(fresh_namespace())
            threading.Timer(1.5, writer.put_handover, (ns, "r", b"late")).start()
            assert client.wait_handover(ns, "r", 60.0) == b"late"
            assert client.wait_handover(ns, "never", 1.0) is None
    finally:
        daemon.kill()


@pytest.mark.parametrize("query", ["?data=grpc", "?data=port"])
def test_a_byte_flipped_on_the_way_is_a_counted_miss(
    lasting: Daemon, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.client import port_windows, remote
    from kvstore.client.transport import ArrivedWindow

    class Flipped(ArrivedWindow):
        def __init__(self, payload: bytes, checksum: bytes) -> None:
            super().__init__(payload[:-1] + bytes([payload[-1] ^ 1]), checksum)

    with connect(lasting.url + query) as client:
        ns = client.open_namespace(fresh_namespace())
        client.put_snapshot(ns, TOKENS, PAYLOAD)
        module = remote if "grpc" in query else port_windows
        with monkeypatch.context() as patched:
            patched.setattr(module, "ArrivedWindow", Flipped)
            assert client.get_window(ns, ns.snapshot_key(TOKENS)) is None
        assert client.corrupt_windows == 1
        assert client.get_window(ns, ns.snapshot_key(TOKENS)) == PAYLOAD


def test_an_embedded_wait_ends_when_its_client_closes(tmp_path: Path) -> None:
    client = connect(f"file://{tmp_path}/store", **STORE_SETTINGS)
    ns = client.open_namespace(fresh_namespace())
    threading.Timer(0.2, client.close).start()
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="clos"):
        client.wait_handover(ns, "never", 300.0)
    assert time.monotonic() - started_s < SOON_S


def test_a_cancelled_wait_is_over(lasting: Daemon) -> None:
    async def run() -> None:
        async with await connect_async(lasting.url) as client:
            ns = await client.open_namespace(fresh_namespace())
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await client.wait_handover(ns, "r", 300.0)
            await client.put_handover(ns, "r", PAYLOAD)
            assert await client.wait_handover(ns, "r", 0.0) == PAYLOAD

    asyncio.run(run())


VICTIM = """
import os, signal, sys, threading, time
import kvstore
from kvstore import Namespace
url, how, text = sys.argv[1:]
client = kvstore.connect(url)
ns = client.open_namespace(Namespace.from_json(text))
if how == "in a put":
    def pieces():
        from kvstore.client.remote import _window_messages
        from kvstore.store.types import WindowHead, WindowPut
        put = WindowPut(WindowHead("half", None, 1 << 20, bytes(16)), bytes(1 << 20))
        yield next(iter(_window_messages(ns.id, put, 1 << 14)))
        os.kill(os.getpid(), signal.SIGKILL)
    carrier = client._client._transport._carrier
    carrier._call("PutWindow", "stream_unary")(pieces())
elif how == "in a get":
    stream = client._client._transport._pool.open(5.0)
    from kvstore.server import messages
    from kvstore.v1 import kvstore_pb2 as pb
    request = messages.named_to_pb(pb.GetWindowRequest, ns.id, "kept")
    for _ in range(16):
        stream.send("GetWindow", request.SerializeToString(), [], time.monotonic() + 9)
    stream._sock.setblocking(True)
    stream._sock.recv(1000)
else:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    client.wait_handover(ns, "never", 300.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(url: str, how: str, namespace: Namespace) -> None:
    text = namespace.canonical_json().decode()
    command = [sys.executable, "-c", VICTIM, url, how, text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr.decode()


def test_a_killed_client_leaves_nothing(lasting: Daemon, long: bool) -> None:
    """In the middle of a put, of a get, of a wait: all of the pool can be had again."""
    with connect(f"{lasting.url}?data=grpc") as client:
        ns = client.open_namespace(fresh_namespace())
        budget = client.stat().windows.budget_bytes
        for _ in range(20 if long else 1):
            client.put_handover(ns, "kept", bytes(budget // 2))
            for how in ("in a put", "in a get", "in a wait"):
                killed(lasting.url, how, ns.namespace)
            ends_s = time.monotonic() + SOON_S
            while client.put_handover(ns, "all", bytes(budget)) is not STORED:
                assert time.monotonic() < ends_s
                time.sleep(0.05)
            assert client.stat().windows.used_bytes == budget
            client.drop_handover(ns, "all")
            assert client.stat().windows.used_bytes == 0
