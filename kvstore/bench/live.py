"""Replaying a trace against a running store: real bytes in the real layout, several sessions.

Every block of the trace becomes a block of the released layout with as many tokens, under the key
that its prefix has; its bytes follow from its number, so that whatever is read can be checked. A
request looks its chain up, takes a lease on the hit, reads and checks it, and puts the rest. The
requests start in the order of the trace, at most `sessions` at a time, each when its time (divided
by `speedup`) has come and the request that it continues has ended.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.bench.simulate import Replay, simulate
from kvstore.bench.sweep import maker
from kvstore.bench.trace import Trace
from kvstore.block import BlockData, BlockPut, Outcome, Tier
from kvstore.client import Client, Lease, NamespaceHandle
from kvstore.errors import DiskError, InvalidRequest
from kvstore.namespace import DS41F_LAYOUT, Layout, Namespace
from kvstore.prefix_hash import block_keys

_POOL_BITS: Final = 23
_READ_BYTES: Final = 64 << 20
_LOOKS: Final = 10
_SAMPLES: Final = 200
_STEP: Final = 0x9E3779B1

Bytes = npt.NDArray[np.uint8]


def layout_for(trace: Trace) -> Layout:
    """The released layout with the trace's block length."""
    try:
        return replace(DS41F_LAYOUT, block_tokens=trace.block_tokens)
    except InvalidRequest as e:
        raise InvalidRequest(f"blocks of {trace.name} can't have the released layout: {e}") from e


class Contents:
    """The bytes of every block: pieces of one random pool, from a place of the block's own."""

    def __init__(self, layout: Layout, seed: int) -> None:
        random = np.random.default_rng(seed)
        size = (1 << _POOL_BITS) + layout.block_bytes
        self._pool: Bytes = random.integers(0, 256, size, dtype=np.uint8)
        self._places = list(zip(layout.section_offsets, layout.section_bytes, strict=True))

    def sections(self, block: int) -> list[Bytes]:
        """One array per section."""
        # odd, so that 2^23 blocks have 2^23 places
        at = block * _STEP % (1 << _POOL_BITS)
        return [self._pool[at + offset : at + offset + n] for offset, n in self._places]

    def same(self, block: int, sections: Sequence[memoryview]) -> bool:
        """Whether these are the block's sections."""
        mine = self.sections(block)
        return len(mine) == len(sections) and all(
            np.array_equal(one, np.frombuffer(other, np.uint8))
            for one, other in zip(mine, sections, strict=True)
        )


def continues(trace: Trace) -> list[int]:
    """Per request, the earlier one that it continues, or -1: the last that asked for the deepest
    block that both have, where that is at least half of its chain."""
    last = np.full(trace.unique, -1, np.int64)
    depth = np.zeros(trace.requests, np.int64)
    before = []
    for r in range(trace.requests):
        chain = trace.chain(r)
        known = np.flatnonzero(last[chain] >= 0)
        earlier = int(last[chain[known[-1]]]) if len(known) else -1
        before.append(earlier if 2 * len(known) >= depth[earlier] else -1)
        last[chain], depth[r] = r, len(chain)
    return before


@dataclass(slots=True)
class LiveRun:
    """What happened. Per request: `hit_dram` and `hit_ssd` blocks, `start_s` when it began after
    the first, `fetch_s` seconds of lookup, lease and read (0 where nothing hit), `put_s` seconds of
    putting the rest. `puts`: blocks by outcome. `wrong_blocks`: read with other bytes than were
    put. `late_s`: the most that a request began after its time. `counters`: what the store's own
    counters grew by. `tiers`: as `stat` shows them at the end. `held_blocks`: how many the store
    held at moments after the log had evicted or refused the first."""

    trace: Trace
    sessions: int
    speedup: float
    hit_dram: npt.NDArray[np.int64]
    hit_ssd: npt.NDArray[np.int64]
    start_s: npt.NDArray[np.float64]
    fetch_s: npt.NDArray[np.float64]
    put_s: npt.NDArray[np.float64]
    seconds: float = 0.0
    puts: Counter[str] = field(default_factory=Counter)
    wrong_blocks: int = 0
    late_s: float = 0.0
    blocks_before: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    tiers: tuple[Any, ...] = ()
    held_blocks: list[int] = field(default_factory=list)

    @property
    def evicted(self) -> int:
        """Blocks that the policy dropped from their last tier."""
        return self.counters["evicted_dram_blocks"] + self.counters["evicted_ssd_blocks"]

    def capacities(self) -> tuple[int, int]:
        """Blocks that the store holds, and that its DRAM holds (0 where DRAM is all there is), as
        it turned out. A log's room comes and goes with its segments: the mean; one that never had
        to evict or refuse counts as large enough for the trace."""
        holds = {t.tier: (t.objects, t.used_bytes, t.budget_bytes) for t in self.tiers}
        objects, used, budget = holds[Tier.DRAM]
        dram = budget // (used // objects) if objects else 0
        if Tier.SSD not in holds:
            return dram, 0
        held = self.held_blocks
        return (round(sum(held) / len(held)) if held else self.trace.unique), dram

    def simulated(self, policy: str) -> Replay:
        """The same requests at the same times through the simulator, at the capacity that the
        store had."""
        capacity, dram = self.capacities()
        trace = replace(self.trace, time_s=self.start_s)
        make, _ = maker(policy, trace)
        return simulate(trace, make, capacity, name=f"{policy}, simulated", dram_capacity=dram)

    def as_replay(self, policy: str) -> Replay:
        """In the simulator's terms."""
        capacity, dram = self.capacities()
        return Replay(
            trace=self.trace,
            policy=policy,
            capacity=capacity,
            dram_capacity=dram,
            hit_dram=self.hit_dram if dram else np.zeros_like(self.hit_dram),
            hit_store=self.hit_ssd if dram else self.hit_dram,
            added=self.puts["STORED"],
            evicted=self.evicted,
            refused=self.puts["NO_SPACE"] + self.puts["PARENT_MISSING"],
            promoted=self.counters["promoted_blocks"],
        )


def policy_of(client: Client, said: str = "") -> str:
    """The policy by which blocks leave the store, that of its last tier; empty where an older
    daemon does not tell. Raises `InvalidRequest` where `said` is another."""
    policy = client.stat().tiers[-1].policy
    if said and policy and said != policy:
        raise InvalidRequest(
            f"the store runs the policy {policy}, not {said}; leave --policy out, or give the "
            "daemon another by eviction.policy"
        )
    return policy or said


def _kept_out(counters: Mapping[str, int]) -> int:
    """Grows as soon as the log holds no more than it does."""
    return counters["evicted_ssd_blocks"] + counters["refused_ssd_blocks"]


class _Player:
    """Plays requests of one trace; any number of threads at a time."""

    def __init__(self, client: Client, ns: NamespaceHandle, run: LiveRun, seed: int) -> None:
        self._client, self._ns, self._run = client, ns, run
        self._contents = Contents(ns.layout, seed)
        self._keys = self._named(run.trace)
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._kept_out_before = _kept_out(client.stat().counters)

    def look(self) -> None:
        """Note how much the store holds."""
        stat = self._client.stat()
        if _kept_out(stat.counters) > self._kept_out_before:
            self._run.held_blocks.append(stat.blocks)

    def _named(self, trace: Trace) -> list[bytes]:
        keys: list[bytes] = []
        for block, above in enumerate(trace.parent.tolist()):
            tokens = np.full(trace.block_tokens, block, "<u4")
            parent = keys[above] if above >= 0 else self._ns.id
            keys += block_keys(parent, tokens, trace.block_tokens)
        return keys

    def play(self, r: int) -> None:
        """One request."""
        run, client = self._run, self._client
        chain = run.trace.chain(r).tolist()
        if not chain:
            return
        keys = [self._keys[block] for block in chain]
        began = time.perf_counter()
        match = client.match(self._ns, keys)
        hit, lease = 0, None
        try:
            if match.hit_blocks:
                lease = client.acquire(self._ns, keys[: match.hit_blocks])
                looked_up_s = time.perf_counter() - began
                hit, read_s = self._fetch(r, chain, lease)
                run.fetch_s[r] = looked_up_s + read_s
            self._put(r, chain, hit)
        finally:
            if lease is not None:
                lease.release()

    def _fetch(self, r: int, chain: list[int], lease: Lease) -> tuple[int, float]:
        """Blocks that hit, and the seconds that reading them took."""
        size = self._ns.layout.block_bytes
        step = max(1, _READ_BYTES // size)
        seconds, hit = 0.0, 0
        for at in range(0, lease.blocks, step):
            keys = lease.keys[at : min(at + step, lease.blocks)]
            began = time.perf_counter()
            data = self._client.read(lease, keys, into=self._room(len(keys) * size))
            seconds += time.perf_counter() - began
            hit += self._checked(r, chain[at : at + len(keys)], data)
            if hit < at + len(keys):
                break
        return hit, seconds

    def _room(self, size: int) -> memoryview:
        room: Bytes | None = getattr(self._mine, "room", None)
        if room is None or len(room) < size:
            room = self._mine.room = np.empty(size, np.uint8)
        return room.data

    def _checked(self, r: int, chain: list[int], data: list[BlockData]) -> int:
        """How many from the first on came; books their tiers."""
        for i, (block, came) in enumerate(zip(chain, data, strict=True)):
            if came.outcome is not Outcome.HIT:
                return i
            if not self._contents.same(block, came.sections):
                with self._lock:
                    self._run.wrong_blocks += 1
            (self._run.hit_dram if came.tier & Tier.DRAM else self._run.hit_ssd)[r] += 1
        return len(chain)

    def _put(self, r: int, chain: list[int], hit: int) -> None:
        if hit == len(chain):
            return
        parents = [self._ns.id if b < 0 else self._keys[b] for b in (-1, *chain[:-1])]
        blocks = [
            BlockPut(
                self._keys[chain[i]],
                parents[i],
                [s.data for s in self._contents.sections(chain[i])],
            )
            for i in range(hit, len(chain))
        ]
        began = time.perf_counter()
        outcomes = self._client.put(self._ns, blocks)
        self._run.put_s[r] = time.perf_counter() - began
        with self._lock:
            self._run.puts.update(outcome.name for outcome in outcomes)


def play(
    client: Client,
    trace: Trace,
    sessions: int = 1,
    speedup: float = 0.0,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> LiveRun:
    """Play a trace against a store and take the blocks out again at the end.

    `sessions`: requests at a time; with 1 they follow each other in the order of the trace.
    `speedup`: how many times faster than recorded the times pass; 0: nobody ever waits. Raises what
    the client raises.
    """
    if sessions < 1 or speedup < 0:
        raise InvalidRequest(f"sessions {sessions} must be ≥ 1 and speedup {speedup} ≥ 0")
    layout = layout_for(trace)
    ns = client.open_namespace(
        Namespace("kvstore-bench-replay", f"{trace.name}-{seed}-{time.time_ns()}", layout)
    )
    run = _nothing_yet(trace, sessions, speedup)
    player = _Player(client, ns, run, seed)
    before = client.stat()
    run.blocks_before = before.blocks
    began = time.monotonic()
    try:
        _dispatch(player, run, progress)
        run.seconds = time.monotonic() - began
        after = client.stat()
        run.tiers = after.tiers
        run.counters = {name: n - before.counters[name] for name, n in after.counters.items()}
    finally:
        _clean_up(client, ns)
    return run


def _clean_up(client: Client, ns: NamespaceHandle) -> None:
    """What is being moved can't go; a second look finds it at rest."""
    log = any(t.tier is Tier.SSD for t in client.stat().tiers)
    for _ in range(_LOOKS):
        if log:
            # what the log refuses, or could not write, is at rest as well
            with suppress(DiskError):
                client.flush()
        client.evict(ns)
        if not client.ls(ns, limit=1):
            return


def _nothing_yet(trace: Trace, sessions: int, speedup: float) -> LiveRun:
    n = trace.requests
    return LiveRun(
        trace=trace,
        sessions=sessions,
        speedup=speedup,
        hit_dram=np.zeros(n, np.int64),
        hit_ssd=np.zeros(n, np.int64),
        start_s=np.zeros(n),
        fetch_s=np.zeros(n),
        put_s=np.zeros(n),
    )


def _dispatch(player: _Player, run: LiveRun, progress: Callable[[float], None]) -> None:
    trace, began = run.trace, time.monotonic()
    earlier = continues(trace)
    places = threading.Semaphore(run.sessions)
    futures: list[Future[None]] = []

    failed = threading.Event()
    look_every = -(-trace.requests // _SAMPLES)

    def played(r: int) -> None:
        try:
            player.play(r)
        except BaseException:
            failed.set()
            raise
        finally:
            places.release()

    with ThreadPoolExecutor(run.sessions) as pool:
        for r in range(trace.requests):
            if run.speedup:
                due = began + (trace.time_s.item(r) - trace.time_s.item(0)) / run.speedup
                time.sleep(max(0.0, due - time.monotonic()))
                run.late_s = max(run.late_s, time.monotonic() - due)
            if earlier[r] >= 0:
                futures[earlier[r]].result()
            places.acquire()
            if failed.is_set():
                break
            run.start_s[r] = time.monotonic() - began
            futures.append(pool.submit(played, r))
            if not r % look_every:
                player.look()
            progress(r / trace.requests)
        for future in futures:
            future.result()
    progress(1.0)
