"""The core driven by hand: what a restart, clean or not, finds again."""

from random import Random

from store_harness import HandDrivenStore, store_config
from store_steps import check, tight
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.block import PutOutcome, Tier
from kvstore.index import ROOT, BlockIndex
from kvstore.store import boot
from kvstore.testing.blocks import tiny_namespace

STORED = PutOutcome.STORED


def test_a_restart_keeps_the_cache_and_its_order():
    store = tight()
    ns = store.core.open_namespace(NS)
    chains = [blocks_of(ns, range(100 * n, 100 * n + 10)) for n in range(6)]
    for blocks in chains:
        store.clock.advance(10.0)
        store.put(ns, blocks)
        store.flush()
    # a late child makes its whole chain young
    store.clock.advance(10.0)
    late = blocks_of(ns, [0, 1, 2, 77], start=3)
    assert store.put(ns, late) == [STORED]
    store.close()
    store.open()
    check(store)
    assert store.core.namespaces.namespace(0) == NS
    for blocks in chains:
        assert store.core.match(ns, keys_of(blocks)).hit_blocks == 10
    r = store.core.residency
    order = []
    while (row := r.ssd_policy.victim(r.may_leave_store)) is not None:
        order.append(store.core.index.keys[row])
        r.drop(row)
    first = [key for blocks in chains[1:] for key in keys_of(blocks[::-1])]
    cold_tail = keys_of(chains[0][:2:-1])
    assert order == cold_tail + first + keys_of(late) + keys_of(chains[0][2::-1])


def test_a_parent_is_never_colder_than_its_child_at_boot(monkeypatch, seed):
    random = Random(seed)
    index = BlockIndex()
    rows = []
    for n in range(3000):
        parent = random.choice(rows[-40:]) if rows and random.random() < 0.95 else ROOT
        depth = 0 if parent == ROOT else index.depth[parent] + 1
        row = index.insert(n.to_bytes(32, "big"), 0, parent, depth, random.random())
        index.make_ready(row)
        index.tiers[row] = Tier.SSD
        rows.append(row)
    orders = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(boot, "_LEVEL_ROWS_MIN", least)
        orders.append(boot.coldest_first(index).tolist())
    assert orders[0] == orders[1]
    turn = {row: at for at, row in enumerate(orders[0])}
    assert sorted(turn) == rows
    youngest = {row: index.created_wall_s[row] for row in rows}
    for row in reversed(rows):
        if index.parent[row] != ROOT:
            assert turn[row] < turn[index.parent[row]]
            youngest[index.parent[row]] = max(youngest[index.parent[row]], youngest[row])
    times = [youngest[row] for row in orders[0]]
    assert times == sorted(times)


def test_power_loss_keeps_what_was_made_durable():
    for run in range(10):
        store = HandDrivenStore(store_config())
        ns = store.core.open_namespace(NS)
        durable, accepted = blocks_of(ns, range(5)), blocks_of(ns, range(10), start=5)
        store.put(ns, durable)
        store.flush()
        store.put(ns, accepted)
        store.power_loss(Random(run))
        check(store)
        ns = store.core.open_namespace(NS)
        assert store.core.match(ns, keys_of(durable)).hit_blocks == 5
        for block in durable + accepted:
            assert store.read(NS, ns, block.key) in (
                [block.sections] if block in durable else [block.sections, None]
            )
        check(store)


def test_a_tenant_is_found_again_after_a_restart(store):
    tenant = tiny_namespace(tenant="t")
    ns = store.core.open_namespace(tenant)
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    store.close()
    store.open()
    assert store.core.open_namespace(tenant) == ns
    assert store.core.match(ns, keys_of(blocks)).hit_blocks == 3
