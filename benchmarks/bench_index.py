"""A store of a million blocks: how soon it serves, what a block costs in memory, how fast it looks.

The index is real (LMDB and all), the payload is sparse. A child process opens the store, so that
memory is counted from nothing and the first hit from the start of the process, interpreter and
imports included (of byte code, which every start of a program but its first one finds). It is
killed at the end, once it has written, and a second one opens what a killed process leaves, where
the index can't be taken on trust. Lookups stand beside bare dictionary lookups of the same keys in
the same run; both are counted in the thread's own CPU time, since they never wait. `cpu`: seconds
of CPU up to the first hit, which a busy machine does not stretch as it does the others.
Targets: first hit within 2 s, 256 bytes resident per block, a match of 4,096 keys within 2 ms.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.block import Durability, Outcome
from kvstore.config import StoreConfig, build_config
from kvstore.namespace import DS41F_LAYOUT, Namespace
from kvstore.store import Engine
from kvstore.testing.blocks import chain
from kvstore.tiers.base import Location
from kvstore.tiers.frame import CHECKSUM_BYTES, Codec, FrameHeader, Kind, layout_sections
from kvstore.tiers.ssd.entry import encode_entry
from kvstore.tiers.ssd.files import OsFileSystem
from kvstore.tiers.ssd.index import IndexChange, LmdbIndex
from kvstore.tiers.ssd.segments import SEGMENT_HEADER_BYTES, SegmentFiles

BLOCKS_FULL, BLOCKS_SMOKE = 1_000_000, 3_000
ROUNDS_FULL, ROUNDS_SMOKE = 50, 3
CHAIN_BLOCKS = 4096
SEGMENT_BYTES = 1 << 30
TARGETS = {
    "first_hit_s": 2.0,
    "killed_first_hit_s": 2.0,
    "bytes_per_block": 256.0,
    "killed_bytes_per_block": 256.0,
    "match_ms": 2.0,
}
NAMESPACE = Namespace("bench", "1", DS41F_LAYOUT)
_COMMIT_BLOCKS = 50_000
_COMMIT_S = 0.5


def config(directory: Path) -> StoreConfig:
    """A store whose budgets are out of the way."""
    return build_config(
        StoreConfig,
        {
            "dir": directory,
            "dram": {"budget_bytes": "64MiB"},
            "ssd": {
                "budget_bytes": 1 << 50,
                "segment_bytes": SEGMENT_BYTES,
                "free_floor_bytes": 0,
                "direct_io": "off",
            },
        },
    )


def key_of(block: int) -> bytes:
    """Any 32 bytes that no other block has."""
    return (0x9E3779B97F4A7C15 * (block + 1)).to_bytes(32, "little")


def header_of(namespace_id: bytes, block: int) -> FrameHeader:
    """The frame header of the n-th made-up block; chains follow one another."""
    depth = block % CHAIN_BLOCKS
    sizes = DS41F_LAYOUT.section_bytes
    return FrameHeader(
        Kind.BLOCK,
        key_of(block),
        namespace_id,
        key_of(block - 1) if depth else namespace_id,
        depth,
        1.8e9 + block // CHAIN_BLOCKS,
        Codec.RAW,
        layout_sections(sizes, [bytes(CHECKSUM_BYTES)] * len(sizes)),
    )


def make_store(directory: Path, blocks: int) -> None:
    """A directory with `blocks` made-up blocks and one real one."""
    namespace_id = asyncio.run(_open_namespace(directory))
    format_file = json.loads((directory / "FORMAT").read_text().splitlines()[0])
    store_id = bytes.fromhex(format_file["store_id"])
    index = LmdbIndex(directory / "index.lmdb", store_id, 1 << 40, sync=False, create=False)
    files = OsFileSystem()
    segments = SegmentFiles(files, directory / "segments", store_id, direct=False)
    length = header_of(namespace_id, 0).stored_length
    per_segment = (SEGMENT_BYTES - SEGMENT_HEADER_BYTES) // length
    for first in range(0, blocks, _COMMIT_BLOCKS):
        puts, end = [], Location(0, 0)
        for block in range(first, min(blocks, first + _COMMIT_BLOCKS)):
            at = SEGMENT_HEADER_BYTES + block % per_segment * length
            place, header = Location(1 + block // per_segment, at), header_of(namespace_id, block)
            entry = encode_entry(header, bytes(CHECKSUM_BYTES), 1, place)
            puts.append((header.key, entry))
            end = Location(place.segment, place.offset + length)
        index.commit(IndexChange(puts, (), end))
    for number in range(1, 2 + (blocks - 1) // per_segment):
        segments.create(number, 1.8e9)
        os.truncate(segments.path(number), SEGMENT_HEADER_BYTES + per_segment * length)
    segments.close()
    index.close(clean=True)
    asyncio.run(_put_one(directory))


async def _open_namespace(directory: Path) -> bytes:
    engine = await Engine.open(config(directory))
    namespace_id = engine.open_namespace(NAMESPACE)
    await engine.close()
    return namespace_id


async def _put_one(directory: Path) -> None:
    engine = await Engine.open(config(directory))
    namespace_id = engine.open_namespace(NAMESPACE)
    await engine.put(namespace_id, chain(namespace_id, DS41F_LAYOUT, [1]), Durability.DURABLE)
    await engine.close()


def resident_bytes() -> int:
    """Memory of this process that is its own: neither code nor mapped files."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


async def open_and_hit(
    directory: Path, blocks: int, spawned_s: float
) -> tuple[Engine, dict[str, float]]:
    """In the child: open, first hit, memory."""
    before = resident_bytes()
    began = time.monotonic()
    engine = await Engine.open(config(directory))
    opened = time.monotonic()
    namespace_id = engine.open_namespace(NAMESPACE)
    (block,) = chain(namespace_id, DS41F_LAYOUT, [1])
    lease = await engine.acquire(namespace_id, [block.key])
    (frames,) = await engine.read(lease.lease_id, [block.key])
    assert frames.outcome is Outcome.HIT
    first_hit, cpu = time.monotonic(), time.process_time()
    frames.done()
    await engine.release(lease.lease_id)
    await asyncio.sleep(0.5)
    return engine, {
        "open_s": opened - began,
        "first_hit_s": first_hit - spawned_s,
        "first_hit_cpu_s": cpu,
        "bytes_per_block": (resident_bytes() - before) / blocks,
    }


async def first_life(
    directory: Path, blocks: int, rounds: int, spawned_s: float
) -> dict[str, float]:
    """In the child: `open_and_hit`, and lookups."""
    engine, results = await open_and_hit(directory, blocks, spawned_s)
    namespace_id = engine.open_namespace(NAMESPACE)
    keys = [key_of(block) for block in range(min(CHAIN_BLOCKS, blocks))]
    bare = {key_of(block): block for block in range(blocks)}
    match_s, bare_s, acquire_s = [], [], []
    for _ in range(rounds):
        start = time.thread_time()
        assert engine.match(namespace_id, keys).hit_blocks == len(keys)
        match_s.append(time.thread_time() - start)
        start = time.thread_time()
        list(map(bare.get, keys))
        bare_s.append(time.thread_time() - start)
        start = time.thread_time()
        lease = await engine.acquire(namespace_id, keys)
        await engine.release(lease.lease_id)
        acquire_s.append(time.thread_time() - start)
    await _write_one(engine, namespace_id)
    return {
        **results,
        "match_ms": statistics.median(match_s) * 1e3,
        "match_to_bare_lookup": statistics.median(match_s) / statistics.median(bare_s),
        "acquire_release_ms": statistics.median(acquire_s) * 1e3,
    }


async def _write_one(engine: Engine, namespace_id: bytes) -> None:
    """Change the index, so that the digest of its last clean stop vouches for nothing."""
    await engine.put(namespace_id, chain(namespace_id, DS41F_LAYOUT, [2]), Durability.DURABLE)
    await engine.flush()
    # the commit of the index follows the acknowledgement
    await asyncio.sleep(_COMMIT_S)


async def second_life(directory: Path, blocks: int, spawned_s: float) -> dict[str, float]:
    """In the next child: `open_and_hit`."""
    engine, results = await open_and_hit(directory, blocks, spawned_s)
    await engine.close()
    return {f"killed_{name}": value for name, value in results.items()}


def child(directory: Path, blocks: int, rounds: int, life: int, spawned_s: float) -> None:
    """Print the results as JSON. The first ends as if killed: nothing is closed."""
    if life == 1:
        results = asyncio.run(first_life(directory, blocks, rounds, spawned_s))
    else:
        results = asyncio.run(second_life(directory, blocks, spawned_s))
    print(json.dumps(results), flush=True)
    if life == 1:
        os._exit(0)


def run_child(
    directory: Path, smoke: bool, life: int, environment: dict[str, str]
) -> dict[str, float]:
    """The results of one."""
    command = [sys.executable, "-m", "benchmarks.bench_index", "--child", str(directory)]
    command += ["--life", str(life), "--spawned", repr(time.monotonic())]
    command += ["--smoke"] * smoke
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    results: dict[str, float] = json.loads(ran.stdout)
    return results


def with_byte_code(directory: Path) -> dict[str, str]:
    """An environment in which there is byte code of all that a child imports, in `directory`."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(directory)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    imports = "import benchmarks.bench_index, kvstore.store.engine"
    subprocess.run([sys.executable, "-c", imports], check=True, env=env)
    return env


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_index", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small store, few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--child", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--spawned", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    blocks = BLOCKS_SMOKE if options.smoke else BLOCKS_FULL
    rounds = ROUNDS_SMOKE if options.smoke else ROUNDS_FULL
    if options.child:
        child(options.child, blocks, rounds, options.life, options.spawned)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-index-") as folder:
        directory = Path(folder, "store")
        make_store(directory, blocks)
        env = dict(os.environ) if options.smoke else with_byte_code(Path(folder, "pycache"))
        results = run_child(directory, options.smoke, 1, env)
        results |= run_child(directory, options.smoke, 2, env)
    print(f"{blocks} blocks")
    for name, value in results.items():
        target = f"   target {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:24}{value:10.3f}{target}")
    if options.json:
        report = {
            "benchmark": "index",
            "smoke": options.smoke,
            "blocks": blocks,
            "rounds": rounds,
            "machine": platform.machine(),
            "targets": TARGETS,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
