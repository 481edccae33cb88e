"""The window pool against a plain dictionary: who is there, whose bytes they are, who went."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.block import SnapshotPlace, SnapshotRef
from kvstore.config import StoreConfig, WindowsConfig, build_config
from kvstore.errors import ConfigError
from kvstore.metrics import Metrics
from kvstore.testing.clock import ManualClock
from kvstore.windows import WindowArena, WindowPool

PAGE = 4096
PAGES, OBJECTS_MAX, CANDIDATES_MAX = 12, 7, 3
NAMESPACES = {0: b"\0" * 32, 1: b"\1" * 32}
KEYS = [bytes([100 + n]) * 32 for n in range(4)]
"""Of one chain in either namespace."""
PLACES = [SnapshotPlace((b"", *KEYS)[n], n, tail) for n in range(5) for tail in range(2)]
SIZES = st.sampled_from([0, 1, 100, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 5, 5 * PAGE, 13 * PAGE])


def bytes_of(size: int, serial: int) -> bytes:
    return (serial.to_bytes(8, "little") * (size // 8 + 1))[:size]


def pool_of(pages: int = PAGES, **limits: int) -> WindowPool:
    config = WindowsConfig(
        **{"objects_max": OBJECTS_MAX, "candidates_max": CANDIDATES_MAX} | limits
    )
    return WindowPool(config, WindowArena(pages * PAGE), Metrics())


class PoolMachine(RuleBasedStateMachine):
    """The model: `live` in the order of use, name → (payload, place, expiry)."""

    @initialize()
    def start(self) -> None:
        self.clock, self.pool = ManualClock(), pool_of()
        self.live: dict = {}
        self.rooms: list = []
        self.reading: list = []
        self.serial = 0
        self.counts: Counter[str] = Counter()

    @property
    def now(self) -> float:
        return self.clock.monotonic_s()

    def lapse(self) -> None:
        over = [name for name, (_, _, expires_s) in self.live.items() if expires_s <= self.now]
        self.counts["windows_expired"] += len(over)
        for name in over:
            del self.live[name]

    def held_extents(self) -> dict:
        extents = {room.extent.start: room.extent for room, _ in self.rooms}
        return extents | {held.extent.start: held.extent for held, _ in self.reading}

    @rule(size=SIZES)
    def reserve(self, size: int) -> None:
        self.lapse()
        before = dict(self.live)
        held = self.held_extents()
        live_starts = {h.extent.start for h in self.pool}
        room = self.pool.reserve(size, self.now)
        there = {(held.namespace, held.name) for held in self.pool}
        gone = [name for name in before if name not in there]
        self.counts["windows_evicted"] += len(gone)
        read = {(h.namespace, h.name) for h, _ in self.reading if h.live}
        idle = [name for name in before if name not in read]
        assert gone == idle[: len(gone)], "not the least recently used went"
        for name in gone:
            del self.live[name]
        pages = max(1, -(-size // PAGE))
        held_pages = sum(extent.pages for extent in held.values())
        leaving = {h.extent.start for h, _ in self.reading if not h.live}
        if pages + held_pages > PAGES:
            assert room is None
            assert not gone, "what could not help went"
        elif room is None:
            assert gone == idle
        else:
            others = len(self.rooms) + len(leaving)
            assert len(self.live) + others < OBJECTS_MAX
            if gone and pages == 1 and len(before) + others - len(gone) + 1 < OBJECTS_MAX:
                # in one page there are no pieces: with one less gone there would be none free
                kept = [payload for name, (payload, _, _) in before.items() if name not in gone]
                kept.append(before[gone[-1]][0])
                used = sum(max(1, -(-len(payload) // PAGE)) for payload in kept)
                used += sum(e.pages for start, e in held.items() if start not in live_starts)
                assert used == PAGES, "more went than had to"
            self.serial += 1
            payload = bytes_of(size, self.serial)
            self.pool.room_view(room)[:] = payload
            self.rooms.append((room, payload))

    @precondition(lambda self: self.rooms)
    @rule(
        which=st.integers(0, 99),
        namespace=st.sampled_from([0, 1]),
        what=st.one_of(st.sampled_from(["a", "b", "c"]), st.sampled_from(PLACES)),
        ttl_s=st.sampled_from([1.0, 2.0, 5.0]),
    )
    def put(self, which: int, namespace: int, what: object, ttl_s: float) -> None:
        room, payload = self.rooms.pop(which % len(self.rooms))
        name, place = what, None
        if isinstance(what, SnapshotPlace):
            parent = what.parent or NAMESPACES[namespace]
            place = SnapshotPlace(parent, what.blocks, what.tail_tokens)
            name = bytes([10 * what.blocks + what.tail_tokens]) * 32
        digest = xxhash.xxh3_128_digest(payload)
        held = self.pool.put(room, namespace, name, place, digest, self.now + ttl_s)
        assert held.checksum == digest
        self.live.pop((namespace, name), None)
        self.live[namespace, name] = (payload, place, self.now + ttl_s)

    @rule(
        namespace=st.sampled_from([0, 1]), name=st.sampled_from("abcdef"), pages=st.integers(1, 3)
    )
    def put_at_once(self, namespace: int, name: str, pages: int) -> None:
        waiting = len(self.rooms)
        self.reserve(pages * PAGE)
        if len(self.rooms) > waiting:
            self.put(-1, namespace, name, 5.0)

    @precondition(lambda self: self.rooms)
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        self.pool.discard(self.rooms.pop(which % len(self.rooms))[0])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def use(self, which: int) -> None:
        namespace, name = list(self.live)[which % len(self.live)]
        self.lapse()
        held = self.pool.peek(namespace, name, self.now)
        assert (held is not None) == ((namespace, name) in self.live)
        if held is not None:
            payload, *rest = self.live.pop((namespace, name))
            self.live[namespace, name] = (payload, *rest)
            assert self.pool.use(held).readonly
            self.reading.append((held, payload))

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 99))
    def end_use(self, which: int) -> None:
        held, payload = self.reading.pop(which % len(self.reading))
        assert self.pool.arena.view(held.extent, held.payload_bytes) == payload
        self.pool.end_use(held)

    @rule(namespace=st.sampled_from([0, 1]), name=st.sampled_from(["a", "b", bytes(32)]))
    def drop(self, namespace: int, name: object) -> None:
        self.lapse()
        gone = self.live.pop((namespace, name), None)
        assert self.pool.drop(namespace, name, self.now) is (gone is not None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pool.expire(self.now)
        self.lapse()

    @rule(namespace=st.sampled_from([0, 1]), blocks=st.integers(0, 4))
    def look_up(self, namespace: int, blocks: int) -> None:
        self.lapse()
        found = self.pool.on_chain(namespace, NAMESPACES[namespace], KEYS[:blocks], self.now)
        behind = [
            SnapshotRef(name, place.blocks, place.tail_tokens, len(payload))
            for (ns, name), (payload, place, _) in self.live.items()
            if ns == namespace and place is not None and place.blocks <= blocks
        ]
        deepest = sorted(((r.blocks, r.tail_tokens) for r in behind), reverse=True)
        assert [(r.blocks, r.tail_tokens) for r in found] == deepest[:CANDIDATES_MAX]
        assert set(found) <= set(behind)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.pool.expire(self.now)
        self.lapse()
        pool, arena = self.pool, self.pool.arena
        assert {(h.namespace, h.name) for h in pool} == set(self.live)
        for held in pool:
            payload, place, expires_s = self.live[held.namespace, held.name]
            assert (held.place, held.expires_s) == (place, expires_s)
            assert arena.view(held.extent, held.payload_bytes) == payload
        for held, payload in self.reading:
            assert arena.view(held.extent, held.payload_bytes) == payload, "a reader was robbed"
        assert pool.payload_bytes == sum(len(p) for p, _, _ in self.live.values())
        extents = {h.extent for h in pool} | set(self.held_extents().values())
        assert arena.used_bytes == PAGE * sum(e.pages for e in extents) <= PAGES * PAGE
        counts = pool.metrics.counts
        assert {name: counts[name] for name in self.counts} == self.counts


PoolMachine.TestCase.settings = settings(stateful_step_count=40, max_examples=60)
TestPool = PoolMachine.TestCase


@pytest.mark.long
class TestPoolLong(PoolMachine.TestCase):
    settings = settings(stateful_step_count=100, max_examples=600)


def put_of(pool: WindowPool, name: bytes | str, size: int, place=None, at: float = 0.0) -> bool:
    room = pool.reserve(size, at)
    if room is None:
        return False
    pool.put(room, 0, name, place, bytes(16), at + 10.0)
    return True


def test_room_for_one_takes_no_more_than_it_must() -> None:
    pool = pool_of(pages=4)
    for name in "abcd":
        assert put_of(pool, name, PAGE)
    pool.end_use(pool_use(pool, "a"))
    assert put_of(pool, "e", PAGE)
    assert [held.name for held in pool] == ["c", "d", "a", "e"]
    assert put_of(pool, "f", 2 * PAGE)
    assert "f" in {held.name for held in pool}
    pool.check_integrity()


def pool_use(pool: WindowPool, name: str):
    held = pool.peek(0, name, 0.0)
    pool.use(held)
    return held


def test_what_is_read_does_not_go_and_then_goes_at_once() -> None:
    pool = pool_of(pages=4)
    assert put_of(pool, "a", 3 * PAGE)
    reader, other = pool_use(pool, "a"), pool_use(pool, "a")
    assert not put_of(pool, "b", 2 * PAGE)
    assert put_of(pool, "a", PAGE), "beside the one that is read"
    assert pool.arena.used_bytes == 4 * PAGE
    pool.end_use(reader)
    assert pool.arena.used_bytes == 4 * PAGE
    pool.end_use(other)
    assert pool.arena.used_bytes == PAGE
    pool.check_integrity()


def test_expiry_is_the_very_instant() -> None:
    pool = pool_of()
    put_of(pool, "a", 1)
    assert pool.peek(0, "a", 9.999) is not None
    assert pool.peek(0, "a", 10.0) is None
    assert pool.arena.used_bytes == 0


def test_a_place_that_the_chain_contradicts_is_not_told() -> None:
    pool = pool_of()
    put_of(pool, b"1" * 32, 1, SnapshotPlace(KEYS[1], 1, 3))
    put_of(pool, b"2" * 32, 1, SnapshotPlace(KEYS[1], 2, 3))
    refs = pool.on_chain(0, NAMESPACES[0], KEYS, 0.0)
    assert [ref.key for ref in refs] == [b"2" * 32]


def test_of_equally_deep_ones_the_latest_are_told() -> None:
    pool = pool_of(candidates_max=2)
    names = [bytes([n]) * 32 for n in range(4)]
    for name in names:
        put_of(pool, name, 1, SnapshotPlace(KEYS[0], 1, 3))
    refs = pool.on_chain(0, NAMESPACES[0], KEYS, 0.0)
    assert [ref.key for ref in refs] == [names[3], names[2]]


def test_many_snapshots_and_long_chains_are_looked_up_alike() -> None:
    pool = pool_of(pages=64, objects_max=64, candidates_max=64)
    chain = [n.to_bytes(32, "big") for n in range(1, 200)]
    for n in range(40):
        put_of(pool, bytes([n]) * 32, 1, SnapshotPlace(chain[n], n + 1, 0))
    for blocks in (1, 20, 39, 40, 41, 199):
        refs = pool.on_chain(0, NAMESPACES[0], chain[:blocks], 0.0)
        assert [ref.blocks for ref in refs] == list(range(min(blocks, 40), 0, -1))


def test_replacing_again_and_again_keeps_the_books_short() -> None:
    pool = pool_of()
    for _ in range(1000):
        assert put_of(pool, "a", 2 * PAGE)
        pool.check_integrity()
    assert len(pool) == 1


@pytest.mark.parametrize("budget_bytes", [0, 4095])
def test_without_a_page_there_is_no_pool(budget_bytes: int) -> None:
    pool = WindowPool(WindowsConfig(), WindowArena(budget_bytes), Metrics())
    assert not put_of(pool, "a", 0)
    assert pool.arena.budget_bytes == pool.arena.used_bytes == 0
    pool.check_integrity()


def resident_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Rss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_memory_is_the_systems_again_once_it_is_free() -> None:
    size = 64 << 20
    arena = WindowArena(size)
    before = resident_bytes()
    extents = [arena.alloc(size // 4) for _ in range(4)]
    assert arena.alloc(1) is None
    assert resident_bytes() < before + size // 4, "nothing is taken before it is written"
    for extent in extents:
        np.frombuffer(arena.view(extent, size // 4), np.uint8)[:] = 120
    assert resident_bytes() > before + size * 7 // 8
    for extent in extents[:3]:
        arena.free(extent)
    assert resident_bytes() < before + size * 3 // 8
    assert arena.used_bytes == size // 4
    assert bytes(arena.view(extents[3], 4)) == b"xxxx"


def test_a_budget_that_can_not_be_had_is_a_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"lower windows\.budget_bytes"):
        WindowArena(1 << 61)


def test_the_budget_is_a_tenth_unless_it_is_set() -> None:
    assert build_config(StoreConfig, {"dram": {"budget_bytes": 10 << 20}}).windows_budget_bytes == (
        1 << 20
    )
    given = {"dram": {"budget_bytes": 10 << 20}, "windows": {"budget_bytes": "3MiB"}}
    assert build_config(StoreConfig, given).windows_budget_bytes == 3 << 20
    with pytest.raises(ConfigError, match=r"windows\.ttl"):
        build_config(StoreConfig, {"windows": {"ttl": os.getpid()}})
