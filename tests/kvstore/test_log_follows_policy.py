"""The SSD's log under a policy: hit rates as simulated, what is declined, what is written twice."""

import random

import numpy as np
import pytest
from store_harness import HandDrivenStore, store_config

from benchmarks.bench_log_policy import play
from kvstore.bench.trace import Request, build
from kvstore.block import PutOutcome, Tier
from kvstore.eviction import LRU
from kvstore.migration import policies
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace

NS = tiny_namespace()
STORED = PutOutcome.STORED


class Choosy(LRU):
    """LRU that lets nothing in that was not foreseen twice."""

    def __init__(self, surroundings):
        super().__init__(surroundings)
        self.seen = {}

    def names(self, rows):
        return self.surroundings.identity(np.asarray(rows, np.int64)).tolist()

    def foresee(self, chain, held):
        for name in self.names(chain)[held:]:
            self.seen[name] = self.seen.get(name, 0) + 1

    def admits(self, row, victim):
        return self.seen.get(*self.names([row]), 0) > 1


@pytest.fixture
def full(monkeypatch):
    """A store whose SSD is full, under `Choosy`; and a chain that came last."""
    monkeypatch.setitem(policies.POLICIES, "lru", Choosy)
    store = HandDrivenStore(
        store_config(
            **{
                "eviction.policy": "lru",
                "dram.budget_bytes": 16 * 4096,
                "ssd.segment_bytes": "64KiB",
                "ssd.budget_bytes": "1MiB",
            }
        )
    )
    ns = store.core.open_namespace(NS)
    blocks, n = [], 0
    while not store.core.residency.declined:
        blocks = chain(ns, TINY_LAYOUT, [n, n + 1, n + 2, n + 3])
        assert store.put(ns, blocks) == [STORED] * 4
        store.flush()
        store.core.check_integrity()
        n += 10
    return store, ns, blocks


def tiers(store, blocks):
    return [store.residency(block.key) for block in blocks]


def test_what_the_policy_does_not_admit_stays_off_the_ssd_with_all_below_it(full):
    store, ns, blocks = full
    of = tiers(store, blocks)
    first = of.index(Tier.DRAM)
    assert of[first:] == [Tier.DRAM] * (4 - first)
    counts = store.metrics.counts
    assert counts["declined_ssd_blocks"] == 4 - first
    assert counts["evicted_ssd_blocks"] == 0
    assert not store.core.residency.dirty
    for block in blocks:
        assert store.read(NS, ns, block.key) == block.sections


def test_declined_blocks_make_room_in_dram_and_are_lost(full):
    store, ns, blocks = full
    for n in range(1000, 1020):
        store.put(ns, chain(ns, TINY_LAYOUT, [n]))
        store.flush()
        store.core.check_integrity()
    assert store.metrics.counts["evicted_dram_blocks"] > 0
    assert store.residency(blocks[-1].key) == Tier.NONE
    assert store.metrics.counts["evicted_ssd_blocks"] == 0


def test_a_declined_block_that_is_used_gets_another_chance(full):
    store, ns, blocks = full
    lease, _, found = store.core.acquire(ns, [b.key for b in blocks], store.now, None)
    assert found.hit_blocks == 4
    store.flush()
    store.core.check_integrity()
    assert all(tier & Tier.SSD for tier in tiers(store, blocks))
    assert store.metrics.counts["evicted_ssd_blocks"] > 0
    store.core.release(lease)


def test_whoever_waits_for_durability_is_not_declined(full):
    store, ns, blocks = full
    reservation, draft = store.reserve(ns, [(b.key, b.parent) for b in blocks])
    assert not reservation
    ticket = store.core.reservations.ticket(draft)
    assert ticket.waiting == set(store.core.residency.dirty)
    store.flush()
    assert ticket.settled
    assert not ticket.lost
    assert all(tier & Tier.SSD for tier in tiers(store, blocks))
    store.core.residency.tickets.close(ticket)
    store.core.check_integrity()


def test_ancestors_of_a_durable_block_become_durable_with_it(full):
    store, _, blocks = full
    last = store.core.index.find(blocks[-1].key)
    wanted = store.core.residency.wanted_durable([last])
    declined = [
        b for b, tier in zip(blocks, tiers(store, blocks), strict=True) if tier == Tier.DRAM
    ]
    assert wanted == {store.core.index.find(b.key) for b in declined}
    assert list(store.core.residency.dirty) == [store.core.index.find(b.key) for b in declined]
    store.core.check_integrity()


def agents(seed):
    """Sessions over shared prompts that come back after think times of their own, and one-off
    prompts between them."""
    random_ = random.Random(seed)
    requests = []
    for s in range(24):
        at, tokens = random_.uniform(0, 400), 8 + random_.randrange(8)
        think = random_.choice([4.0, 15.0, 60.0])
        for _ in range(10):
            shared = [k + 10_000 * (s % 3) for k in range(6)]
            own = [1_000_000 * (s + 1) + k for k in range(tokens)]
            requests.append(Request(at, shared + own, (6 + tokens) * 16))
            at += think * random_.uniform(0.7, 1.3)
            tokens += random_.randrange(1, 4)
    for n in range(80):
        own = [10**9 + 1000 * n + k for k in range(20)]
        requests.append(Request(random_.uniform(0, 600), own, 320))
    return build("agents", 16, sorted(requests, key=lambda r: r.time_s))


@pytest.mark.parametrize("policy", ["gittins", "lru"])
def test_the_real_log_hits_what_the_simulator_says(policy, seed, tmp_path):
    trace = agents(seed)
    played = play(trace, policy, 300, tmp_path / "store")
    assert 0.2 < played.hit_rate < trace.unbounded_hit_rate() - 0.02, "the sample decides nothing"
    assert abs(played.points) < 2.0, played
    assert 1.0 <= played.write_amplification < 3.0
    assert (played.declined_blocks > 0) == (policy == "gittins")
