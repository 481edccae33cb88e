"""On one host: get, put, use in place and match, beside a copy of the same bytes."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import kvstore
from benchmarks.dataplane.daemon import chain, daemon, namespace
from benchmarks.dataplane.measure import Timings, in_turns
from kvstore import DS41F_LAYOUT
from kvstore.server.messages import method_path
from kvstore.server.port.sockets import room_for
from kvstore.v1 import kvstore_pb2 as pb

BATCH_BLOCKS = 64
MATCH_KEYS = 4096
IN_A_ROW = 10
TARGETS = {
    "get_to_memcpy": 0.8,
    "put_to_memcpy": 0.6,
    "in_place_port_us": 300.0,
    "in_place_grpc_to_empty_call": 1.3,
    "match_grpc_ms": 5.0,
    "match_port_ms": 3.0,
}


def measure(rounds: int) -> dict[str, Any]:
    """Timings, and the ratios of `TARGETS`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(f"unix://{Path(folder) / 'kv.sock'}", "2GiB") as url,
        kvstore.connect(f"{url}?data=shared") as shared,
        kvstore.connect(f"{url}?data=grpc") as over_grpc,
        grpc.insecure_channel(url.replace("unix://", "unix:")) as channel,
    ):
        return _measure(shared, over_grpc, channel, rounds)


class _New:
    """Blocks that the store has never seen, with the same bytes every time."""

    def __init__(self, client: kvstore.Client, ns: kvstore.NamespaceHandle) -> None:
        self._client, self._ns, self._turn = client, ns, 0
        self.blocks = chain(ns, BATCH_BLOCKS, 2)

    def make(self) -> None:
        """The last ones leave the store; the next get other names."""
        self._client.evict(self._ns)
        self._turn += 1
        tokens = np.full(BATCH_BLOCKS * self._ns.layout.block_tokens, self._turn, np.uint32)
        keys = self._ns.block_keys(tokens)
        self.blocks = [
            replace(block, key=key, parent=parent)
            for block, key, parent in zip(self.blocks, keys, [self._ns.id, *keys[:-1]], strict=True)
        ]


def _measure(
    shared: kvstore.Client, over_grpc: kvstore.Client, channel: grpc.Channel, rounds: int
) -> dict[str, Any]:
    ns = namespace(shared, DS41F_LAYOUT, "local")
    puts = namespace(shared, DS41F_LAYOUT, "puts")
    over_grpc.open_namespace(ns.namespace)
    blocks, new = chain(ns, BATCH_BLOCKS, 1), _New(shared, puts)
    long = chain(ns, MATCH_KEYS, 3)
    shared.put(ns, blocks)
    shared.put(ns, long)
    keys, long_keys = [b.key for b in blocks], [b.key for b in long]
    size = BATCH_BLOCKS * DS41F_LAYOUT.block_bytes
    room, target = room_for(size), np.zeros(size, np.uint8)
    source = np.ones(size, np.uint8)
    empty = channel.unary_unary(method_path("Release"))
    nothing = pb.ReleaseRequest(lease_id=1).SerializeToString()
    lease = shared.acquire(ns, keys, ttl_s=3600)

    def check() -> None:
        assert all(b.outcome is kvstore.Outcome.HIT for b in shared.read(lease, keys, into=room))

    check()
    timings = in_turns(
        {
            "memcpy": lambda: np.copyto(target, source),
            "get": lambda: shared.read(lease, keys, into=room, verify=False),
            "get_verified": lambda: shared.read(lease, keys, into=room),
            "view": lambda: (shared.view(lease, keys), shared.intact(lease, keys)),
            "in_place_port": lambda: shared.acquire(ns, keys).release(),
            "in_place_grpc": lambda: over_grpc.acquire(ns, keys).release(),
            "empty_grpc_call": lambda: empty(nothing),
            "put": lambda: shared.put(puts, new.blocks),
            "match_port": lambda: shared.match(ns, long_keys),
            "match_grpc": lambda: over_grpc.match(ns, long_keys),
        },
        rounds,
        {"put": new.make},
    )
    in_a_row = Timings()
    for _ in range(rounds * IN_A_ROW):
        in_a_row.take(lambda: shared.acquire(ns, keys).release())
    timings["in_place_port_in_a_row"] = in_a_row
    lease.release()
    p50 = {name: t.p50 for name, t in timings.items()}
    return {
        "batch_blocks": BATCH_BLOCKS,
        "batch_bytes": size,
        "timings": {name: t.as_json() for name, t in timings.items()},
        "gb_s": {n: size / p50[n] / 1e9 for n in ("memcpy", "get", "get_verified", "put")},
        "ratios": {
            "get_to_memcpy": p50["memcpy"] / p50["get"],
            "get_verified_to_memcpy": p50["memcpy"] / p50["get_verified"],
            "put_to_memcpy": p50["memcpy"] / p50["put"],
            "in_place_port_us": p50["in_place_port"] * 1e6,
            # a turn's copies leave nothing of the interpreter in the processor's caches
            "in_place_port_in_a_row_us": p50["in_place_port_in_a_row"] * 1e6,
            # acquire and release are two calls
            "in_place_grpc_to_empty_call": p50["in_place_grpc"] / (2 * p50["empty_grpc_call"]),
            "match_grpc_ms": p50["match_grpc"] * 1e3,
            "match_port_ms": p50["match_port"] * 1e3,
        },
        "targets": TARGETS,
    }
