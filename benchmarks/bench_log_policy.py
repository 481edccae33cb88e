"""A request trace through the real SSD tier and through the simulator, policy by policy.

The engine runs with its real log on a real directory (blocks of tiny payload, time as recorded in
the trace), and DRAM for the longest request. Shown per policy: token hit rate of the store; that of
the simulator, told what kind of log it is (as many blocks as the store held on average once it was
full, and as many places gained at a time as went per segment); the difference in points (target:
2); what the simulator says of one step per request, as the policies' table has it; what the SSD
held beside what its budget was made for; and the write amplification. The SSD should hold the
longest request: what exceeds it is held by DRAM, as much as that has room for, and no policy
decides then.
`--trace FILE` is any format that `kvstore bench replay` reads; the smoke size plays a sample of the
tests.
"""

import argparse
import asyncio
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.bench.read import read
from kvstore.bench.simulate import simulate
from kvstore.bench.trace import Trace
from kvstore.bench.weka import Users
from kvstore.block import BlockPut
from kvstore.config import StoreConfig, build_config
from kvstore.eviction import POLICIES
from kvstore.store import Engine
from kvstore.testing.blocks import TINY_LAYOUT, tiny_namespace
from kvstore.testing.clock import ManualClock

FRAME_BYTES = 4096
SEGMENT_FRAMES = 15
SAMPLE = Path(__file__).parent.parent / "tests" / "kvstore" / "traces" / "mooncake.jsonl"
SMOKE_CAPACITY, SMOKE_POLICIES = 0.25, ("lru", "gittins")
INDEX_BYTES = 256 << 10
IDLE_POLLS_MAX = 200
FULL_SHARE = 0.9
"""The store counts as full once it holds so much of the most that it ever held."""


@dataclass(frozen=True, slots=True)
class Played:
    """One policy's run. Rates are of all block accesses: the store's, the simulator's for its log,
    and the simulator's with whole requests as steps. `capacity_blocks`: what the store held on
    average once it was full, of all tiers; `step_blocks`: how many went per segment that came back;
    `ssd_blocks`: its SSD at the end."""

    policy: str
    hit_rate: float
    simulated_hit_rate: float
    one_step_hit_rate: float
    capacity_blocks: int
    step_blocks: int
    ssd_blocks: int
    write_amplification: float
    declined_blocks: int

    @property
    def points(self) -> float:
        """The store's rate less the simulator's, in points."""
        return 100 * (self.hit_rate - self.simulated_hit_rate)


def config_of(directory: Path, policy: str, ssd_blocks: int, dram_blocks: int) -> StoreConfig:
    """A store of these sizes; nothing is synced, for speed."""
    segment_bytes = (SEGMENT_FRAMES + 1) * FRAME_BYTES
    # beside the frames: a segment for compaction, and what the index may take
    frames = ssd_blocks * FRAME_BYTES * (SEGMENT_FRAMES + 1) // SEGMENT_FRAMES
    ssd = {
        "budget_bytes": max(1 << 20, frames + segment_bytes + INDEX_BYTES),
        "segment_bytes": segment_bytes,
        "free_floor_bytes": 0,
        "sync": False,
        "lifetime_min_s": 0,
    }
    settings = {"dir": directory, "dram": {"budget_bytes": dram_blocks * FRAME_BYTES}, "ssd": ssd}
    return build_config(StoreConfig, settings, {"eviction.policy": policy})


async def through_store(trace: Trace, config: StoreConfig) -> tuple[float, list[int], Any]:
    """Token hit rate; blocks in the store after every request; the last `stat`."""
    clock = ManualClock()
    engine = await Engine.open(config, clock)
    ns = engine.open_namespace(tiny_namespace())
    keys = [(n + 1).to_bytes(32, "little") for n in range(trace.unique)]
    sections = [bytes(size) for size in TINY_LAYOUT.section_bytes]
    hits, held, at_s = 0, [], float(trace.time_s[0]) if trace.requests else 0.0
    # names spread like digests
    keys = [key[:8][::-1] + key[8:] for key in keys]
    for r in range(trace.requests):
        clock.advance(float(trace.time_s[r]) - at_s)
        at_s = float(trace.time_s[r])
        chain = trace.chain(r).tolist()
        if not chain:
            continue
        asked = [keys[n] for n in chain]
        lease = await engine.acquire(ns, asked)
        hits += lease.blocks
        await engine.release(lease.lease_id)
        blocks = [
            BlockPut(key, parent, sections)
            for key, parent in zip(asked, [ns, *asked], strict=False)
        ]
        if lease.blocks < len(blocks):
            await engine.put(ns, blocks[lease.blocks :])
        await written(engine)
        held.append(engine.stat().blocks)
    stat = engine.stat()
    await engine.close()
    return hits / max(trace.accesses, 1), held, stat


async def written(engine: Engine) -> None:
    """Until the log has caught up, as it has in the time between two requests of the trace, or
    can't: a request larger than the SSD leaves blocks that nothing may go for."""
    idle, before = 0, -1
    while (dirty := engine.stat().dirty_blocks) and idle < IDLE_POLLS_MAX:
        idle, before = (idle + 1, before) if dirty == before else (0, dirty)
        await asyncio.sleep(0.001)


def longest_of(trace: Trace) -> int:
    """Blocks of the longest request."""
    return int((trace.start[1:] - trace.start[:-1]).max(initial=1))


def play(trace: Trace, policy: str, ssd_blocks: int, folder: Path) -> Played:
    """One policy through both. DRAM has room for the longest request."""
    config = config_of(folder, policy, ssd_blocks, longest_of(trace))
    rate, held, stat = asyncio.run(through_store(trace, config))
    most = max(held, default=0)
    began = next((r for r, n in enumerate(held) if n >= FULL_SHARE * most), 0)
    capacity = max(1, sum(held[began:]) // max(len(held) - began, 1))
    went, segments = (stat.counters[n] for n in ("evicted_ssd_blocks", "segments_reclaimed"))
    step = max(1, went // max(segments, 1))
    make = POLICIES[policy]
    return Played(
        policy=policy,
        hit_rate=rate,
        # between full and a step below
        simulated_hit_rate=simulate(trace, make, capacity + step // 2, log_step=step).hit_rate,
        one_step_hit_rate=simulate(trace, make, capacity).hit_rate,
        capacity_blocks=capacity,
        step_blocks=step,
        ssd_blocks=stat.tiers[-1].objects,
        write_amplification=stat.write_amplification or 1.0,
        declined_blocks=stat.counters["declined_ssd_blocks"],
    )


def table(trace: Trace, policies: Sequence[str], share: float) -> list[Played]:
    """Every policy at one capacity, a share of the unique blocks; prints as it goes."""
    rows = []
    for policy in policies:
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-"))
        try:
            row = play(trace, policy, int(share * trace.unique), folder / "store")
        finally:
            shutil.rmtree(folder)
        rows.append(row)
        print(
            f"{row.policy:10} store {row.hit_rate:7.2%}  simulated {row.simulated_hit_rate:7.2%} "
            f"({row.points:+.2f} points), in one step {row.one_step_hit_rate:7.2%}  "
            f"{row.capacity_blocks:,} blocks, {row.ssd_blocks:,} on ssd, {row.step_blocks} went at "
            f"a time, {row.write_amplification:.2f} bytes written per byte taken in, "
            f"{row.declined_blocks:,} declined",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything ran."""
    parser = argparse.ArgumentParser(prog="bench_log_policy", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="the sample by default")
    parser.add_argument("--capacity", type=float, default=0.1, help="share of the unique blocks")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many")
    parser.add_argument("--policies", nargs="*", choices=sorted(POLICIES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.smoke:
        options.trace, options.capacity = SAMPLE, SMOKE_CAPACITY
    trace = read(options.trace, Users(50, 60.0, seed=0))
    if options.requests:
        trace = first_requests(trace, options.requests)
    names = options.policies or (SMOKE_POLICIES if options.smoke else sorted(POLICIES))
    longest, room = longest_of(trace), int(options.capacity * trace.unique)
    print(
        f"{trace.name}: {trace.requests:,} requests, {trace.unique:,} unique blocks; {room:,} on "
        f"ssd, the longest request has {longest:,}"
    )
    rows = table(trace, names, options.capacity)
    if options.json:
        figures = {
            "benchmark": "log_policy",
            "smoke": options.smoke,
            "machine": platform.machine(),
            "trace": trace.name,
            "requests": trace.requests,
            "capacity_share": options.capacity,
            "longest_request_blocks": longest,
            "runs": [asdict(row) | {"points": row.points} for row in rows],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def first_requests(trace: Trace, requests: int) -> Trace:
    """The beginning of a trace. Blocks are numbered by first appearance, so the rest falls off."""
    requests = min(requests, trace.requests)
    start = trace.start[: requests + 1]
    blocks = trace.blocks[: start[-1]]
    return Trace(
        name=trace.name,
        block_tokens=trace.block_tokens,
        start=start,
        blocks=blocks,
        parent=trace.parent[: int(blocks.max(initial=-1)) + 1],
        time_s=trace.time_s[:requests],
        tokens=trace.tokens[:requests],
        answer_s=trace.answer_s[:requests],
        outlook=trace.outlook[:requests],
    )


if __name__ == "__main__":
    sys.exit(main())
