"""The daemon is lost, stalls, comes back: `Unavailable` in time, then the cache again."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import STORE_SETTINGS, Daemon, Door, chain, fresh_namespace, keys_of

from kvstore import (
    Durability,
    Layout,
    NamespaceHandle,
    Outcome,
    PutOutcome,
    SectionSpec,
    connect,
)
from kvstore.errors import LeaseExpired, MessageTooLarge, Unavailable, UnknownNamespace
from kvstore.namespace import namespace_id

STORED = PutOutcome.STORED
FLAVOURS = ("sync", "async")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", STORE_SETTINGS)
    yield daemon.start()
    daemon.kill()


@pytest.fixture(params=FLAVOURS)
def door(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Door]:
    door = Door(daemon.url, request.param == "async")
    yield door
    door.close()


def until_available(door: Door, call: Any) -> Any:
    """The first answer after the daemon came back; the channel reconnects by itself."""
    ends_s = time.monotonic() + 20.0
    while True:
        try:
            return door.do(call())
        except Unavailable:
            assert time.monotonic() < ends_s
            time.sleep(0.02)


def test_killed_in_mid_call_and_restarted_with_its_cache(daemon: Daemon, door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 10)
    assert door.do(door.client.put(ns, blocks, Durability.DURABLE)) == [STORED] * 10
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    pending = chain(ns, 1, seed=1)
    door.do(door.client.reserve(ns, [(b.key, b.parent) for b in pending]))
    killer = threading.Timer(0.3, lambda: daemon.signal(signal.SIGKILL))
    killer.start()
    started_s = time.monotonic()
    error = door.fails(lambda: door.client.wait_for(ns, keys_of(pending), 60.0))
    assert type(error) is Unavailable
    assert time.monotonic() - started_s < 20.0
    assert type(door.fails(lambda: door.client.match(ns, keys_of(blocks)))) is Unavailable
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()
    match = until_available(door, lambda: door.client.match(ns, keys_of(blocks)))
    assert match.hit_blocks == 10
    assert type(door.fails(lambda: door.client.read(lease, lease.keys))) is LeaseExpired
    fresh = door.do(door.client.acquire(ns, keys_of(blocks)))
    read = door.do(door.client.read(fresh, fresh.keys))
    assert [[bytes(s) for s in data.sections] for data in read] == [b.sections for b in blocks]


def test_a_lease_of_a_lost_daemon_ends_quietly(daemon: Daemon) -> None:
    with connect(daemon.url, deadline_s=5.0) as client:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, 1)
        client.put(ns, blocks)
        with client.acquire(ns, keys_of(blocks)) as lease:
            daemon.kill()
        with pytest.raises(Unavailable):
            lease.release()


def test_a_stalled_daemon_costs_the_deadline_and_no_more(daemon: Daemon) -> None:
    with connect(daemon.url) as client:
        ns = client.open_namespace(fresh_namespace())
        client._client.deadline_s = 0.3
        daemon.signal(signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match="deadline"):
                client.match(ns, [b"\1" * 32])
            with pytest.raises(Unavailable):
                connect(daemon.url, deadline_s=0.3)
        finally:
            daemon.signal(signal.SIGCONT)


def test_a_daemon_that_comes_back_with_other_limits_is_met_again(tmp_path: Path) -> None:
    listen = f"unix://{tmp_path}/kv.sock"
    large = Daemon(listen, None, STORE_SETTINGS).start()
    small = Daemon(listen, None, {**STORE_SETTINGS, "server.message_bytes_max": "64KiB"})
    try:
        door = Door(listen, asynchronous=False)
        ns = door.open()
        assert door.client.put(ns, chain(ns, 1000)) == [STORED] * 1000
        large.kill()
        small.start()
        until_available(door, door.client.stat)
        with pytest.raises(MessageTooLarge):
            door.client.put(ns, chain(ns, 1000, seed=1))
        assert door.client.put(ns, chain(ns, 1000, seed=1)) == [STORED] * 1000
        door.close()
    finally:
        large.kill()
        small.kill()


@pytest.mark.parametrize("data", ["grpc", "port"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_wait_outlives_a_daemons_longest_call(tmp_path: Path, flavour: str, data: str) -> None:
    settings = {**STORE_SETTINGS, "server.deadline_s_max": 0.6}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        with connect(daemon.url) as writer:
            door = Door(f"{daemon.url}?data={data}", flavour == "async")
            ns = door.open()
            blocks = chain(ns, 1)
            held = writer.reserve(ns, [(b.key, b.parent) for b in blocks]).reservation_id
            waited = door.do(door.client.wait_for(ns, keys_of(blocks), 1.0))
            assert waited.outcomes == (Outcome.PENDING,)
            writer.write(held, blocks[0].key, blocks[0].sections)
            threading.Timer(1.5, writer.commit, (held,)).start()
            waited = door.do(door.client.wait_for(ns, keys_of(blocks), math.inf))
            assert waited.outcomes == (Outcome.HIT,)
            door.close()
    finally:
        daemon.kill()


def test_no_daemon_is_unavailable_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does kvstored run there"):
        connect(f"unix://{tmp_path}/none.sock")


def test_a_store_without_a_disk_learns_its_namespaces_again(tmp_path: Path) -> None:
    settings = {"dram.budget_bytes": "16MiB"}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        door = Door(daemon.url, asynchronous=False)
        ns = door.open()
        blocks = chain(ns, 2)
        assert door.client.put(ns, blocks) == [STORED] * 2
        daemon.kill()
        daemon.start()
        match = until_available(door, lambda: door.client.match(ns, keys_of(blocks)))
        assert match.hit_blocks == 0
        assert door.client.put(ns, blocks) == [STORED] * 2
        descriptor = fresh_namespace()
        stranger = NamespaceHandle(namespace_id(descriptor), descriptor)
        with pytest.raises(UnknownNamespace):
            door.client.match(stranger, keys_of(blocks))
        door.close()
    finally:
        daemon.kill()


def test_two_clients_at_once_agree(daemon: Daemon) -> None:
    clients = [connect(daemon.url) for _ in range(2)]
    descriptor = fresh_namespace()
    handles = [client.open_namespace(descriptor) for client in clients]
    assert handles[0] == handles[1]
    chains = [chain(handles[0], 50, seed) for seed in range(8)]

    def work(client: Any) -> list[list[PutOutcome]]:
        return [client.put(handles[0], blocks) for blocks in chains]

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(work, clients))
    for a, b in zip(*outcomes, strict=True):
        for pair in zip(a, b, strict=True):
            assert STORED in pair
            assert set(pair) <= {STORED, PutOutcome.PRESENT, PutOutcome.PENDING}
    for client in clients:
        for blocks in chains:
            with client.acquire(handles[0], keys_of(blocks)) as lease:
                read = client.read(lease, lease.keys)
            assert [[bytes(s) for s in d.sections] for d in read] == [b.sections for b in blocks]
        client.close()


def test_many_threads_share_a_client(daemon: Daemon) -> None:
    with connect(daemon.url) as client:
        ns = client.open_namespace(fresh_namespace())
        chains = [chain(ns, 20, seed) for seed in range(8)]

        def work(seed: int) -> bool:
            blocks = chains[seed]
            assert client.put(ns, blocks) == [STORED] * 20
            with client.acquire(ns, keys_of(blocks)) as lease:
                read = client.read(lease, lease.keys)
            return [list(map(bytes, d.sections)) for d in read] == [b.sections for b in blocks]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))


def test_a_million_tokens_are_one_match(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(f"{daemon.url}?data=grpc") as client:
        layout = Layout((SectionSpec(0, "main", 256, 4),))
        ns = client.open_namespace(fresh_namespace(layout))
        keys = ns.block_keys(np.zeros(1 << 20, np.uint32))
        assert len(keys) == 4096
        carrier = client._client._transport._carrier
        unary, calls = carrier.unary, []

        async def count(name: str, request: Any, timeout_s: float) -> bytes:
            calls.append((name, sum(map(len, request))))
            reply: bytes = await unary(name, request, timeout_s)
            return reply

        monkeypatch.setattr(carrier, "unary", count)
        assert client.match(ns, keys).hit_blocks == 0
    ((name, size),) = calls
    assert name == "Match"
    assert 4096 * 32 < size < 4096 * 32 + 100


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_byte_flipped_on_the_way_is_a_counted_and_reported_miss(
    daemon: Daemon, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(f"{daemon.url}?data=grpc", flavour == "async")
    ns = door.open()
    blocks = chain(ns, 3)
    door.do(door.client.put(ns, blocks))
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    inner = getattr(door.client, "_client", door.client)
    carrier = inner._transport._carrier
    unary = carrier.unary

    async def flip(name: str, request: Any, timeout_s: float) -> bytes:
        reply: bytes = await unary(name, request, timeout_s)
        at = reply.find(blocks[1].sections[2]) + 7
        return reply if name != "Read" else reply[:at] + bytes([reply[at] ^ 1]) + reply[at + 1 :]

    monkeypatch.setattr(carrier, "unary", flip)
    read = door.do(door.client.read(lease, lease.keys))
    assert [d.outcome for d in read] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert read[1].sections == ()
    assert door.client.corrupt_blocks == 1
    monkeypatch.undo()
    stat = door.do(door.client.stat())
    assert stat.counters["corrupt_reported_blocks"] == 1
    # The store's own copy was right, so it stays.
    again = door.do(door.client.read(lease, lease.keys))
    assert [d.outcome for d in again] == [Outcome.HIT] * 3
    door.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_full_connection_to_a_daemon_that_stands_still_costs_the_deadline(
    daemon: Daemon, flavour: str
) -> None:
    """More than the sockets take: what is behind it, and the closing, end in time all the same."""
    door = Door(f"{daemon.url}?data=grpc", flavour == "async")
    ns = door.open(Layout((SectionSpec(0, "main", 1, 1 << 16),), block_tokens=32))
    blocks = chain(ns, 3)
    inner = getattr(door.client, "_client", door.client)
    daemon.signal(signal.SIGSTOP)
    try:
        inner.deadline_s = 0.3
        for call in (
            lambda: door.client.put(ns, blocks),
            lambda: door.client.match(ns, [b"\1" * 32]),
            lambda: door.client.put_handover(ns, "r", bytes(1 << 20)),
            lambda: door.client.wait_handover(ns, "r", 0.1),
            lambda: door.client.get_window(ns, b"\1" * 32),
            lambda: door.client.verify(deadline_s=0.3),
        ):
            started_s = time.monotonic()
            assert type(door.fails(call)) is Unavailable
            assert time.monotonic() - started_s < 20.0
    finally:
        daemon.signal(signal.SIGCONT)
    inner.deadline_s = 20.0
    assert until_available(door, lambda: door.client.put(ns, blocks)) is not None
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 3
    inner.deadline_s = 0.3
    daemon.signal(signal.SIGSTOP)
    try:
        assert type(door.fails(lambda: door.client.put(ns, chain(ns, 3, seed=1)))) is Unavailable
        started_s = time.monotonic()
        door.close()
        assert time.monotonic() - started_s < 20.0
    finally:
        daemon.signal(signal.SIGCONT)
