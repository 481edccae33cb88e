"""One client of a daemon that is killed again and again: works, remembers what it was promised, and
looks whether every promise was kept.

`kill_client.py URL NAME SEED`. On standard input, one line per order: `check` (a daemon came back:
look at every promise, answer `checked BLOCKS`), `kill PID` (kill that process as soon as the next
durable put has returned, answer `killed`), `end` (answer with the counts of what was done, and
exit). A promise that was broken is an exception, and so a return code that is not 0.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from random import Random

import kvstore
from kvstore import BlockPut, Durability, NamespaceHandle, Outcome, PutOutcome
from kvstore.errors import KVStoreError, LeaseExpired, ReservationExpired, Unavailable
from kvstore.namespace import Layout
from kvstore.testing.blocks import TINY_LAYOUT, chain, payload, tiny_namespace

LAYOUT = Layout(TINY_LAYOUT.sections, 64)
"""Blocks of 34,176 bytes in four sections."""
BLOCKS_MAX = 10
OWN_CHAINS_MAX = 12
SHARED_CHAINS = 6
CALL_DEADLINE_S = 30.0
BACK_S_MAX = 120.0
THERE = (PutOutcome.STORED, PutOutcome.PRESENT)


class BrokenPromise(Exception):
    """The store lost a durable block, or served a wrong byte."""


class KillClient:
    """Chains of its own, which it may evict, and some that every client writes."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        self.random = Random(f"{seed} {name}")
        self.counts: Counter[str] = Counter()
        self.durable: dict[str, int] = {}
        """Per chain, how many of its blocks, from the first on, were promised to be durable."""
        self.own_chains: dict[str, None] = {}
        """Every chain of its own that may have blocks in the store."""
        self.number = self.doomed = 0
        self.name = name
        self.client, self.ns = self.connect(url)
        self.orders: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def connect(self, url: str) -> tuple[kvstore.Client, NamespaceHandle]:
        ends_s = time.monotonic() + BACK_S_MAX
        while True:
            try:
                client = kvstore.connect(url, deadline_s=CALL_DEADLINE_S)
                return client, client.open_namespace(tiny_namespace(layout=LAYOUT))
            except Unavailable:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)

    def listen(self) -> None:
        for line in sys.stdin:
            self.orders.put(line.strip())
        self.orders.put("end")

    def run(self) -> None:
        while True:
            try:
                order = self.orders.get(timeout=0.001)
            except queue.Empty:
                self.work()
                continue
            if order == "end":
                print("end", json.dumps(self.counts), flush=True)
                return
            if order.startswith("kill "):
                self.doomed = int(order.split()[1])
            else:
                print("checked", self.check_all(), flush=True)

    def work(self) -> None:
        """One random step; what the daemon's death does to it is as it should be."""
        steps = (self.put, self.put, self.put_shared, self.reserve, self.read, self.evict)
        step = self.random.choice(steps)
        try:
            step()
        except Unavailable:
            self.counts["calls cut off"] += 1
            time.sleep(0.2)
        except (LeaseExpired, ReservationExpired):
            self.counts["rights lost"] += 1
        else:
            self.counts[step.__name__] += 1

    # chains

    def blocks(self, chain_name: str) -> list[BlockPut]:
        """The same every time, for every client."""
        random = Random(chain_name)
        tokens = [random.randrange(1 << 20) for _ in range(random.randint(1, BLOCKS_MAX))]
        return chain(self.ns.id, LAYOUT, tokens)

    def own(self) -> str:
        known = [name for name in self.durable if name.startswith(self.name)]
        if known and self.random.random() < 0.4:
            return self.random.choice(known)
        self.number += 1
        name = f"{self.name}-{self.number}"
        self.own_chains[name] = None
        return name

    # steps

    def put(self) -> None:
        self.store(self.own())

    def put_shared(self) -> None:
        self.store(f"shared-{self.random.randrange(SHARED_CHAINS)}")

    def store(self, name: str) -> None:
        """A chain, accepted in part, then durable in part."""
        blocks = self.blocks(name)
        accepted, durable = sorted(self.random.choices(range(len(blocks) + 1), k=2))
        if accepted:
            self.client.put(self.ns, blocks[:accepted])
        if durable:
            outcomes = self.client.put(self.ns, blocks[:durable], Durability.DURABLE)
            there = next((i for i, o in enumerate(outcomes) if o not in THERE), durable)
            self.durable[name] = max(there, self.durable.get(name, 0))
            self.counts["blocks promised"] += there
            if self.doomed:
                os.kill(self.doomed, signal.SIGKILL)
                self.doomed = 0
                print("killed", flush=True)

    def reserve(self) -> None:
        """A writer that is slower, and one that may not finish."""
        blocks = self.blocks(self.own())
        grant = self.client.reserve(self.ns, [(b.key, b.parent) for b in blocks], 5.0)
        if not grant.reservation_id:
            return
        written = self.random.randint(0, len(blocks))
        for block, outcome in list(zip(blocks, grant.outcomes, strict=True))[:written]:
            if outcome is PutOutcome.STORED:
                self.client.write(grant.reservation_id, block.key, block.sections)
        if self.random.random() < 0.5:
            self.client.abort(grant.reservation_id)
        else:
            self.client.commit(grant.reservation_id)

    def read(self) -> None:
        """Anything: right bytes or none."""
        self.read_chain(self.random.choice([self.own(), *self.durable]))

    def evict(self) -> None:
        """Forget chains of its own. Noted before it is done: from then on they may be gone. What
        was in use stays, and is asked for again."""
        while len(self.own_chains) > OWN_CHAINS_MAX:
            name = self.random.choice(list(self.own_chains))
            keys = [block.key for block in self.blocks(name)]
            self.durable.pop(name, None)
            self.client.evict(self.ns, keys)
            if self.client.match(self.ns, keys).hit_blocks:
                return
            del self.own_chains[name]

    # promises

    def read_chain(self, name: str) -> int:
        """How many blocks of a chain, from the first on, are there. Raises `BrokenPromise` where
        one of them has other bytes than were put."""
        keys = [block.key for block in self.blocks(name)]
        with self.client.acquire(self.ns, keys) as lease:
            if not lease.blocks:
                return 0
            for block in self.client.read(lease, keys[: lease.blocks]):
                if block.outcome is not Outcome.HIT:
                    raise BrokenPromise(f"{name}: {block.key.hex()} is leased and {block.outcome}")
                if [bytes(s) for s in block.sections] != payload(LAYOUT, block.key):
                    raise BrokenPromise(f"{name}: {block.key.hex()} has wrong bytes")
            self.counts["blocks read"] += lease.blocks
            return lease.blocks

    def check_all(self) -> int:
        """Every promise; how many blocks that are. Starts again where the daemon dies meanwhile."""
        ends_s = time.monotonic() + BACK_S_MAX
        while True:
            try:
                for name, promised in self.durable.items():
                    there = self.read_chain(name)
                    if there < promised:
                        raise BrokenPromise(f"{name}: {there} blocks of {promised} durable ones")
                return sum(self.durable.values())
            except (Unavailable, LeaseExpired):
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)


def main(url: str, name: str, seed: int) -> int:
    client = KillClient(url, name, seed)
    print("ready", flush=True)
    try:
        client.run()
    except (BrokenPromise, KVStoreError) as e:
        print("broken", repr(e), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
