"""Clients that are killed with leases held, puts half done or a stream under way cost nothing
lasting."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import ROOT, STORE_SETTINGS, Daemon, chain, fresh_namespace, keys_of
from port_peer import open_fds, resident_bytes

from kvstore import DS41F_LAYOUT, PutOutcome, connect

SETTINGS = {
    **STORE_SETTINGS,
    "dram.budget_bytes": "32MiB",
    "lease.lease_ttl_s_default": 1.0,
    "lease.reservation_ttl_s_default": 1.0,
    "server.data_port.stall_s_max": 1.0,
}
RESIDENT_SLACK_BYTES = 24 << 20

VICTIM = """
import os, signal, socket, sys, threading, time
sys.path.insert(0, "tests/kvstore")
from daemons import chain, fresh_namespace, keys_of
from port_peer import call_frame
import kvstore
from kvstore import DS41F_LAYOUT
from kvstore.v1 import kvstore_pb2 as pb

url, how = sys.argv[1:]
client = kvstore.connect(url)
ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
blocks = chain(ns, 24)
client.put(ns, blocks[:16])
lease = client.acquire(ns, keys_of(blocks[:16]))
stream = client._client._transport._pool.idle()
stream._sock.setblocking(True)
if how == "held":
    client.read(lease, lease.keys)
    client.view(lease, lease.keys)
elif how == "half a put":
    grant = client.reserve(ns, [(b.key, b.parent) for b in blocks[16:]])
    for block in blocks[16:20]:
        client.write(grant.reservation_id, block.key, block.sections)
elif how == "in a read":
    message = pb.BulkReadRequest(lease_id=lease.id, keys=b"".join(lease.keys))
    stream._sock.sendall(call_frame("BulkRead", message) * 8)
    stream._sock.recv(1000)
else:
    message = pb.BulkPutRequest(
        namespace_id=ns.id,
        keys=b"".join(keys_of(blocks[16:])),
        parents=b"".join(b.parent for b in blocks[16:]),
        section_bytes=ns.layout.section_bytes,
    )
    frame = call_frame("BulkPut", message, b"".join(s for b in blocks[16:] for s in b.sections))
    stream._sock.sendall(frame[: len(frame) // 2])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["auto", "port"])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("death")
    daemon = Daemon(f"unix://{folder}/kv.sock", None, SETTINGS).start()
    daemon.query = f"?data={request.param}"
    yield daemon
    daemon.kill()


def killed(daemon: Daemon, how: str) -> None:
    command = [sys.executable, "-c", VICTIM, daemon.url + daemon.query, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr.decode()


@pytest.mark.parametrize("how", ["held", "half a put", "in a read", "in a put"])
def test_a_killed_client_costs_nothing_lasting(daemon: Daemon, how: str, long: bool) -> None:
    with connect(f"{daemon.url}?data=grpc") as client:
        killed(daemon, how)
        wait_for_quiet(client)
        fds, resident = open_fds(daemon), resident_bytes(daemon)
        for _ in range(50 if long else 2):
            killed(daemon, how)
        wait_for_quiet(client)
        assert open_fds(daemon) <= fds
        assert resident_bytes(daemon) < resident + RESIDENT_SLACK_BYTES
        # all of DRAM can be had again
        ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
        client.evict()
        (tier,) = client.stat().tiers
        assert (tier.objects, tier.used_bytes) == (0, 0)
        many = chain(ns, tier.budget_bytes // 229_376)
        assert set(client.put(ns, many)) == {PutOutcome.STORED}
        with client.acquire(ns, keys_of(many)) as lease:
            assert lease.blocks == len(many)
        client.evict()


def wait_for_quiet(client: object) -> None:
    """Until rights have lapsed and connections are noticed to be gone."""
    ends_s = time.monotonic() + 30.0
    while True:
        stat = client.stat()
        if (stat.leases, stat.reservations, stat.pinned_blocks) == (0, 0, 0):
            break
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    time.sleep(1.5)


def test_the_victims_are_what_they_say(tmp_path: Path) -> None:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, SETTINGS).start()
    daemon.query = "?data=port"
    try:
        with connect(f"{daemon.url}?data=grpc") as client:
            for how in ("held", "half a put", "in a read", "in a put"):
                killed(daemon, how)
            counts = client.stat().counters
            assert counts["leases_granted"] == 4
            assert counts["reservations_granted"] >= 1
            assert counts["port_broken"] >= 2
            wait_for_quiet(client)
            counts = client.stat().counters
            assert counts["leases_expired"] == 4
            assert counts["reservations_expired"] == 1
    finally:
        daemon.kill()
