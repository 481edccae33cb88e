"""Between hosts, over loopback TCP: the data port beside a bare socket, the gRPC fallback beside
bare gRPC. Everything that arrives is verified on our side and on no other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import kvstore
from benchmarks.dataplane import bare
from benchmarks.dataplane.daemon import chain, daemon, free_port, namespace
from benchmarks.dataplane.measure import Operation, in_turns
from kvstore import DS41F_LAYOUT, Layout, SectionSpec
from kvstore.server.port.sockets import room_for

TARGETS = {"port_to_socket": 0.8, "grpc_to_grpc": 0.8}
OBJECT_BYTES = (64 << 10, 256 << 10, 1 << 20)
BATCH_BLOCKS = 64


def _objects(size: int) -> Layout:
    """Blocks of one section."""
    return Layout((SectionSpec(0, "main", 1, size // 64),), block_tokens=64)


class _Side:
    """Our clients, one per thread, and what they read."""

    def __init__(self, url: str, data: str, layout: Layout, blocks: int, clients: int) -> None:
        self.clients = [kvstore.connect(f"{url}?data={data}") for _ in range(clients)]
        first = self.clients[0]
        self.ns = namespace(first, layout, f"remote-{layout.block_bytes}")
        made = chain(self.ns, blocks, 1)
        first.put(self.ns, made)
        self.keys = [b.key for b in made]
        self.leases = []
        for client in self.clients:
            client.open_namespace(self.ns.namespace)
            self.leases.append(client.acquire(self.ns, self.keys, ttl_s=3600))
            assert self.leases[-1].blocks == blocks

    def get(self, n: int, into: memoryview) -> None:
        """All blocks, by the n-th client."""
        self.clients[n].read(self.leases[n], self.keys, into=into)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def _together(pool: ThreadPoolExecutor, clients: int, get: Callable[[int], object]) -> Operation:
    if clients == 1:
        return lambda: get(0)
    return lambda: list(pool.map(get, range(clients)))


def _one(
    stack: ExitStack,
    url: str,
    ports: tuple[int, int],
    layout: Layout,
    blocks: int,
    clients: int,
    rounds: int,
) -> dict[str, Any]:
    size = layout.block_bytes * blocks
    rooms = [room_for(size) for _ in range(clients)]
    pool = stack.enter_context(ThreadPoolExecutor(clients))
    ours = _Side(url, "port", layout, blocks, clients)
    fallback = _Side(url, "grpc", layout, blocks, 1)
    sockets = [bare.SocketClient(ports[0]) for _ in range(clients)]
    plain = bare.GrpcClient(ports[1])
    per_message = min(size, max(layout.block_bytes, 4 << 20))

    def over_plain_grpc() -> None:
        left = size
        while left > 0:
            left -= len(plain.get(min(left, per_message)))

    operations: dict[str, Operation] = {
        "socket": _together(pool, clients, lambda n: sockets[n].get(rooms[n])),
        "port": _together(pool, clients, lambda n: ours.get(n, rooms[n])),
    }
    if clients == 1:
        operations["bare_grpc"] = over_plain_grpc
        operations["grpc"] = lambda: fallback.get(0, rooms[0])
    timings = in_turns(operations, rounds)
    for closing in (ours, fallback, plain, *sockets):
        closing.close()
    p50 = {name: t.p50 for name, t in timings.items()}
    ratios = {"port_to_socket": p50["socket"] / p50["port"]}
    if clients == 1:
        ratios["grpc_to_grpc"] = p50["bare_grpc"] / p50["grpc"]
    return {
        "block_bytes": layout.block_bytes,
        "blocks": blocks,
        "clients": clients,
        "gb_s": {name: clients * size / t / 1e9 for name, t in p50.items()},
        "timings": {name: t.as_json() for name, t in timings.items()},
        "ratios": ratios,
    }


def measure(rounds: int, small: bool) -> dict[str, Any]:
    """One row per size and number of clients."""
    ports = free_port(), free_port()
    with ExitStack() as stack:
        stack.enter_context(bare.server("socket", ports[0]))
        stack.enter_context(bare.server("grpc", ports[1]))
        url = stack.enter_context(daemon(f"tcp://127.0.0.1:{free_port()}", "1GiB"))
        cases = [(_objects(size), 1, 1, 20) for size in OBJECT_BYTES]
        cases += [(DS41F_LAYOUT, 4 if small else BATCH_BLOCKS, n, 1) for n in (1, 4)]
        rows = [
            _one(stack, url, ports, layout, blocks, clients, rounds * (1 if small else more))
            for layout, blocks, clients, more in cases
        ]
    return {"rows": rows, "targets": TARGETS}
