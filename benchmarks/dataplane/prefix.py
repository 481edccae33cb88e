"""A long prompt's whole prefix: put once, matched and read back, from DRAM and from SSD."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from benchmarks.dataplane.daemon import chain, daemon, namespace
from kvstore import DS41F_LAYOUT, Tier
from kvstore.server.port.sockets import room_for

BLOCKS_FULL, BLOCKS_SMOKE = 4096, 32


def _seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def measure(blocks: int, data: str) -> dict[str, Any]:
    """Seconds and GB/s of each step. `data`: how bytes travel (`shared`, `port`, `grpc`)."""
    size = blocks * DS41F_LAYOUT.block_bytes
    budget = f"{max(64 << 20, int(size * 1.3))}B"
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        daemon(f"unix://{Path(folder) / 's'}", budget, Path(folder) / "store", "3GiB") as url,
        kvstore.connect(f"{url}?data={data}", deadline_s=300) as client,
    ):
        ns = namespace(client, DS41F_LAYOUT, "prefix")
        made, room = chain(ns, blocks, 1), room_for(size)
        keys = [b.key for b in made]
        # The first put and the first read meet memory that the system has not given out yet; what
        # that alone costs stands beside.
        seconds = {"first_touch": _seconds(lambda: np.frombuffer(room, np.uint8).fill(1))}
        seconds["put"] = _seconds(lambda: client.put(ns, made))
        seconds["flush"] = _seconds(client.flush)
        seconds["match"] = _seconds(lambda: client.match(ns, keys))
        seconds["read_dram"] = _read(client, ns, keys, room, Tier.DRAM)
        client.evict(ns, tier=Tier.DRAM)
        seconds["read_ssd"] = _read(client, ns, keys, room, Tier.SSD)
    moved = ("put", "read_dram", "read_ssd")
    return {
        "blocks": blocks,
        "bytes": size,
        "data": data,
        "seconds": seconds,
        "gb_s": {name: size / seconds[name] / 1e9 for name in moved},
    }


def _read(
    client: kvstore.Client,
    ns: kvstore.NamespaceHandle,
    keys: list[bytes],
    room: memoryview,
    tier: Tier,
) -> float:
    start = time.perf_counter()
    with client.acquire(ns, keys) as lease:
        blocks = client.read(lease, keys, into=room)
    seconds = time.perf_counter() - start
    assert len(blocks) == len(keys)
    assert all(b.outcome is kvstore.Outcome.HIT for b in blocks)
    assert sum(b.tier is tier for b in blocks) >= 0.9 * len(blocks), {b.tier for b in blocks}
    return seconds
