"""Reading out of a (simulated) device's memory in the store's own process: leases, generations."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import STORE_SETTINGS, chain, fresh_namespace, keys_of

from kvstore import DS41F_LAYOUT, BlockPut, Client, PutOutcome, Tier, connect, connect_async
from kvstore.tiers.frame import frame_bytes

FRAME = frame_bytes(DS41F_LAYOUT.section_bytes).total
SETTINGS = {
    **STORE_SETTINGS,
    "hbm.device": "simulated",
    "hbm.devices": "0,1",
    "hbm.budget_bytes": 4 * FRAME,
    "hbm.held_fraction_max": 0.75,
}
WAIT_S = 30.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with connect(url, **SETTINGS) as client:
        assert client.open_hbm() == "simulated"
        yield client


def in_hbm(client: Client, blocks: int) -> tuple[Any, list[BlockPut]]:
    """Blocks that were hit once, and lie in HBM by now."""
    ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
    made = chain(ns, blocks)
    assert client.put(ns, made) == [PutOutcome.STORED] * blocks
    client.acquire(ns, keys_of(made)).release()
    ends_s = time.monotonic() + WAIT_S
    while not any(t.tier is Tier.HBM and t.objects == blocks for t in client.stat().tiers):
        assert time.monotonic() < ends_s, "they were not promoted in time"
        time.sleep(0.01)
    return ns, made


def test_blocks_are_used_in_place_and_can_not_be_written(client: Client) -> None:
    ns, made = in_hbm(client, 6)
    with client.acquire(ns, keys_of(made)) as lease:
        blocks = client.view_hbm(lease, keys_of(made), [3, 1])
        for block, put in zip(blocks, made, strict=True):
            assert block is not None
            assert [bytes(s) for s in block.sections] == [bytes(put.sections[i]) for i in (3, 1)]
        assert {block.device for block in blocks if block} == {0, 1}
        assert client.intact(lease, keys_of(made))
        with pytest.raises(ValueError, match="read-only"):
            blocks[0].sections[0][0] = 1  # type: ignore[union-attr]


def test_a_lease_keeps_its_slots_and_a_block_that_left_is_told(client: Client) -> None:
    ns, made = in_hbm(client, 3)
    lease = client.acquire(ns, keys_of(made))
    client.view_hbm(lease, keys_of(made))
    assert client.evict(ns, tier=Tier.HBM) == 0
    assert client.intact(lease, keys_of(made))
    transport: Any = client._client._transport
    kept = transport._leases[lease.id]
    lease.release()
    assert client.view_hbm(lease, keys_of(made)) == [None] * 3
    assert client.evict(ns, tier=Tier.HBM) == 3
    assert not client.intact(lease, keys_of(made))
    assert not kept.intact(keys_of(made)[:1])


def test_leases_from_before_know_nothing_and_lapsed_ones_are_forgotten(url: str) -> None:
    with connect(url, **SETTINGS) as client:
        ns, made = in_hbm(client, 2)
        before = client.acquire(ns, keys_of(made))
        assert client.open_hbm() == "simulated"
        assert client.view_hbm(before, keys_of(made)) == [None, None]
        transport: Any = client._client._transport
        first = client.acquire(ns, keys_of(made))
        assert None not in client.view_hbm(first, keys_of(made))
        transport._leases[first.id].expires_s = 0.0
        assert client.view_hbm(first, keys_of(made)) == [None, None]
        first.renew()
        assert None not in client.view_hbm(first, keys_of(made))
        transport._leases[first.id].expires_s = 0.0
        second = client.acquire(ns, keys_of(made))
        assert list(transport._leases) == [second.id]


def test_a_store_without_the_tier_opens_none(url: str) -> None:
    with connect(url, **STORE_SETTINGS) as client:
        assert client.open_hbm() is None
        ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
        made = chain(ns, 1)
        client.put(ns, made)
        with client.acquire(ns, keys_of(made)) as lease:
            assert client.view_hbm(lease, keys_of(made)) == [None]


def test_the_suspending_client_has_the_same(url: str) -> None:
    async def run() -> None:
        async with await connect_async(url, **SETTINGS) as client:
            assert await client.open_hbm() == "simulated"
            ns = await client.open_namespace(fresh_namespace(DS41F_LAYOUT))
            made = chain(ns, 2)
            await client.put(ns, made)
            await (await client.acquire(ns, keys_of(made))).release()
            ends_s, shown = time.monotonic() + WAIT_S, [None]
            while None in shown:
                assert time.monotonic() < ends_s, "they were not promoted in time"
                await asyncio.sleep(0.01)
                async with await client.acquire(ns, keys_of(made)) as lease:
                    shown = client.view_hbm(lease, keys_of(made))
            assert [[bytes(s) for s in b.sections] for b in shown if b] == [
                [bytes(s) for s in put.sections] for put in made
            ]

    asyncio.run(run())
