"""What the policies of a store hear: one use per request, and of every block before it comes."""

from itertools import pairwise

import pytest
from store_harness import HandDrivenStore, store_config

from kvstore.block import Tier
from kvstore.config import EvictionConfig
from kvstore.eviction import LRU, POLICIES
from kvstore.migration import policies
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace

NS = tiny_namespace()


class Listening(LRU):
    """Notes what it is told, as (what, rows, how many of them were held)."""

    def __init__(self, surroundings):
        super().__init__(surroundings)
        self.heard = []

    def foresee(self, chain, held):
        self.heard.append(("request", list(chain), held))

    def continued(self, chain, held):
        self.heard.append(("goes on", list(chain), held))

    def touch(self, rows):
        self.heard.append(("use", list(rows), len(rows)))
        super().touch(rows)

    def arrived(self, chain):
        self.heard.append(("arrival", list(chain), len(chain)))
        super().touch(chain)

    def add(self, row):
        self.heard.append(("add", [row], 1))
        super().add(row)

    def take(self):
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setitem(policies.POLICIES, "lru", Listening)
    return HandDrivenStore(store_config(**{"eviction.policy": "lru"}))


def heard(store, tier):
    return store.core.residency.policies.of[tier].take()


def rows_of(store, blocks):
    return [store.core.index.find(block.key) for block in blocks]


def use(store, ns, blocks):
    lease, _, found = store.core.acquire(ns, [b.key for b in blocks], store.now, None)
    store.core.release(lease)
    return found.hit_blocks


def test_a_request_is_one_use_however_many_pieces_it_stores(store):
    ns = store.core.open_namespace(NS)
    blocks = chain(ns, TINY_LAYOUT, range(12))
    assert use(store, ns, blocks) == 0
    for at in range(0, 9, 3):
        store.put(ns, blocks[at : at + 3])
        store.flush()
    rows = rows_of(store, blocks[:9])
    for tier in (Tier.DRAM, Tier.SSD):
        what = [h for h in heard(store, tier) if h[0] != "add"]
        assert [h for h in what if h[0] in ("request", "use")] == [("request", rows[:3], 0)]
        assert [h for h in what if h[0] == "goes on"] == [
            ("goes on", rows[:6], 3),
            ("goes on", rows[:9], 6),
        ]
        assert [h[1] for h in what if h[0] == "arrival"] == [rows[:3], rows[:6], rows[:9]]

    assert use(store, ns, blocks) == 9
    for tier in (Tier.DRAM, Tier.SSD):
        assert heard(store, tier) == [("request", rows, 9), ("use", rows, 9)]
    store.put(ns, blocks[9:])
    store.flush()
    whole = rows_of(store, blocks)
    for tier in (Tier.DRAM, Tier.SSD):
        told = [h for h in heard(store, tier) if h[0] != "add"]
        assert told == [("goes on", whole, 9), ("arrival", whole, 12)]


def test_what_is_read_back_is_foreseen_by_dram_and_arrives_in_its_chain(store):
    ns = store.core.open_namespace(NS)
    blocks = chain(ns, TINY_LAYOUT, range(6))
    store.put(ns, blocks)
    store.flush()
    store.core.evict(ns, [b.key for b in blocks[2:]], Tier.DRAM)
    rows = rows_of(store, blocks)
    heard(store, Tier.DRAM), heard(store, Tier.SSD)
    use(store, ns, blocks)
    assert heard(store, Tier.DRAM) == [("request", rows, 2), ("use", rows[:2], 2)]
    assert heard(store, Tier.SSD) == [("request", rows, 6), ("use", rows, 6)]
    loads = [store.core.promotion.begin(row, ns)[0] for row in reversed(rows[2:])]
    for load in loads:
        store.finish_load(NS.layout, load)
    store.core.promotion.arrived(loads)
    assert heard(store, Tier.DRAM)[-1] == ("arrival", rows, 6)
    assert heard(store, Tier.SSD) == []


def test_branches_are_told_one_by_one(store):
    ns = store.core.open_namespace(NS)
    one = chain(ns, TINY_LAYOUT, [1, 2, 3, 4])
    other = chain(ns, TINY_LAYOUT, [1, 2, 7, 8])
    store.put(ns, [*one, *other[2:]])
    told = [h for h in heard(store, Tier.DRAM) if h[0] != "add"]
    assert [h[0] for h in told] == ["request", "goes on", "arrival", "arrival"]
    expected = [row for _, chain_, held in told[:2] for row in chain_[held:]]
    assert sorted(expected) == sorted(rows_of(store, [*one, *other[2:]]))
    for _, rows, _ in told[2:]:
        parents = store.core.index.parent
        assert all(parents[below] == above for above, below in pairwise(rows))


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_a_tier_may_have_a_policy_of_its_own(tier):
    config = store_config(**{"eviction.policy": "arc", f"eviction.{tier}_policy": "sieve"})
    of = HandDrivenStore(config).core.residency.policies.of
    own = Tier[tier.upper()]
    assert all(type(p) is POLICIES["sieve" if t is own else "arc"] for t, p in of.items())
    assert EvictionConfig().policy_of(own) == EvictionConfig().policy


def test_policies_know_blocks_by_key_and_the_room(store):
    ns = store.core.open_namespace(NS)
    blocks = chain(ns, TINY_LAYOUT, range(3))
    store.put(ns, blocks)
    policy = store.core.residency.dram_policy
    names = policy.surroundings.identity(store.core.index.rows_in_use())
    assert [int(n).to_bytes(8, "little") for n in names] == [b.key[:8] for b in blocks]
    assert policy.surroundings.capacity_rows() == store.config.dram.budget_bytes // 4096
    assert policy.surroundings.now_s() == store.now
