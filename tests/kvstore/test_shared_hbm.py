"""Reading out of a (simulated) device's memory from another process: IPC, leases, generations."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemons import STORE_SETTINGS, Daemon, chain, fresh_namespace, keys_of

from kvstore import DS41F_LAYOUT, BlockPut, Outcome, PutOutcome, Tier, connect
from kvstore.client.shared_arena import Copied, Pieces
from kvstore.client.shared_hbm import SharedHbmView, open_shared
from kvstore.errors import KVStoreError, Unavailable
from kvstore.tiers.frame import frame_bytes

FRAME = frame_bytes(DS41F_LAYOUT.section_bytes).total
SETTINGS = {
    **STORE_SETTINGS,
    "dram.budget_bytes": "16MiB",
    "ssd.budget_bytes": "256MiB",
    "hbm.device": "simulated",
    "hbm.devices": "0,1",
    "hbm.budget_bytes": 6 * FRAME,
    "hbm.held_fraction_max": 0.75,
}
WAIT_S = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("hbm")
    daemon = Daemon(f"unix://{folder}/kv.sock", folder / "store", SETTINGS)
    yield daemon.start()
    daemon.kill()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Any]:
    with connect(f"{daemon.url}?data=shared") as client:
        assert client.open_hbm() == "simulated"
        yield client
        client.flush()
        client.evict()


def objects(client: Any, tier: Tier) -> int:
    return next(t.objects for t in client.stat().tiers if t.tier is tier)


def until(check: Any) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(0.01)


def put_into_hbm(client: Any, blocks: int, seed: int = 0) -> tuple[Any, list[BlockPut]]:
    """Blocks that were hit once, and lie in HBM by now."""
    ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
    made = chain(ns, blocks, seed)
    assert client.put(ns, made) == [PutOutcome.STORED] * blocks
    before = objects(client, Tier.HBM)
    client.acquire(ns, keys_of(made)).release()
    until(lambda: objects(client, Tier.HBM) == before + blocks)
    return ns, made


def data_of(blocks: Any) -> list[list[bytes]]:
    return [list(map(bytes, block.sections)) for block in blocks]


def expected(made: list[BlockPut]) -> list[list[bytes]]:
    return [list(map(bytes, block.sections)) for block in made]


def test_blocks_are_read_out_of_the_devices(client: Any) -> None:
    ns, made = put_into_hbm(client, 6)
    assert client.match(ns, keys_of(made)).residency[0] & Tier.HBM
    with client.acquire(ns, keys_of(made)) as lease:
        found = client.read(lease, keys_of(made))
    assert [block.tier for block in found] == [Tier.HBM] * 6
    assert data_of(found) == expected(made)
    some = [3, 1]
    with client.acquire(ns, keys_of(made)) as lease:
        found = client.read(lease, keys_of(made), some)
    assert data_of(found) == [[own[i] for i in some] for own in expected(made)]
    stat = client.stat()
    assert stat.lookup_blocks["hit_hbm"] >= 6
    assert any("simulated device 1" in note for note in stat.notes)


def test_blocks_are_used_in_place_and_can_not_be_written(client: Any) -> None:
    ns, made = put_into_hbm(client, 4)
    with client.acquire(ns, keys_of(made)) as lease:
        blocks = client.view_hbm(lease, keys_of(made))
        assert {block.device for block in blocks} == {0, 1}
        assert {block.kind for block in blocks} == {"simulated"}
        assert data_of(blocks) == expected(made)
        assert client.intact(lease, keys_of(made))
        with pytest.raises(ValueError, match="read-only"):
            blocks[0].sections[0][0] = 1


def test_a_block_that_left_is_told_by_its_generation(client: Any) -> None:
    ns, made = put_into_hbm(client, 3)
    lease = client.acquire(ns, keys_of(made))
    blocks = client.view_hbm(lease, keys_of(made))
    assert client.intact(lease, keys_of(made))
    # the lease keeps the slots
    assert client.evict(ns, tier=Tier.HBM) == 0
    assert client.intact(lease, keys_of(made))
    with connect(client_url(client)) as other:
        other_lease = other.acquire(ns, keys_of(made))
        client._client._transport._leases[lease.id].expires_s += WAIT_S
        run_release(client, lease.id)
        assert client.evict(ns, tier=Tier.HBM) == 3
        other_lease.release()
    assert not client.intact(lease, keys_of(made))
    assert blocks[0] is not None


def client_url(client: Any) -> str:
    return str(client._client._transport._peer)


def run_release(client: Any, lease_id: int) -> None:
    """Release at the daemon alone, as if the lease had lapsed there."""
    from kvstore.client.remote import RemoteTransport
    from kvstore.client.transport import run_now

    run_now(RemoteTransport.release(client._client._transport, lease_id, WAIT_S))


def test_a_read_of_a_block_that_left_goes_another_way(client: Any) -> None:
    ns, made = put_into_hbm(client, 3)
    lease = client.acquire(ns, keys_of(made))
    keeper = client.acquire(ns, keys_of(made))
    run_release(client, keeper.id)
    transport = client._client._transport
    known = transport._leases[lease.id]
    # as if the slots had been given away since
    known.in_hbm = {key: (at, generation + 1) for key, (at, generation) in known.in_hbm.items()}
    found = client.read(lease, keys_of(made))
    assert [block.tier for block in found] == [Tier.DRAM] * 3
    assert data_of(found) == expected(made)
    lease.release()


def test_wrong_bytes_on_the_device_are_found_by_the_reader(client: Any, daemon: Daemon) -> None:
    ns, made = put_into_hbm(client, 2)
    with client.acquire(ns, keys_of(made)) as lease:
        known = client._client._transport._leases[lease.id]
        offset, _ = known.in_hbm[keys_of(made)[1]]
        flip(known.hbm, offset + 5000)
        found = client.read(lease, keys_of(made))
        assert [block.outcome for block in found] == [Outcome.HIT, Outcome.MISS]
        # the daemon has looked too, and serves another copy
        again = client.acquire(ns, keys_of(made))
        (block,) = client.read(again, keys_of(made)[1:])
        assert block.outcome is Outcome.HIT
        assert data_of([block]) == expected(made[1:])
        again.release()
    assert client.corrupt_blocks == 1
    assert client.stat().counters["corrupt_hbm_blocks"] == 1


def flip(hbm: SharedHbmView, offset: int) -> None:
    """One bit of a pool, through a mapping of our own that may write."""
    pool, at = hbm._hbm.place(offset // 4096 * 4096, 4096)  # type: ignore[misc]
    pid, fd, _ = pool.handle.handle.split(b":", 2)
    with open(f"/proc/{int(pid)}/fd/{int(fd)}", "r+b", buffering=0) as file:
        at += offset % 4096
        (old,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old ^ 1]), at)


def test_what_leases_hold_has_a_limit(client: Any) -> None:
    ns, made = put_into_hbm(client, 10)
    with client.acquire(ns, keys_of(made)) as lease:
        assert len(client._client._transport._leases[lease.id].in_hbm) == 10
        # 0.75 of twelve slots are held, the tenth may go
        assert client.evict(ns, tier=Tier.HBM) == 1


def test_a_client_that_did_not_open_hbm_holds_nothing(client: Any, daemon: Daemon) -> None:
    ns, made = put_into_hbm(client, 2)
    with connect(f"{daemon.url}?data=shared") as other:
        other_ns = other.open_namespace(ns.namespace)
        lease = other.acquire(other_ns, keys_of(made))
        assert other.view_hbm(lease, keys_of(made)) == [None, None]
        assert [b.tier for b in other.read(lease, keys_of(made))] == [Tier.DRAM] * 2
        assert client.evict(ns, tier=Tier.HBM) == 2
        lease.release()


@pytest.mark.parametrize("data", ["grpc", "port"])
def test_other_ways_go_by_the_host(client: Any, daemon: Daemon, data: str) -> None:
    ns, made = put_into_hbm(client, 3)
    client.flush()
    assert client.evict(ns, tier=Tier.DRAM) == 3
    with connect(f"{daemon.url}?data={data}") as other:
        other_ns = other.open_namespace(ns.namespace)
        with other.acquire(other_ns, keys_of(made)) as lease:
            found = other.read(lease, keys_of(made))
    assert [block.tier for block in found] == [Tier.HBM] * 3
    assert data_of(found) == expected(made)
    assert client.stat().counters["copied_back_blocks"] >= 3


def test_places_that_are_none_show_nothing() -> None:
    from kvstore.tiers.hbm import HbmTier
    from kvstore.tiers.hbm.simulated import SimulatedDevice
    from kvstore.v1 import kvstore_pb2 as pb

    tier = HbmTier([SimulatedDevice(0)], 2 * FRAME)
    shared = tier.share()
    opened = pb.PortOpenReply(hbm_generations=shared.generations)
    for p in shared.pools:
        opened.hbm_pools.add(kind=p.kind, device=p.device, size_bytes=p.size_bytes, handle=p.handle)
    view = open_shared(opened)
    assert view is not None
    pieces = Pieces.of(DS41F_LAYOUT.section_bytes, (0, 7))
    room = memoryview(bytearray(pieces.stride))
    for offset in (1, 4096, 2 * FRAME, 1 << 60):
        assert view.block(bytes(32), (offset, 1 << 40), pieces) is None
        copied = view.copy([bytes(32)], [(offset, 1 << 40)], pieces, room, [0], True)
        assert copied == [Copied.GONE]
    # right generation, no frame there
    assert view.copy([bytes(32)], [(0, 0)], pieces, room, [0], True) == [Copied.CORRUPT]
    assert np.frombuffer(room, np.uint8).sum() == 0
    view.close()
    tier.close()


def test_a_daemon_that_is_gone_shows_no_more(tmp_path: Any) -> None:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", SETTINGS).start()
    try:
        with connect(f"{daemon.url}?data=shared", deadline_s=5.0) as client:
            assert client.open_hbm() == "simulated"
            ns, made = put_into_hbm(client, 2)
            lease = client.acquire(ns, keys_of(made))
            client.view_hbm(lease, keys_of(made))
            assert client.intact(lease, keys_of(made))
            daemon.kill()
            until(lambda: not client.intact(lease, keys_of(made)))
            assert client.view_hbm(lease, keys_of(made)) == [None, None]
            with pytest.raises((Unavailable, KVStoreError)):
                client.read(lease, keys_of(made))
            daemon.start()
            # the next daemon's pools are opened anew
            ns, made = put_into_hbm(client, 2, seed=1)
            with client.acquire(ns, keys_of(made)) as lease:
                blocks = client.view_hbm(lease, keys_of(made))
                assert data_of(blocks) == expected(made)
    finally:
        daemon.kill()
