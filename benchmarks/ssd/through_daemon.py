"""The same blocks through the daemon: durable puts and reads of what only the SSD holds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvstore
from benchmarks.dataplane.daemon import chain, daemon, namespace
from kvstore import DS41F_LAYOUT, Durability, Tier
from kvstore.server.port.sockets import room_for


class Door:
    """One client of one daemon; `blocks` per call."""

    def __init__(self, client: kvstore.Client, blocks: int) -> None:
        self._client, self._blocks, self._seed = client, blocks, 0
        self._ns = namespace(client, DS41F_LAYOUT, "ssd")
        self._room = room_for(blocks * DS41F_LAYOUT.block_bytes)
        self._keys: list[bytes] = []

    def write(self) -> float:
        """GB/s of one durable put."""
        self._client.evict(self._ns)
        self._seed += 1
        made = chain(self._ns, self._blocks, self._seed)
        self._keys = [b.key for b in made]
        began = time.perf_counter()
        self._client.put(self._ns, made, Durability.DURABLE)
        return self._gb_s(began)

    def read(self) -> float:
        """GB/s of match, lease and read of a prefix that only the SSD holds, verified twice."""
        self._client.evict(self._ns, tier=Tier.DRAM)
        began = time.perf_counter()
        with self._client.acquire(self._ns, self._keys) as lease:
            blocks = self._client.read(lease, self._keys, into=self._room)
        gb_s = self._gb_s(began)
        assert len(blocks) == self._blocks
        assert all(b.outcome is kvstore.Outcome.HIT for b in blocks)
        return gb_s

    def _gb_s(self, began: float) -> float:
        return self._blocks * DS41F_LAYOUT.block_bytes / (time.perf_counter() - began) / 1e9


@contextmanager
def door(directory: Path, blocks: int) -> Iterator[Door]:
    """A daemon with its store in `directory`, and its client."""
    budget = f"{blocks * 229_376 * 2 + (64 << 20)}B"
    listen = f"unix://{directory / 's'}"
    with (
        daemon(listen, budget, directory / "store", "3GiB") as url,
        kvstore.connect(url, deadline_s=120) as client,
    ):
        yield Door(client, blocks)
