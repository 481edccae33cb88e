"""The store inside the process: its thread or loop, its lock, its deadline, its end."""

import asyncio
import math
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemons import STORE_SETTINGS, chain, fresh_namespace, keys_of

from kvstore import AsyncClient, Client, Outcome, PutOutcome, connect, connect_async
from kvstore.errors import DiskError, StoreLocked, Unavailable
from kvstore.store import Engine

ENGINE_THREAD = "kvstore-engine"
STORED = PutOutcome.STORED


def engine_threads() -> int:
    return sum(t.name == ENGINE_THREAD for t in threading.enumerate())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with connect(url, **STORE_SETTINGS) as client:
        yield client


def test_what_was_put_is_there_after_closing_and_opening(url: str) -> None:
    descriptor = fresh_namespace()
    with connect(url, **STORE_SETTINGS) as client:
        ns = client.open_namespace(descriptor)
        blocks = chain(ns, 5)
        assert client.put(ns, blocks) == [STORED] * 5
    assert engine_threads() == 0
    with connect(url, **STORE_SETTINGS) as client:
        assert client.open_namespace(descriptor) == ns
        with client.acquire(ns, keys_of(blocks)) as lease:
            read = client.read(lease, lease.keys)
    assert [[bytes(s) for s in d.sections] for d in read] == [b.sections for b in blocks]


def test_a_second_opener_is_told_of_the_first(url: str, client: Client) -> None:
    threads = engine_threads()
    with pytest.raises(StoreLocked):
        connect(url, **STORE_SETTINGS)
    with pytest.raises(StoreLocked):
        asyncio.run(connect_async(url, **STORE_SETTINGS))
    assert engine_threads() == threads


def test_a_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError, match=str(file)):
        connect(f"file://{file}")
    assert engine_threads() == 0


def test_many_threads_share_it(client: Client) -> None:
    ns = client.open_namespace(fresh_namespace())
    chains = [chain(ns, 20, seed) for seed in range(8)]

    def work(seed: int) -> bool:
        assert client.put(ns, chains[seed]) == [STORED] * 20
        with client.acquire(ns, keys_of(chains[seed])) as lease:
            read = client.read(lease, lease.keys)
        return [list(map(bytes, d.sections)) for d in read] == [b.sections for b in chains[seed]]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_call_beyond_its_deadline_is_unavailable_and_runs_to_its_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()
    flush = Engine.flush

    async def slow(self: Engine) -> None:
        started.set()
        while not go.is_set():
            await asyncio.sleep(0.005)
        await flush(self)
        ended.set()

    monkeypatch.setattr(Engine, "flush", slow)
    with connect(url, deadline_s=5.0, **STORE_SETTINGS) as client:
        client._client.deadline_s = 0.05
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            client.flush()
        client._client.deadline_s = 5.0
        assert started.is_set()
        assert not ended.is_set()
        go.set()
        client.stat()
        assert ended.wait(20.0)


def test_a_wait_outlives_the_stores_longest(url: str) -> None:
    with connect(url, **{**STORE_SETTINGS, "limits.wait_s_max": 0.1}) as client:
        ns = client.open_namespace(fresh_namespace())
        (block,) = chain(ns, 1)
        held = client.reserve(ns, [(block.key, block.parent)]).reservation_id
        assert client.wait_for(ns, [block.key], 0.3).outcomes == (Outcome.PENDING,)
        client.write(held, block.key, block.sections)
        threading.Timer(0.5, client.commit, (held,)).start()
        assert client.wait_for(ns, [block.key], math.inf).outcomes == (Outcome.HIT,)


def test_the_same_on_the_callers_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = Engine.flush

    async def run() -> list[str]:
        seen: list[str] = []
        go = asyncio.Event()

        async def slow(self: Engine) -> None:
            await go.wait()
            await flush(self)
            seen.append("flushed")

        monkeypatch.setattr(Engine, "flush", slow)
        async with await connect_async(url, **STORE_SETTINGS) as client:
            client.deadline_s = 0.05
            with pytest.raises(Unavailable):
                await client.flush()
            cancelled = asyncio.create_task(client.flush())
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            client.deadline_s = 20.0
            go.set()
            await client.flush()
        return seen

    assert asyncio.run(run()) == ["flushed"] * 3


def test_tasks_share_it(url: str) -> None:
    async def work(client: AsyncClient, seed: int) -> bool:
        ns = await client.open_namespace(fresh_namespace())
        blocks = chain(ns, 20, seed)
        assert await client.put(ns, blocks) == [STORED] * 20
        async with await client.acquire(ns, keys_of(blocks)) as lease:
            read = await client.read(lease, lease.keys)
        return [list(map(bytes, d.sections)) for d in read] == [b.sections for b in blocks]

    async def run() -> list[bool]:
        async with await connect_async(url, **STORE_SETTINGS) as client:
            return await asyncio.gather(*(work(client, seed) for seed in range(8)))

    assert asyncio.run(run()) == [True] * 8


def test_another_loop_may_use_it_too(url: str) -> None:
    async def elsewhere(client: AsyncClient) -> bool:
        ns = await client.open_namespace(fresh_namespace())
        blocks = chain(ns, 3)
        await client.put(ns, blocks)
        return (await client.match(ns, keys_of(blocks))).hit_blocks == 3

    async def run() -> bool:
        async with await connect_async(url, **STORE_SETTINGS) as client:
            return await asyncio.to_thread(asyncio.run, elsewhere(client))

    assert asyncio.run(run())


def test_a_store_whose_loop_is_gone_says_so(url: str) -> None:
    client = asyncio.run(connect_async(url, **STORE_SETTINGS))
    with pytest.raises(Unavailable, match="loop"):
        asyncio.run(client.stat())


def test_a_byte_flipped_in_the_arena_is_a_miss(client: Client) -> None:
    ns = client.open_namespace(fresh_namespace())
    blocks = chain(ns, 2)
    client.put(ns, blocks)
    client.flush()
    transport = client._client._transport
    dram = transport._engine._dram
    with mmap.mmap(dram.fd, dram.budget_bytes) as arena:
        at = arena.find(blocks[1].sections[0])
        arena[at + 3] ^= 1
    with client.acquire(ns, keys_of(blocks)) as lease:
        read = client.read(lease, lease.keys)
        assert [d.outcome for d in read] == [Outcome.HIT, Outcome.MISS]
        assert client.corrupt_blocks == 1
        counters = client.stat().counters
        assert counters["corrupt_reported_blocks"] == 1
        assert counters["corrupt_dram_blocks"] == 1
        # The bad copy is gone; the one on SSD serves.
        (again,) = client.read(lease, lease.keys[1:])
    assert again.outcome is Outcome.HIT
    assert [bytes(s) for s in again.sections] == blocks[1].sections
