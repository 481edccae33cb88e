"""A daemon whose disk is slow, broken, full or read-only: callers get their answers in time, DRAM
lives on, and it recovers by itself. A process of its own, real files, faults on order."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from daemons import ROOT, STORE_SETTINGS, Daemon, chain, fresh_namespace, keys_of, until

from kvstore import (
    BlockPut,
    Client,
    Durability,
    NamespaceHandle,
    Outcome,
    PutOutcome,
    Tier,
    connect,
)
from kvstore.client import batching
from kvstore.errors import DiskError, Unavailable

HERE = Path(__file__).parent
DEADLINE_S = 20.0
HANGS_S = 4.0
DISK_WAIT_S = 1.5
SETTINGS = {
    **STORE_SETTINGS,
    "limits.disk_wait_s_max": DISK_WAIT_S,
    "limits.room_wait_s_max": DISK_WAIT_S,
    "limits.upkeep_s": 0.05,
    "migration.retry_s_min": 0.1,
    "migration.retry_s_max": 0.3,
}


class FaultyDaemon(Daemon):
    """`faulty_daemon.py`, and the orders to its disk."""

    def __init__(self, directory: Path) -> None:
        listen = f"unix://{directory}/kv.sock"
        super().__init__(listen, None, {})
        self._control = directory / "control"
        self.order({})
        self._command = [sys.executable, str(HERE / "faulty_daemon.py"), str(self._control), listen]
        self._command += [str(directory / "store"), *(f"{k}={v}" for k, v in SETTINGS.items())]

    def order(self, faults: dict[str, float | str]) -> None:
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._control)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDaemon]:
    daemon = FaultyDaemon(tmp_path_factory.mktemp("faulty"))
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def client(daemon: FaultyDaemon) -> Iterator[Client]:
    daemon.order({})
    with connect(daemon.url, deadline_s=DEADLINE_S) as client:
        until(lambda: accepting(client))
        yield client
        daemon.order({})


def accepting(client: Client) -> bool:
    return next(t.accepting for t in client.stat().tiers if t.tier is Tier.SSD)


def read(client: Client, ns: NamespaceHandle, blocks: list[BlockPut]) -> list[list[bytes] | None]:
    """Sections, or None for a miss."""
    with client.acquire(ns, keys_of(blocks)) as lease:
        got = client.read(lease, keys_of(blocks)[: lease.blocks])
    there = [[bytes(s) for s in b.sections] if b.outcome is Outcome.HIT else None for b in got]
    return there + [None] * (len(blocks) - len(there))


def on_ssd_alone(client: Client, ns: NamespaceHandle, seed: int) -> list[BlockPut]:
    blocks = chain(ns, 6, seed)
    assert client.put(ns, blocks, Durability.DURABLE) == [PutOutcome.STORED] * 6
    assert client.evict(ns, keys_of(blocks), Tier.DRAM) == 6
    return blocks


def dram_lives(client: Client, ns: NamespaceHandle, seed: int) -> list[BlockPut]:
    """Blocks go in and come back, in much less than a call may take."""
    began = time.monotonic()
    blocks = chain(ns, 5, seed)
    assert client.put(ns, blocks) == [PutOutcome.STORED] * 5
    assert read(client, ns, blocks) == [b.sections for b in blocks]
    assert time.monotonic() - began < DEADLINE_S / 2
    return blocks


@pytest.mark.parametrize("fault", [HANGS_S, "EIO"])
def test_reads_that_hang_or_fail_are_misses_in_time(
    daemon: FaultyDaemon, client: Client, fault: float | str
) -> None:
    ns = client.open_namespace(fresh_namespace())
    old = on_ssd_alone(client, ns, 1)
    daemon.order({"preadv": fault})
    began = time.monotonic()
    assert read(client, ns, old) == [None] * 6
    assert time.monotonic() - began < DEADLINE_S / 2
    dram_lives(client, ns, 2)
    daemon.order({})
    until(lambda: read(client, ns, old) == [b.sections for b in old])


@pytest.mark.parametrize(
    "faults",
    [
        {"pwrite": "EIO"},
        {"fdatasync": "EIO"},
        {"pwrite": "ENOSPC"},
        {"pwrite": "EROFS", "fdatasync": "EROFS", "commit": "EROFS"},
        {"fdatasync": HANGS_S},
    ],
    ids=str,
)
def test_writes_that_fail_degrade_the_tier_and_nothing_else(
    daemon: FaultyDaemon, client: Client, faults: dict[str, float | str]
) -> None:
    ns = client.open_namespace(fresh_namespace())
    old = on_ssd_alone(client, ns, 1)
    daemon.order(faults)
    began = time.monotonic()
    with pytest.raises(DiskError, match="were not durable"):
        client.put(ns, chain(ns, 3, 2), Durability.DURABLE)
    assert time.monotonic() - began < DEADLINE_S / 2
    if not any(isinstance(fault, float) for fault in faults.values()):
        until(lambda: not accepting(client))
    new = dram_lives(client, ns, 3)
    assert read(client, ns, old) == [b.sections for b in old]
    daemon.order({})
    until(lambda: accepting(client) and not client.stat().dirty_blocks)
    client.flush()
    assert all(t & Tier.SSD for t in client.match(ns, keys_of(new)).residency)
    assert client.put(ns, chain(ns, 3, 4), Durability.DURABLE) == [PutOutcome.STORED] * 3


def test_an_index_that_can_not_be_written_costs_no_durable_block(
    daemon: FaultyDaemon, client: Client
) -> None:
    """Frames that are synced survive without the index; a start looks for them."""
    ns = client.open_namespace(fresh_namespace())
    client.flush()
    daemon.order({"commit": "EIO"})
    blocks = chain(ns, 4, 1)
    assert client.put(ns, blocks[:2], Durability.DURABLE) == [PutOutcome.STORED] * 2
    dram_lives(client, ns, 2)
    daemon.kill()
    daemon.order({})
    daemon.start()
    with connect(daemon.url, deadline_s=DEADLINE_S) as again:
        assert read(again, ns, blocks[:2]) == [b.sections for b in blocks[:2]]
        assert again.verify().clean


@pytest.mark.parametrize("data", ["grpc", "port"])
def test_a_read_of_many_messages_has_one_deadline(
    daemon: FaultyDaemon, client: Client, data: str
) -> None:
    """Each message waits for the disk as long as one may; all of them together must not."""
    ns = client.open_namespace(fresh_namespace())
    blocks = on_ssd_alone(client, ns, 1)
    messages = 16
    asked = (keys_of(blocks) * 12_000)[: messages * batching.BATCH_BLOCKS_MAX]
    with (
        connect(f"{daemon.url}?data={data}", deadline_s=DEADLINE_S) as other,
        other.acquire(ns, keys_of(blocks)) as lease,
    ):
        daemon.order({"preadv": 2 * HANGS_S})
        other._client.deadline_s = 2.0
        began = time.monotonic()
        with pytest.raises(Unavailable):
            other.read(lease, asked)
        took_s = time.monotonic() - began
        daemon.order({})
        other._client.deadline_s = DEADLINE_S
    assert took_s < messages * DISK_WAIT_S * 0.7
    until(lambda: read(client, ns, blocks) == [b.sections for b in blocks])


@pytest.mark.parametrize("data", ["grpc", "port"])
def test_a_put_of_many_messages_has_one_deadline(
    daemon: FaultyDaemon, client: Client, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is answered well within what one may take; all of them together are not."""
    monkeypatch.setattr(batching, "BATCH_BLOCKS_MAX", 4)
    messages, sync_s = 32, 0.2
    ns = client.open_namespace(fresh_namespace())
    blocks = chain(ns, messages * 4, 1)
    with connect(f"{daemon.url}?data={data}", deadline_s=DEADLINE_S) as other:
        daemon.order({"fdatasync": sync_s})
        other._client.deadline_s = messages * sync_s / 6
        with pytest.raises(Unavailable):
            other.put(ns, blocks, Durability.DURABLE)
        daemon.order({})
        other._client.deadline_s = DEADLINE_S
        outcomes = other.put(ns, blocks, Durability.DURABLE)
    # an error on the way leaves what was answered before it
    assert outcomes[:4] == [PutOutcome.PRESENT] * 4
    assert set(outcomes) <= {PutOutcome.PRESENT, PutOutcome.STORED}
    assert read(client, ns, blocks) == [b.sections for b in blocks]


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    settings = {**SETTINGS, "ssd.segment_bytes": "1MiB", "ssd.lifetime_min_s": 3600}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", small / "store", settings)
    try:
        daemon.start()
        with connect(daemon.url, deadline_s=DEADLINE_S) as client:
            ns = client.open_namespace(fresh_namespace())
            first = chain(ns, 20, 1)
            client.put(ns, first, Durability.DURABLE)
            _fill(small / "of another")
            with pytest.raises(DiskError):
                client.put(ns, chain(ns, 300, 2), Durability.DURABLE)
            dram_lives(client, ns, 3)
            assert read(client, ns, first) == [b.sections for b in first]
            (small / "of another").unlink()
            until(lambda: accepting(client) and not client.stat().dirty_blocks)
            assert client.verify().clean
    finally:
        daemon.kill()
        subprocess.run(["umount", "-l", str(small)], check=False, cwd=ROOT)


def _fill(path: Path) -> None:
    """Until nothing more fits, whatever else writes there meanwhile."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_the_daemon_came_through_all_of_it_and_stops_in_order(
    daemon: FaultyDaemon, client: Client
) -> None:
    client.flush()
    client.close()
    assert daemon.terminate() == 0, daemon.log.decode()
    daemon.start()
    with connect(daemon.url, deadline_s=DEADLINE_S) as again:
        assert again.verify().clean
