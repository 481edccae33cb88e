"""The state machine of `store_machine` with an HBM tier on simulated devices.

After every step, what lies in the device's memory for a block that the index says is in HBM must be
that block: no slot is given away under a copy, and none is called full before its copy is done.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from store_harness import store_config
from store_machine import EXAMPLES, TIGHT, StoreMachine, TightStore, paths, writers

from kvstore.block import Tier
from kvstore.tiers.hbm.device import DeviceError
from kvstore.tiers.hbm.simulated import no_fault

HBM = {"hbm.device": "simulated", "hbm.copy_bytes_max": 3 * 12288}


class WithHbm:
    """Rules and checks that HBM adds to a machine."""

    hbm_job = None
    hbm_result = None

    def in_flight(self):
        keys = super().in_flight()
        if self.hbm_job is not None:
            keys |= {load.key for load in self.hbm_job.loads}
            keys |= {copy.key for copy in self.hbm_job.copies}
        return keys

    @precondition(lambda self: self.hbm_job is None)
    @rule(run_now=st.booleans())
    def begin_hbm(self, run_now):
        self.hbm_job = self.store.begin_hbm()
        self.notice_evictions()
        if self.hbm_job is not None and run_now:
            self.hbm_result = self.store.copies.run(self.hbm_job)

    @precondition(lambda self: self.hbm_job is not None)
    @rule()
    def finish_hbm(self):
        job, result = self.hbm_job, self.hbm_result
        self.hbm_job = self.hbm_result = None
        self.store.finish_hbm(job, result)
        if self.device.before is not no_fault:
            self.notice_losses()

    @rule(path=paths, rounds=st.integers(1, 4))
    def hit_and_copy_in(self, path, rounds):
        """A short lease over what is there, and the copies that follow."""
        keys = [b.key for b in self.chain(path)]
        lease, _, _ = self.store.core.acquire(self.ns, keys, self.store.now, 1.0)
        self.store.core.release(lease)
        for _ in range(rounds):
            if self.hbm_job is not None:
                self.finish_hbm()
            self.begin_hbm(run_now=False)

    @rule(path=paths, writer=writers)
    def put_more(self, path, writer):
        self.put(path, writer)
        self.hit_and_copy_in(path, 3)

    @rule(path=paths, writer=writers)
    def put_yet_more(self, path, writer):
        self.put(path, writer)
        self.demote(path)
        self.hit_and_copy_in(path, 1)

    @rule(path=paths)
    def use_hbm_alone(self, path):
        self.hit_and_copy_in(path, 3)
        self.demote(path)

    @rule(number=st.integers(0, 99))
    def begin_load_from_hbm(self, number):
        core = self.store.core
        there = [k for k in self.ready if self.residency(k) & (Tier.HBM | Tier.DRAM) == Tier.HBM]
        key = self.choose(number, set(there) - self.in_flight())
        if key is not None:
            load, new = core.promotion.begin(core.index.find(key), self.ns)
            assert new
            assert load.source is not None
            self.loads.append(load)
            self.notice_evictions()

    @precondition(lambda self: self.loads)
    @rule()
    def finish_load(self):
        load = self.loads.pop(0)
        data = self.store.finish_load(self.layout, load)
        if data is None:
            assert load.source is not None
            assert self.device.before is not no_fault
            self.notice_losses()
        else:
            assert data in [self.sections(load.key, writer) for writer in self.ever[load.key]]

    def notice_losses(self):
        """Blocks whose only copy was on a device that failed are gone."""
        for key in [k for k in self.ready if not self.store_has(k)]:
            self.lose(key)

    @property
    def device(self):
        return self.store.hbm.devices[0]

    @rule(path=st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=9))
    def demote_from_hbm(self, path):
        keys = [b.key for b in self.chain(path)]
        self.store.core.evict(self.ns, keys, Tier.HBM)
        assert all(self.store_has(k) for k in keys if k in self.ready)

    @rule(number=st.integers(0, 99), at=st.integers(0, 2400))
    def corrupt_hbm(self, number, at):
        in_hbm = {k for k in self.ready if self.residency(k) & (Tier.HBM | Tier.DRAM) == Tier.HBM}
        key = self.choose(number, in_hbm - self.in_flight())
        if key is None or not self.matters(at):
            return
        elsewhere = bool(self.residency(key) & ~Tier.HBM)
        self.store.hbm_view(key)[at] ^= 0x40
        before = self.store.metrics.counts["corrupt_hbm_blocks"]
        if self.device.before is no_fault:
            data = self.store.read(self.namespace, self.ns, key)
            assert data == (self.sections(key, self.ready[key]) if elsewhere else None)
            assert self.store.metrics.counts["corrupt_hbm_blocks"] == before + 1
        else:
            data = self.store.read(self.namespace, self.ns, key)
        if not elsewhere:
            self.lose(key)
        self.notice_evictions()

    @rule(fails=st.sampled_from(["in", "out", "queue", None, None, None]))
    def trouble_the_device(self, fails):
        def before(op, length):
            if op == fails:
                raise DeviceError("injected")

        self.finish_all_of_hbm()
        for device in self.store.hbm.devices:
            device.before = before if fails else no_fault

    def finish_all_of_hbm(self):
        if self.hbm_job is not None:
            self.finish_hbm()
        while any(load.source is not None for load in self.loads):
            self.finish_load()

    def check_read(self, key):
        if self.device.before is no_fault:
            super().check_read(key)
            return
        data = self.store.read(self.namespace, self.ns, key)
        assert data in (None, *[self.sections(key, w) for w in self.ever.get(key, ())])
        self.notice_losses()

    @rule()
    def flush(self):
        self.calm_the_device()
        super().flush()

    def calm_the_device(self):
        self.finish_all_of_hbm()
        for device in self.store.hbm.devices:
            device.before = no_fault

    @rule()
    def restart(self):
        self.calm_the_device()
        super().restart()

    @rule(seed=st.integers(0, 1 << 32))
    def power_loss(self, seed):
        self.hbm_job = self.hbm_result = None
        super().power_loss(seed)

    @invariant()
    def the_device_holds_what_the_index_says(self):
        for key, writer in self.ready.items():
            if self.residency(key) & Tier.HBM:
                found = self.store.sections(self.layout, key, self.store.hbm_view(key))
                assert found == self.sections(key, writer), "wrong bytes on the device"


class RoomyStoreWithHbm(WithHbm, StoreMachine):
    def config(self):
        budget = {"dram.budget_bytes": "16MiB", "hbm.budget_bytes": "1MiB"}
        return store_config(**HBM, **budget)


class TightStoreWithHbm(WithHbm, TightStore):
    """Three blocks fit each of two devices."""

    policy = "gittins"

    def config(self):
        devices = {"hbm.devices": (0, 1), "hbm.budget_bytes": 3 * 12288}
        return store_config(**HBM, **TIGHT, **devices, **{"eviction.policy": self.policy})


class HbmAndDramAlone(WithHbm, TightStore):
    """No log: a block may be in HBM alone."""

    policy = "gittins"

    flush = restart = power_loss = put_and_flush = corrupt_ssd = begin_log = finish_log = None

    def config(self):
        sizes = {"hbm.budget_bytes": 4 * 12288, "dram.budget_bytes": TIGHT["dram.budget_bytes"]}
        return store_config(ssd=False, **HBM, **sizes, **{"eviction.policy": self.policy})

    @rule(what=st.none())
    def disk(self, what):
        """There is none."""


TestRoomyStoreWithHbm = RoomyStoreWithHbm.TestCase
TestRoomyStoreWithHbm.settings = settings(max_examples=EXAMPLES // 5, stateful_step_count=50)
TestTightStoreWithHbm = TightStoreWithHbm.TestCase
TestTightStoreWithHbm.settings = settings(max_examples=EXAMPLES // 5, stateful_step_count=60)
TestHbmAndDramAlone = HbmAndDramAlone.TestCase
TestHbmAndDramAlone.settings = settings(max_examples=EXAMPLES // 5, stateful_step_count=60)
