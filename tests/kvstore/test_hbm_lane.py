"""The HBM lane by hand: its bounds, its pauses, and what becomes of jobs that were overtaken."""

import pytest
from store_harness import HandDrivenStore, store_config

from kvstore.block import Tier
from kvstore.index import READY
from kvstore.migration.hbm_copies import HbmResult
from kvstore.migration.workers import Loaded
from kvstore.namespace import Layout
from kvstore.testing.blocks import TINY_LAYOUT, chain, payload, tiny_namespace
from kvstore.tiers.hbm.device import DeviceError, DeviceHangs

FRAME = 4096
NAMESPACE = tiny_namespace()


class Store(HandDrivenStore):
    def __init__(self, blocks=16, ssd=True, **settings):
        sizes = {"hbm.device": "simulated", "hbm.budget_bytes": blocks * FRAME}
        # which block is cold is what these tests say
        settings = {"eviction.policy": "lru", **settings}
        super().__init__(store_config(ssd=ssd, **sizes, **settings))
        self.ns = self.core.open_namespace(NAMESPACE)

    def put_chain(self, tokens):
        blocks = chain(self.ns, TINY_LAYOUT, list(tokens))
        self.put(self.ns, blocks)
        return [block.key for block in blocks]

    def hit(self, keys):
        lease, _, _ = self.core.acquire(self.ns, keys, self.now, None)
        self.core.release(lease)

    def row(self, key):
        return self.core.index.find(key)

    def in_hbm(self, keys):
        return [bool(self.residency(key) & Tier.HBM) for key in keys]


def failed(job, error):
    loaded = [Loaded(load, memoryview(b""), error) for load in job.loads]
    return HbmResult(loaded, [error] * len(job.copies))


def test_a_job_has_its_limit_and_the_next_goes_on():
    store = Store(**{"hbm.copy_bytes_max": 3 * FRAME})
    keys = store.put_chain(range(8))
    store.hit(keys)
    sizes = []
    while (job := store.begin_hbm()) is not None:
        sizes.append(len(job.copies))
        assert store.begin_hbm() is None, "one job at a time"
        store.core.check_integrity()
        store.finish_hbm(job)
        store.core.check_integrity()
    assert sizes == [3, 3, 2]
    assert store.in_hbm(keys) == [True] * 8


def test_candidates_have_a_limit_and_the_first_are_kept():
    store = Store(**{"hbm.candidates_max": 5})
    keys = store.put_chain(range(8))
    store.hit(keys)
    store.hit(keys)
    store.core.check_integrity()
    store.flush()
    assert store.in_hbm(keys) == [True] * 5 + [False] * 3


def test_nothing_goes_for_what_can_not_fit():
    store = Store(blocks=3)
    keys = store.put_chain(range(3))
    store.hit(keys)
    store.flush()
    big = Layout(TINY_LAYOUT.sections, 64)
    wide = tiny_namespace(layout=big)
    ns = store.core.open_namespace(wide)
    blocks = chain(ns, big, [1])
    store.put(ns, blocks)
    assert store.core.residency.slot_of(store.row(blocks[0].key)).length > 3 * FRAME
    lease, _, _ = store.core.acquire(ns, [blocks[0].key], store.now, None)
    store.core.release(lease)
    store.flush()
    assert store.in_hbm([*keys, blocks[0].key]) == [True] * 3 + [False]


def test_nothing_is_wanted_twice():
    store = Store()
    keys = store.put_chain(range(4))
    for _ in range(3):
        store.hit(keys)
    store.flush()
    assert store.metrics.counts["promoted_hbm_blocks"] == 4


def test_errors_pause_longer_and_longer_and_one_success_forgets_them():
    store = Store(**{"migration.retry_s_min": 1.0, "migration.retry_s_max": 4.0})
    keys = store.put_chain(range(6))
    for pause in (1.0, 2.0, 4.0, 4.0):
        store.hit(keys)
        job = store.begin_hbm()
        store.finish_hbm(job, failed(job, DeviceError("injected")))
        assert store.core.hbm_lane.degraded
        store.hit(keys)
        store.clock.advance(pause - 0.01)
        assert store.begin_hbm() is None
        store.clock.advance(0.02)
    store.flush()
    assert store.in_hbm(keys) == [True] * 6
    assert not store.core.hbm_lane.degraded
    assert store.hbm.used_bytes == 6 * FRAME


def test_a_block_that_was_put_again_meanwhile_does_not_get_the_old_bytes():
    store = Store(ssd=False)
    (key,) = store.put_chain([1])
    store.hit([key])
    job = store.begin_hbm()
    result = store.copies.run(job)
    store.core.residency.quarantine(store.row(key), Tier.DRAM, "for the test")
    blocks = chain(store.ns, TINY_LAYOUT, [1], writer=1)
    store.put(store.ns, blocks)
    store.finish_hbm(job, result)
    store.core.check_integrity()
    assert store.in_hbm([key]) == [False]
    assert store.read(NAMESPACE, store.ns, key) == payload(TINY_LAYOUT, key, 1)


@pytest.mark.parametrize("direction", ["in", "back"])
def test_slots_of_a_hanging_device_are_never_used_again(direction):
    store = Store(blocks=4)
    keys = store.put_chain(range(4))
    store.hit(keys)
    store.flush()
    more = store.put_chain([9, 9])
    if direction == "back":
        store.core.evict(store.ns, keys, Tier.DRAM)
    else:
        store.core.evict(store.ns, keys[2:], Tier.HBM)
    store.hit(more)
    job = store.begin_hbm()
    assert bool(job.loads) == (direction == "back")
    touched = [load.slot for load in job.loads], [copy.target for copy in job.copies]
    before = store.dram.used_bytes
    store.finish_hbm(job, failed(job, DeviceHangs("injected")))
    store.core.check_integrity()
    assert store.core.hbm_lane.failed
    assert store.in_hbm(keys + more) == [False] * 6
    for slot in touched[0]:
        assert store.dram.slot_at(slot.page) == slot
    for slot in touched[1]:
        assert store.hbm.slot_at(slot.page) == slot
    assert store.dram.used_bytes == before
    store.hit(more)
    assert store.begin_hbm() is None
    for key in keys + more:
        assert store.read(NAMESPACE, store.ns, key) == payload(TINY_LAYOUT, key)
    store.core.check_integrity()


def test_a_job_that_comes_back_after_the_tier_was_given_up_changes_nothing():
    store = Store()
    keys = store.put_chain(range(3))
    store.hit(keys)
    job = store.begin_hbm()
    result = store.copies.run(job)
    store.core.hbm_lane.give_up(DeviceHangs("a read hung"))
    store.finish_hbm(job, result)
    store.core.check_integrity()
    assert store.in_hbm(keys) == [False] * 3
    assert store.hbm.used_bytes == 0


def test_hbm_alone_is_lost_with_the_device_and_its_children_go_first():
    store = Store(ssd=False)
    keys = store.put_chain(range(3))
    store.hit(keys)
    store.flush()
    r = store.core.residency
    r.leave_dram(store.row(keys[1]))
    store.core.check_integrity()
    store.core.hbm_lane.give_up(DeviceHangs("injected"))
    store.core.check_integrity()
    assert store.core.match(store.ns, keys).hit_blocks == 1
    assert store.core.index.state[store.row(keys[2])] == READY


def test_a_store_without_ssd_moves_blocks_between_its_two_tiers():
    store = Store(blocks=4, ssd=False, **{"dram.budget_bytes": 16 * FRAME})
    keys = store.put_chain(range(4))
    store.hit(keys)
    store.flush()
    for key in keys:
        store.core.residency.leave_dram(store.row(key))
    new = store.put_chain([7] * 4)
    store.hit(new)
    store.flush()
    assert store.in_hbm(keys + new) == [False] * 4 + [True] * 4
    assert [store.residency(key) for key in keys] == [Tier.DRAM] * 4
    for key in keys:
        assert store.read(NAMESPACE, store.ns, key) == payload(TINY_LAYOUT, key)
