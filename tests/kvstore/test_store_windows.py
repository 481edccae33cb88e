"""Window snapshots and hand-over records in the engine: steps cut in half, wrong bytes, waits."""

import asyncio
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import xxhash
from engine_harness import engine_config, engine_test, opened
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import PutOutcome, SnapshotPlace
from kvstore.errors import InvalidRequest, MessageTooLarge, Overloaded, Unavailable
from kvstore.store.types import WindowHead, WindowPut
from kvstore.testing.clock import ManualClock
from kvstore.testing.workers import SimulatedWorkers

PAGE = 4096
STORED = PutOutcome.STORED
WAIT_S = 30.0


def config_of(**windows):
    given = {"budget_bytes": 8 * PAGE, "payload_bytes_max": 8 * PAGE} | windows
    return engine_config(None, ssd=None, windows=given)


def put_of(name, payload=b"payload", ttl_s=None, checksum=None, place=None):
    digest = xxhash.xxh3_128_digest(payload) if checksum is None else checksum
    return WindowPut(WindowHead(name, place, len(payload), digest, ttl_s), payload)


async def payload_of(engine, ns, name):
    frame = await engine.get_window(ns, name)
    if frame is None:
        return None
    try:
        return bytes(frame.payload)
    finally:
        frame.done()
        frame.done()


def arena_of(engine):
    return engine._core.windows.arena


async def until(true):
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


@engine_test
async def test_wrong_bytes_are_refused_and_what_was_there_stays():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        assert await engine.put_window(ns, put_of("r", b"right")) is STORED
        assert await engine.put_window(ns, put_of("r", b"wrong", checksum=bytes(16))) is (
            PutOutcome.CORRUPT
        )
        assert await payload_of(engine, ns, "r") == b"right"
        assert engine.stat().counters["corrupt_windows"] == 1
        assert engine.stat().windows.used_bytes == PAGE


@engine_test
async def test_a_byte_that_turns_in_the_pool_is_a_miss_and_goes():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        await engine.put_window(ns, put_of("r", bytes(5000)))
        (held,) = engine._core.windows
        arena_of(engine).view(held.extent, 5000)[4321] ^= 1
        assert await engine.get_window(ns, "r") is None
        stat = engine.stat()
        assert stat.windows.objects == stat.windows.used_bytes == 0
        assert (stat.counters["corrupt_windows"], stat.counters["windows_miss"]) == (1, 1)


@engine_test
async def test_a_put_that_nobody_waits_for_gives_its_room_back():
    """The copy runs on: its memory must be nobody else's until it has ended."""
    workers = SimulatedWorkers(Random(1), latency_s=0.05)
    async with opened(config_of(), workers=workers) as engine:
        ns = engine.open_namespace(NS)
        await engine.put_window(ns, put_of("old", bytes(7 * PAGE)))
        for n in range(2):
            put = asyncio.ensure_future(engine.put_window(ns, put_of(f"r{n}", bytes(3 * PAGE))))
            await asyncio.sleep(0)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            assert arena_of(engine).used_bytes >= 3 * (n + 1) * PAGE
            engine.check_integrity()
        assert await engine.put_window(ns, put_of("r2", bytes(3 * PAGE))) is PutOutcome.NO_SPACE
        await until(lambda: engine.stat().windows.objects == 2)
        assert await engine.put_window(ns, put_of("all", bytes(8 * PAGE))) is STORED


@engine_test
async def test_a_reader_keeps_its_bytes_whatever_happens_to_the_object():
    clock = ManualClock()
    async with opened(config_of(), clock) as engine:
        ns = engine.open_namespace(NS)
        frames = []
        for n, payload in enumerate((b"a" * 5000, b"b" * 5000, b"c" * 5000)):
            await engine.put_window(ns, put_of("r", payload, ttl_s=5.0))
            frames.append((await engine.get_window(ns, "r"), payload))
            if n == 1:
                clock.advance(6.0)
        assert engine.drop_window(ns, "r")
        assert engine.stat().windows.objects == 0
        assert engine.stat().windows.used_bytes == 6 * PAGE
        assert await engine.put_window(ns, put_of("s", bytes(3 * PAGE))) is PutOutcome.NO_SPACE
        assert engine.stat().counters["windows_refused"] == 1
        for frame, payload in frames:
            assert bytes(frame.payload) == payload
            frame.done()
        assert engine.stat().windows.used_bytes == 0
        assert await engine.put_window(ns, put_of("s", bytes(3 * PAGE))) is STORED


@engine_test
async def test_a_payload_may_come_in_pieces():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        payload = np.random.default_rng(0).bytes(10_000)
        writer = engine.begin_window(ns, put_of("r", payload).head)
        for at in range(0, 10_000, 3_000):
            writer.append(payload[at : at + 3_000])
            assert await engine.get_window(ns, "r") is None
        assert await writer.commit() is STORED
        writer.abort()
        assert await payload_of(engine, ns, "r") == payload
        short = engine.begin_window(ns, put_of("s", payload).head)
        short.append(payload[:-1])
        with pytest.raises(InvalidRequest, match="9999 B of payload came, 10000 B were announced"):
            await short.commit()
        long = engine.begin_window(ns, put_of("t", payload).head)
        long.append(payload)
        with pytest.raises(InvalidRequest, match="more than the 10000 B"):
            long.append(b"x")
        long.abort()
        wrong = engine.begin_window(ns, put_of("u", payload).head)
        wrong.append(payload[::-1])
        assert await wrong.commit() is PutOutcome.CORRUPT
        assert [held.name for held in engine._core.windows] == ["r"]
        assert engine.stat().windows.used_bytes == 3 * PAGE


@engine_test
async def test_wrong_heads_are_refused_before_anything_goes():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        await engine.put_window(ns, put_of("kept", bytes(8 * PAGE)))
        tokens = NS.layout.block_tokens
        key, good = b"k" * 32, bytes(16)

        at_start = SnapshotPlace(ns, 0, 1)

        def head(name=key, place=at_start, size=9, checksum=good, ttl_s=None):
            return WindowHead(name, place, size, checksum, ttl_s)

        for wrong, says in (
            (head(name=b"short"), "32 bytes, not 5"),
            (head(name="r"), "a snapshot has a key and a place"),
            (head(place=None), "a snapshot has a key and a place"),
            (head(place=SnapshotPlace(ns, 0, tokens)), f"fewer than {tokens} tokens"),
            (head(place=SnapshotPlace(ns, 0, -1)), "not 0 and -1"),
            (head(place=SnapshotPlace(b"x", 1, 0)), "32 bytes, not 1"),
            (head(place=SnapshotPlace(key, 0, 1)), "is the namespace id"),
            (head(checksum=b""), "16 bytes, not 0"),
            (head(ttl_s=-1.0), "above 0, not -1"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                engine.begin_window(ns, wrong)
        for size in (-1, 8 * PAGE + 1):
            with pytest.raises(MessageTooLarge, match=r"windows\.payload_bytes_max"):
                engine.begin_window(ns, head(size=size))
        with pytest.raises(InvalidRequest, match="7 B was announced with 9 B"):
            await engine.put_window(ns, WindowPut(head(), b"payload"))
        assert engine.stat().windows.objects == 1


@engine_test
async def test_lifetimes_are_the_stores_to_bound():
    clock = ManualClock()
    config = config_of(ttl_s_default=10.0, ttl_s_max=100.0)
    async with opened(config, clock) as engine:
        ns = engine.open_namespace(NS)
        for name, ttl_s in (("default", None), ("short", 1.0), ("long", 1e9)):
            await engine.put_window(ns, put_of(name, ttl_s=ttl_s))
        for advance, left in ((0.99, 3), (0.01, 2), (8.99, 2), (0.01, 1), (89.99, 1), (0.01, 0)):
            clock.advance(advance)
            assert engine.stat().windows.objects == left
        assert engine.stat().counters["windows_expired"] == 3


@engine_test
async def test_what_lapses_goes_without_anybody_asking():
    clock = ManualClock()
    async with opened(config_of(), clock) as engine:
        ns = engine.open_namespace(NS)
        await engine.put_window(ns, put_of("r", bytes(PAGE), ttl_s=1.0))
        clock.advance(2.0)
        await until(lambda: arena_of(engine).used_bytes == 0)


@engine_test
async def test_a_wait_is_woken_by_its_own_record_alone():
    async with opened(config_of()) as engine:
        ns, other = engine.open_namespace(NS), engine.open_namespace(replace(NS, model="another"))
        waits = [asyncio.ensure_future(engine.wait_window(ns, "r", WAIT_S)) for _ in range(5)]
        await asyncio.sleep(0)
        await engine.put_window(ns, put_of("s"))
        await engine.put_window(other, put_of("r"))
        await engine.put_window(ns, put_of("r", checksum=bytes(16)))
        await asyncio.sleep(0.01)
        assert not any(wait.done() for wait in waits)
        await engine.put_window(ns, put_of("r"))
        async with asyncio.timeout(WAIT_S / 2):
            assert await asyncio.gather(*waits) == [True] * 5
        assert not await engine.wait_window(ns, "never", 0.01)


@engine_test
async def test_a_record_that_went_before_its_waiter_woke_is_waited_for_again():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        wait = asyncio.ensure_future(engine.wait_window(ns, "r", WAIT_S))
        await asyncio.sleep(0)
        engine._driver.settled.wake_all()
        await asyncio.sleep(0.01)
        assert not wait.done()
        await engine.put_window(ns, put_of("r"))
        assert await wait


@engine_test
async def test_too_many_waits_are_refused():
    config = engine_config(None, ssd=None, limits={"waiters_max": 2})
    async with opened(config) as engine:
        ns = engine.open_namespace(NS)
        waits = [asyncio.ensure_future(engine.wait_window(ns, "r", WAIT_S)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"limits\.waiters_max"):
            await engine.wait_window(ns, "r", WAIT_S)
        await engine.put_window(ns, put_of("r"))
        assert await asyncio.gather(*waits) == [True, True]


@engine_test
async def test_waits_end_with_the_store():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        (block,) = blocks_of(ns, range(1))
        await engine.reserve(ns, [(block.key, block.parent)])
        waits = [
            asyncio.ensure_future(engine.wait_window(ns, "r", WAIT_S)),
            asyncio.ensure_future(engine.wait_for(ns, [block.key], WAIT_S)),
        ]
        await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S / 2):
        results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 2


@engine_test
async def test_blocks_and_windows_leave_each_other_alone():
    async with opened(config_of()) as engine:
        ns = engine.open_namespace(NS)
        blocks = blocks_of(ns, range(4))
        keys = keys_of(blocks)
        place = SnapshotPlace(keys[1], 2, 3)
        await engine.put_window(ns, put_of(b"k" * 32, place=place))
        # the parent is no block of the store, and the snapshot is told of all the same
        match = engine.match(ns, keys)
        assert (match.hit_blocks, len(match.snapshots)) == (0, 1)
        assert await engine.put(ns, blocks) == [STORED] * len(blocks)
        assert engine.match(ns, keys).hit_blocks == len(blocks)
        assert engine.match(ns, keys[:1]).snapshots == ()
        await engine.evict()
        assert await payload_of(engine, ns, b"k" * 32) == b"payload"
        assert engine.stat().tiers[0].used_bytes == 0
