"""Somebody shortens or deletes the segments of a running store."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import STORE_SETTINGS, chain, fresh_namespace, keys_of, until

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

SETTINGS = {**STORE_SETTINGS, "migration.retry_s_min": 0.05, "migration.retry_s_max": 0.1}
BLOCKS = 12


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with opened(tmp_path) as client:
        yield client


def opened(folder: Path) -> Client:
    return connect(f"file://{folder}/store", **SETTINGS)


def segments(folder: Path) -> list[Path]:
    found = sorted((folder / "store" / "segments").iterdir())
    assert found
    return found


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def read(client: Client, ns: NamespaceHandle, blocks: list[BlockPut]) -> int:
    """How many of the blocks come back; their bytes must be right."""
    with client.acquire(ns, keys_of(blocks)) as lease:
        got = client.read(lease, lease.keys) if lease.blocks else []
    by_key = {block.key: list(map(bytes, block.sections)) for block in blocks}
    hits = [b for b in got if b.outcome is Outcome.HIT]
    assert all(list(map(bytes, b.sections)) == by_key[b.key] for b in hits)
    return len(hits)


def durable(client: Client, ns: NamespaceHandle, blocks: list[BlockPut]) -> bool:
    """Whether a put is acknowledged as durable."""
    outcomes = client.put(ns, blocks, Durability.DURABLE)
    return set(outcomes) <= {PutOutcome.STORED, PutOutcome.PRESENT}


@pytest.mark.parametrize("damage", [halved, emptied])
def test_what_was_cut_off_is_a_miss_once_and_can_be_put_again(
    client: Client, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    ns = client.open_namespace(fresh_namespace())
    blocks = chain(ns, BLOCKS)
    assert durable(client, ns, blocks)
    assert client.evict(ns, keys_of(blocks), Tier.DRAM) == BLOCKS
    for path in segments(tmp_path):
        damage(path)
    assert read(client, ns, blocks) < BLOCKS
    assert client.stat().counters["corrupt_ssd_blocks"] > 0
    assert client.match(ns, keys_of(blocks)).hit_blocks == read(client, ns, blocks) < BLOCKS
    assert not client.verify().unreadable
    until(lambda: durable(client, ns, blocks))
    client.close()
    with opened(tmp_path) as again:
        ns = again.open_namespace(ns.namespace)
        assert read(again, ns, blocks) == BLOCKS


def test_no_put_is_durable_in_a_file_that_was_deleted(client: Client, tmp_path: Path) -> None:
    ns = client.open_namespace(fresh_namespace())
    assert durable(client, ns, chain(ns, BLOCKS))
    for path in segments(tmp_path):
        path.unlink()
    blocks = chain(ns, BLOCKS, 7)
    until(lambda: durable(client, ns, blocks))
    assert client.stat().counters["disk_errors"] > 0
    client.close()
    with opened(tmp_path) as again:
        ns = again.open_namespace(ns.namespace)
        assert read(again, ns, blocks) == BLOCKS
