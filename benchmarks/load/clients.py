"""Clients that put, get and let things expire, and know every byte that they should read.

`python -m benchmarks.load.clients URL SEED CLIENTS SECONDS THINK_S` runs some of them as threads of
one process and prints what they saw as JSON.
"""

import json
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.dataplane.daemon import namespace
from kvstore import (
    DS41F_LAYOUT,
    BlockPut,
    Client,
    NamespaceHandle,
    Outcome,
    PutOutcome,
    connect,
)
from kvstore.errors import KVStoreError, ReservationExpired

CHAINS, CHAIN_BLOCKS_MAX = 400, 6
"""Prompts that all clients share, and their longest; more than DRAM and SSD hold at once."""
SHORT_TTL_S = 1.0
"""Of what is left to expire."""
SNAPSHOT_BYTES_MAX = 1 << 20
DEADLINE_S = 60.0
_BASE = np.random.default_rng(0).integers(0, 256, 2 * DS41F_LAYOUT.block_bytes, dtype=np.uint8)
_MIX = ("get",) * 6 + ("put",) * 4 + ("snapshot",) * 3 + ("handover", "abandon", "half put")


def payload_of(name: bytes, size: int) -> np.ndarray:
    """The bytes that belong to a name: a piece of one random buffer."""
    start = int.from_bytes(name[:4], "little") % (len(_BASE) // 2)
    return np.resize(_BASE[start : start + len(_BASE) // 2], size)


@lru_cache(maxsize=CHAINS)
def tokens_of(chain: int) -> np.ndarray:
    """A prompt, with a few tokens behind its last full block."""
    rng = np.random.default_rng(chain)
    blocks = int(rng.integers(1, CHAIN_BLOCKS_MAX + 1))
    return rng.integers(0, 1 << 17, blocks * DS41F_LAYOUT.block_tokens + 7, dtype=np.uint32)


class LoadClient:
    """One client. `seconds`: per kind of call, how long each took. `counts`: what they found;
    `wrong`, `lost` and `errors` of it must stay 0."""

    def __init__(self, client: Client, ns: NamespaceHandle, seed: int) -> None:
        self._client, self._ns = client, ns
        self._rng = np.random.default_rng(seed)
        self._serial = 0
        self._name = f"client-{seed}"
        # arrays: what is measured must not be what grows
        self.seconds = {kind: array("d") for kind in dict.fromkeys(_MIX)}
        self.counts: Counter[str] = Counter(wrong=0, lost=0, errors=0)
        self._do: dict[str, Callable[[], None]] = {
            "get": self._get,
            "put": self._put,
            "snapshot": self._snapshot,
            "handover": self._hand_over,
            "abandon": self._abandon,
            "half put": self._half_put,
        }

    def turn(self) -> None:
        """One call of a kind drawn from the mix."""
        kind = _MIX[int(self._rng.integers(len(_MIX)))]
        started_s = time.perf_counter()
        try:
            self._do[kind]()
        except KVStoreError as e:
            self.counts["errors"] += 1
            self.counts[f"error: {type(e).__name__}: {e}"[:120]] += 1
        self.seconds[kind].append(time.perf_counter() - started_s)

    def _chain(self) -> tuple[np.ndarray, list[bytes]]:
        # a few prompts are asked for often, most of them seldom
        chain = int(CHAINS * self._rng.random() ** 3)
        tokens = tokens_of(chain)
        return tokens, self._ns.block_keys(tokens)

    def _sections(self, key: bytes) -> list[np.ndarray]:
        payload = payload_of(key, DS41F_LAYOUT.block_bytes)
        return np.split(payload, DS41F_LAYOUT.section_offsets[1:])

    def _put(self) -> None:
        _, keys = self._chain()
        parents = [self._ns.id, *keys[:-1]]
        blocks = [
            BlockPut(key, parent, self._sections(key))
            for key, parent in zip(keys, parents, strict=True)
        ]
        for outcome in self._client.put(self._ns, blocks):
            self.counts[f"put {outcome.name}"] += 1
            self.counts["wrong"] += outcome is PutOutcome.CORRUPT

    def _get(self) -> None:
        _, keys = self._chain()
        match = self._client.match(self._ns, keys)
        self.counts["blocks looked up"] += len(keys)
        if not match.hit_blocks:
            return
        with self._client.acquire(self._ns, keys) as lease:
            if not lease.blocks:
                return
            for data in self._client.read(lease, lease.keys):
                if data.outcome is not Outcome.HIT:
                    self.counts["lost"] += 1
                    continue
                got = np.concatenate([np.frombuffer(s, np.uint8) for s in data.sections])
                right = np.array_equal(got, payload_of(data.key, DS41F_LAYOUT.block_bytes))
                self.counts["wrong"] += not right
                self.counts["blocks read"] += 1

    def _abandon(self) -> None:
        _, keys = self._chain()
        self._client.acquire(self._ns, keys, ttl_s=SHORT_TTL_S)

    def _half_put(self) -> None:
        self._serial += 1
        tokens = np.full(DS41F_LAYOUT.block_tokens, self._serial, np.uint32)
        tokens[0] = int(self._rng.integers(1 << 32))
        (key,) = self._ns.block_keys(tokens)
        grant = self._client.reserve(self._ns, [(key, self._ns.id)], ttl_s=SHORT_TTL_S)
        if grant.reservation_id and self._rng.integers(2):
            try:
                self._client.write(grant.reservation_id, key, self._sections(key))
            except ReservationExpired:
                # a second is short on a busy machine, and what has lapsed must say so
                self.counts["half put lapsed"] += 1

    def _snapshot(self) -> None:
        tokens, keys = self._chain()
        match = self._client.match(self._ns, keys)
        ref = self._ns.longest_snapshot(match, np.append(tokens, 0))
        if ref is not None:
            self._check(ref.key, self._client.get_window(self._ns, ref.key))
            return
        key = self._ns.snapshot_key(tokens)
        payload = payload_of(key, int(self._rng.integers(SNAPSHOT_BYTES_MAX)))
        ttl_s = float(self._rng.choice([SHORT_TTL_S, 10 * SHORT_TTL_S]))
        outcome = self._client.put_snapshot(self._ns, tokens, payload, ttl_s=ttl_s)
        self.counts[f"snapshot {outcome.name}"] += 1

    def _hand_over(self) -> None:
        self._serial += 1
        request_id = f"{self._name}-{self._serial}"
        payload = payload_of(request_id.encode()[-4:], int(self._rng.integers(SNAPSHOT_BYTES_MAX)))
        self._client.put_handover(self._ns, request_id, payload, ttl_s=SHORT_TTL_S)
        self._check(request_id.encode()[-4:], self._client.wait_handover(self._ns, request_id, 0.0))
        if self._rng.integers(2):
            self._client.drop_handover(self._ns, request_id)

    def _check(self, name: bytes, got: bytes | None) -> None:
        self.counts["windows missed" if got is None else "windows read"] += 1
        if got is not None:
            right = np.array_equal(np.frombuffer(got, np.uint8), payload_of(name, len(got)))
            self.counts["wrong"] += not right


def run(url: str, seed: int, clients: int, seconds: float, think_s: float) -> dict[str, Any]:
    """So many clients as threads, each with connections of its own."""
    ends_s = time.monotonic() + seconds
    done: list[LoadClient] = []

    def live(number: int) -> None:
        with connect(url, deadline_s=DEADLINE_S) as client:
            load = LoadClient(client, namespace(client, DS41F_LAYOUT, "load"), seed + number)
            done.append(load)
            pauses = np.random.default_rng(seed + number)
            while time.monotonic() < ends_s:
                load.turn()
                time.sleep(float(pauses.exponential(think_s)))

    threads = [threading.Thread(target=live, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts: Counter[str] = Counter()
    for load in done:
        counts.update(load.counts)
    kinds = done[0].seconds if done else {}
    return {
        "clients": len(done),
        "counts": counts,
        "seconds": {kind: [s for load in done for s in load.seconds[kind]] for kind in kinds},
    }


def main(argv: Sequence[str]) -> int:
    url, seed, clients, seconds, think_s = argv
    print(json.dumps(run(url, int(seed), int(clients), float(seconds), float(think_s))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
