"""Reading out of the daemon's memory: never a wrong byte, whatever happened to the lease, the slot
or the daemon."""

import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import STORE_SETTINGS, Daemon, chain, fresh_namespace, keys_of
from port_peer import arena_of

from kvstore import DS41F_LAYOUT, BlockPut, Outcome, PutOutcome, Tier, connect
from kvstore.client.shared_arena import Copied, Pieces
from kvstore.errors import KVStoreError, LeaseExpired, Unavailable
from kvstore.tiers.frame import frame_bytes

SETTINGS = {
    **STORE_SETTINGS,
    "dram.budget_bytes": "16MiB",
    "ssd.budget_bytes": "256MiB",
    "dram.held_fraction_max": 0.75,
}
STORED = PutOutcome.STORED
FRAME = frame_bytes(DS41F_LAYOUT.section_bytes).total


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("shared")
    daemon = Daemon(f"unix://{folder}/kv.sock", folder / "store", SETTINGS)
    yield daemon.start()
    daemon.kill()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Any]:
    with connect(f"{daemon.url}?data=shared") as client:
        yield client
        client.flush()
        client.evict()


def put(client: Any, blocks: int, seed: int = 0) -> tuple[Any, list[BlockPut]]:
    ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
    made = chain(ns, blocks, seed)
    assert client.put(ns, made) == [STORED] * blocks
    return ns, made


def data_of(blocks: Any) -> list[list[bytes]]:
    return [list(map(bytes, block.sections)) for block in blocks]


def no_messages(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> Any:
        raise AssertionError("a message was sent")

    monkeypatch.setattr(client._client._transport, "_over_port", refuse)
    monkeypatch.setattr(client._client._transport._carrier, "unary", refuse)


def test_what_dram_holds_is_read_without_a_message(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, blocks = put(client, 20)
    lease = client.acquire(ns, keys_of(blocks))
    with monkeypatch.context() as patch:
        no_messages(client, patch)
        read = client.read(lease, lease.keys)
        some = client.read(lease, lease.keys, (7, 2, 3, 0))
        view = client.view(lease, lease.keys, (7, 2, 3, 0))
        assert client.intact(lease, lease.keys)
    assert data_of(read) == data_of(blocks)
    order = [[b.sections[i] for i in (7, 2, 3, 0)] for b in blocks]
    assert data_of(some) == data_of(view) == order
    assert {d.tier for d in read} == {Tier.DRAM}
    lease.release()


def test_the_arena_can_not_be_written(client: Any) -> None:
    ns, blocks = put(client, 1)
    with client.acquire(ns, keys_of(blocks)) as lease:
        (block,) = client.view(lease, lease.keys)
        assert all(section.readonly for section in block.sections)
        with pytest.raises(TypeError, match="read-only"):
            block.sections[0][0] = 1
        lent = client._client._transport._arena.view
        assert isinstance(lent.obj, mmap.mmap)
        with pytest.raises(TypeError, match="readonly"):
            lent.obj[0] = 1


def test_held_blocks_stay_until_the_lease_ends(client: Any) -> None:
    ns, blocks = put(client, 20)
    client.flush()
    lease = client.acquire(ns, keys_of(blocks))
    view = client.view(lease, lease.keys)
    put(client, 200, seed=1)  # three times what DRAM holds
    assert client.intact(lease, lease.keys)
    assert data_of(view) == data_of(blocks)
    lease.release()
    put(client, 200, seed=2)
    assert not client.intact(lease, lease.keys)


def test_a_lapsed_lease_shows_nothing_as_intact(client: Any) -> None:
    ns, blocks = put(client, 20)
    client.flush()
    lease = client.acquire(ns, keys_of(blocks), ttl_s=0.3)
    client.view(lease, lease.keys)
    assert client.intact(lease, lease.keys)
    time.sleep(0.4)
    put(client, 200, seed=1)
    assert not client.intact(lease, lease.keys)
    for read in (client.read, client.view):
        with pytest.raises(LeaseExpired):
            read(lease, lease.keys)


def test_a_slot_that_changed_hands_is_read_from_the_daemon(client: Any) -> None:
    ns, blocks = put(client, 10)
    lease = client.acquire(ns, keys_of(blocks))
    located = client._client._transport._leases[lease.id]
    stale = [(offset, generation + 1) for offset, generation in located.known.values()]
    located._at = dict(zip(lease.keys, stale, strict=True))
    for read in (client.read, client.view):
        located._at = dict(zip(lease.keys, stale, strict=True))
        assert data_of(read(lease, lease.keys)) == data_of(blocks)
    # and so is one that is named wrongly, since the frame knows whose it is
    located._at = dict(zip(lease.keys, reversed(list(located.known.values())), strict=True))
    read = client.read(lease, lease.keys)
    assert [d.outcome for d in read] == [Outcome.MISS] * 10
    assert client.corrupt_blocks == 10
    lease.release()


def test_a_generation_that_changes_during_the_copy_is_noticed(client: Any) -> None:
    ns, blocks = put(client, 2)
    with client.acquire(ns, keys_of(blocks)) as lease:
        transport = client._client._transport
        located, arena = transport._leases[lease.id], transport._arena
        pieces = Pieces.of(DS41F_LAYOUT.section_bytes, tuple(range(8)))
        room = memoryview(bytearray(2 * pieces.stride))
        (a, b) = located.known.values()
        places = [a, (b[0], b[1] + 1)]
        copied = arena.copy(lease.keys, places, pieces, room, [0, pieces.stride], True)
        assert copied == [Copied.GOOD, Copied.GONE]
        with pytest.raises(ValueError, match="outside"):
            arena.copy(lease.keys[:1], [(1 << 40, 0)], pieces, room, [0], True)


def test_a_byte_flipped_in_memory_is_a_counted_and_reported_miss(
    client: Any, daemon: Daemon
) -> None:
    ns, blocks = put(client, 3)
    client.flush()
    lease = client.acquire(ns, keys_of(blocks))
    offset, _ = client._client._transport._leases[lease.id].known[blocks[1].key]
    fd = arena_of(daemon)
    at = offset + frame_bytes(DS41F_LAYOUT.section_bytes).payload_offset + 5
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    before = client.stat().counters
    read = client.read(lease, lease.keys)
    assert [d.outcome for d in read] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert client.corrupt_blocks == 1
    after = client.stat().counters
    assert after["corrupt_reported_blocks"] == before["corrupt_reported_blocks"] + 1
    assert after["corrupt_dram_blocks"] == before["corrupt_dram_blocks"] + 1
    lease.release()
    # the SSD's copy is right
    with client.acquire(ns, keys_of(blocks)) as lease:
        assert data_of(client.read(lease, lease.keys)) == data_of(blocks)


def test_blocks_from_ssd_come_through_the_arena_or_past_it(client: Any) -> None:
    ns, blocks = put(client, 200)
    client.flush()
    with client.acquire(ns, keys_of(blocks)) as lease:
        assert lease.blocks == 200
        read = client.read(lease, lease.keys)
        assert data_of(read) == data_of(blocks)
        assert {d.tier for d in read} == {Tier.DRAM, Tier.SSD}
        for at in range(0, 200, 40):
            keys = lease.keys[at : at + 40]
            view = client.view(lease, keys)
            shown, intact = data_of(view), client.intact(lease, keys)
            assert not intact or shown == data_of(blocks[at : at + 40])
    stat = client.stat()
    assert (stat.leases, stat.pinned_blocks) == (0, 0)


def test_into_is_filled_at_every_blocks_own_place(client: Any) -> None:
    ns, blocks = put(client, 12)
    size = DS41F_LAYOUT.block_bytes
    room = np.zeros(12 * size + 7, np.uint8)
    with client.acquire(ns, keys_of(blocks)) as lease:
        for sections in (None, (2, 3), (5,)):
            room[:] = 0
            read = client.read(lease, lease.keys, sections, into=room)
            wanted = [
                list(b.sections) if sections is None else [b.sections[i] for i in sections]
                for b in blocks
            ]
            assert data_of(read) == wanted
            flat = b"".join(s for own in wanted for s in own)
            assert room[: len(flat)].tobytes() == flat
            assert not room[len(flat) :].any()
        with pytest.raises(KVStoreError, match="into"):
            client.read(lease, lease.keys, into=room[: 11 * size])
        with pytest.raises(KVStoreError, match="into"):
            client.read(lease, lease.keys, into=bytes(12 * size))


def test_a_restarted_daemon_is_another_one(tmp_path: Path) -> None:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", SETTINGS).start()
    try:
        with connect(f"{daemon.url}?data=shared") as client:
            ns, blocks = put(client, 10)
            client.flush()
            lease = client.acquire(ns, keys_of(blocks))
            view = client.view(lease, lease.keys)
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            assert not client.intact(lease, lease.keys)
            # the memory is still mapped, and nobody writes it any more
            assert data_of(view) == data_of(blocks)
            with pytest.raises(Unavailable):
                client.read(lease, lease.keys)
            daemon.start()
            ends_s = time.monotonic() + 20
            while True:
                try:
                    client.stat()
                    client.match(ns, lease.keys)
                    break
                except Unavailable:
                    assert time.monotonic() < ends_s
                    time.sleep(0.05)
            with pytest.raises(LeaseExpired):
                client.read(lease, lease.keys)
            with client.acquire(ns, keys_of(blocks)) as again:
                assert data_of(client.read(again, again.keys)) == data_of(blocks)
                assert {d.tier for d in client.view(again, again.keys)} <= {Tier.DRAM, Tier.SSD}
            assert client.stat().counters["located_blocks"] > 0
    finally:
        daemon.kill()


def test_sharing_can_be_turned_off(tmp_path: Path) -> None:
    settings = {**SETTINGS, "server.data_port.share": "false"}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        with pytest.raises(Unavailable, match="shares no memory"):
            connect(f"{daemon.url}?data=shared")
        with connect(daemon.url) as client:
            ns, blocks = put(client, 10)
            with client.acquire(ns, keys_of(blocks)) as lease:
                assert data_of(client.read(lease, lease.keys)) == data_of(blocks)
                view = client.view(lease, lease.keys)
                assert data_of(view) == data_of(blocks)
                assert client.intact(lease, lease.keys)
            counts = client.stat().counters
            assert counts["located_blocks"] == 0
            assert counts["port_connections"] == 2
    finally:
        daemon.kill()


def test_only_the_owner_reaches_the_sockets(daemon: Daemon) -> None:
    path = Path(daemon.url.removeprefix("unix://"))
    for socket in (path, path.with_name(path.name + ".data")):
        assert socket.stat().st_mode & 0o777 == 0o600
