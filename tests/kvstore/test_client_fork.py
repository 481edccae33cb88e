"""A process forked after `connect` is told that the client is not its own; the parent's goes on."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import STORE_SETTINGS, Door, chain, keys_of
from doors import doors_of, opened, serving

from kvstore import Durability, Outcome
from kvstore.errors import WrongProcess

KINDS = ("file", "unix?data=shared", "unix?data=port", "unix?data=grpc")


@pytest.fixture(scope="module")
def daemon_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("fork"), STORE_SETTINGS, on_disk=True) as urls:
        yield urls


@pytest.fixture(params=[door for door in doors_of(KINDS) if "sync" in door], ids="-".join)
def door(
    request: pytest.FixtureRequest, daemon_urls: dict[str, str], tmp_path: Path
) -> Iterator[Door]:
    with opened(request.param, daemon_urls, tmp_path, STORE_SETTINGS) as door:
        yield door


def in_a_fork(of: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What `of` gives in a forked process, which ends without any cleaning up."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(of()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(told))


def test_a_fork_has_no_client_and_takes_nothing_from_its_parent(door: Door) -> None:
    client, ns = door.client, door.open()
    blocks = chain(ns, 4)
    keys = keys_of(blocks)
    client.put(ns, blocks, Durability.DURABLE)
    lease = client.acquire(ns, keys)
    calls: dict[str, Callable[[], object]] = {
        "open_namespace": lambda: client.open_namespace(ns.namespace),
        "match": lambda: client.match(ns, keys),
        "wait_for": lambda: client.wait_for(ns, keys, 0.0),
        "acquire": lambda: client.acquire(ns, keys),
        "read": lambda: client.read(lease, keys),
        "view": lambda: client.view(lease, keys),
        "renew": lambda: lease.renew(),
        "release": lambda: lease.release(),
        "put": lambda: client.put(ns, blocks),
        "get_window": lambda: client.get_window(ns, bytes(32)),
        "flush": lambda: client.flush(),
        "stat": lambda: client.stat(),
    }

    def forked() -> dict[str, str]:
        told = {}
        for name, call in calls.items():
            try:
                told[name] = repr(call())
            except WrongProcess:
                told[name] = "WrongProcess"
        with lease, client:
            told["leaving"] = "nothing"
        return told

    with lease:
        assert in_a_fork(forked) == {**dict.fromkeys(calls, "WrongProcess"), "leaving": "nothing"}
        found = client.read(lease, keys)
        assert [b.outcome for b in found] == [Outcome.HIT] * 4
        assert [list(map(bytes, b.sections)) for b in found] == [
            list(map(bytes, b.sections)) for b in blocks
        ]
    assert client.stat().leases == 0
