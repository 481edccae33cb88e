"""The rules of the store's state machine: every call, time, trouble, and the ends of a process."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from store_harness import store_config
from store_model import STORED, Reserved, StoreModel

from kvstore.block import BlockPut, Outcome, PutOutcome, Tier
from kvstore.namespace import Layout
from kvstore.testing.blocks import TINY_LAYOUT
from kvstore.testing.disk import no_fault

EXAMPLES = 2 * settings.default.max_examples // 5
BIG_LAYOUT = Layout(TINY_LAYOUT.sections, 16)
paths = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=9)
writers = st.integers(0, 2)


class StoreMachine(StoreModel):
    """A store that never runs out of anything."""

    # writing

    @rule(path=paths, writer=writers, start=st.integers(0, 3), ttl_s=st.sampled_from([1.0, 50.0]))
    def reserve(self, path, writer, start, ttl_s):
        blocks = self.chain(path, writer)[start:]
        reservation, draft = self.store.reserve(self.ns, [(b.key, b.parent) for b in blocks], ttl_s)
        outcomes = list(draft.outcomes)
        self.notice_evictions()
        if self.exact:
            assert outcomes == self.expected_reserve(blocks)
        self.lapse()
        new = Reserved(blocks, outcomes, writer, self.store.now + ttl_s)
        assert (reservation != 0) == bool(new.keys)
        if reservation:
            self.reserved[reservation] = new
            self.unlinked.difference_update(new.keys)

    @rule(path=paths, writer=writers)
    def put(self, path, writer):
        before = set(self.reserved)
        self.reserve(path, writer, 0, 50.0)
        for reservation in self.reserved.keys() - before:
            self.commit(sorted(self.reserved).index(reservation), all_of_it=True)

    # of all that can happen, this happens most

    @rule(path=paths, writer=writers)
    def put_more(self, path, writer):
        self.put(path, writer)

    @rule(path=paths, writer=writers)
    def put_yet_more(self, path, writer):
        self.put(path, writer)

    @rule(path=paths)
    def put_and_flush(self, path):
        self.put(path, 0)
        self.flush()

    @rule(number=st.integers(0, 99), right=st.booleans())
    def write(self, number, right):
        reservation = self.choose(number, self.reserved)
        if reservation is None:
            return
        held = self.reserved[reservation]
        left = [b for b in held.blocks if b.key in held.keys and b.key not in held.written]
        for block in left[: 1 + number % 3]:
            checksums = None if right else [bytes(16)] * len(block.sections)
            block = BlockPut(block.key, block.parent, block.sections, checksums)
            assert self.store.write(reservation, block) == right
            held.written[block.key] = right

    @rule(number=st.integers(0, 99), all_of_it=st.booleans())
    def commit(self, number, all_of_it):
        reservation = self.choose(number, self.reserved)
        if reservation is None:
            return
        held = self.reserved[reservation]
        if all_of_it:
            for block in held.blocks:
                if block.key in held.keys and block.key not in held.written:
                    self.store.write(reservation, block)
                    held.written[block.key] = True
        outcomes = self.store.core.reservations.commit(reservation, self.store.now).outcomes
        del self.reserved[reservation]
        pending = self.pending()
        for block, before, after in zip(held.blocks, held.outcomes, outcomes, strict=True):
            expected = before
            if before is STORED:
                there = block.parent == self.ns or block.parent in {*self.ready, *pending}
                if not held.written.get(block.key):
                    expected = PutOutcome.CORRUPT
                elif not there:
                    expected = PutOutcome.PARENT_MISSING
            assert after is expected
            if after is STORED:
                self.ready[block.key] = held.writer
                self.ever.setdefault(block.key, set()).add(held.writer)
                self.lost.discard(block.key)
            elif before is STORED and self.has_descendants(block.key):
                self.lost.add(block.key)

    @rule(number=st.integers(0, 99))
    def abort(self, number):
        reservation = self.choose(number, self.reserved)
        if reservation is not None:
            self.store.core.reservations.abort(reservation)
            self.drop_reservation(reservation)

    # reading

    @rule(path=paths)
    def match(self, path):
        keys = [b.key for b in self.chain(path)]
        found = self.store.core.match(self.ns, keys)
        expected = []
        for key in keys:
            if key in self.ready:
                expected.append(Outcome.HIT)
            elif key in self.pending():
                expected.append(Outcome.PENDING)
            else:
                expected.append(Outcome.MISS)
                break
        assert list(found.outcomes) == expected
        hits = next((i for i, o in enumerate(expected) if o is not Outcome.HIT), len(expected))
        assert found.hit_blocks == hits

    @rule(path=paths)
    def read(self, path):
        for block in self.chain(path):
            if block.key in self.in_flight() and not self.residency(block.key) & Tier.DRAM:
                continue
            self.check_read(block.key)
            self.notice_evictions()

    def check_read(self, key: bytes) -> None:
        was_there = key in self.ready
        data = self.store.read(self.namespace, self.ns, key)
        if was_there:
            assert data == self.sections(key, self.ready[key])
        else:
            assert data is None

    def residency(self, key: bytes) -> Tier:
        return self.store.residency(key)

    @rule(number=st.integers(0, 99))
    def begin_load(self, number):
        core = self.store.core
        on_ssd = [k for k in self.ready if self.residency(k) == Tier.SSD]
        key = self.choose(number, set(on_ssd) - self.in_flight())
        if key is not None:
            load, new = core.promotion.begin(core.index.find(key), self.ns)
            assert new
            self.loads.append(load)
            self.notice_evictions()

    @precondition(lambda self: self.loads)
    @rule()
    def finish_load(self):
        load = self.loads.pop(0)
        data = self.store.finish_load(self.layout, load)
        assert data in [self.sections(load.key, writer) for writer in self.ever[load.key]]

    # leases

    @rule(path=paths, ttl_s=st.sampled_from([1.0, 50.0]))
    def acquire(self, path, ttl_s):
        keys = [b.key for b in self.chain(path)]
        lease, _, found = self.store.core.acquire(self.ns, keys, self.store.now, ttl_s)
        self.leases[lease] = (keys[: found.hit_blocks], self.store.now + ttl_s)
        assert all(key in self.ready for key in keys[: found.hit_blocks])

    @rule(number=st.integers(0, 99))
    def release(self, number):
        lease = self.choose(number, self.leases)
        if lease is not None:
            self.store.core.release(lease)
            del self.leases[lease]

    @rule(seconds=st.sampled_from([0.4, 0.6, 1.5, 30.0]))
    def time_passes(self, seconds):
        self.store.clock.advance(seconds)
        self.lapse()

    def lapse(self):
        now = self.store.now
        self.store.core.expire(now)
        self.leases = {i: (k, at) for i, (k, at) in self.leases.items() if at > now}
        for reservation in [i for i, r in self.reserved.items() if r.expires_s <= now]:
            self.drop_reservation(reservation)

    # eviction

    @rule(path=paths)
    def evict(self, path):
        keys = [b.key for b in self.chain(path)]
        gone = self.store.core.evict(self.ns, keys, None)
        expected = 0
        for key in reversed(keys):
            free = key not in self.leased() | self.in_flight() and not self.has_descendants(key)
            if key in self.ready and free:
                self.gone(key)
                expected += 1
        assert gone == expected

    @rule(path=paths)
    def demote(self, path):
        keys = [b.key for b in self.chain(path)]
        self.store.core.evict(self.ns, keys, Tier.DRAM)
        self.notice_evictions()
        # a block that was in DRAM alone is there still
        assert not self.exact or all(self.store_has(k) for k in keys if k in self.ready)

    # the log

    @precondition(lambda self: self.job is None)
    @rule(run_now=st.booleans())
    def begin_log(self, run_now):
        self.job = self.store.begin_log()
        self.notice_evictions()
        if self.job is not None and run_now:
            self.result = self.store.writer.run(self.job)

    @precondition(lambda self: self.job is not None)
    @rule()
    def finish_log(self):
        job, result = self.job, self.result or self.store.writer.run(self.job)
        self.job = self.result = None
        self.store.core.lane.finish(job, result, self.store.now)

    @rule()
    def flush(self):
        if self.job is not None:
            self.finish_log()
        r = self.store.core.residency
        ticket = r.tickets.open({*r.dirty, *r.stranded})
        keys = {key for key in self.ready if self.store.core.index.find(key) in ticket.waiting}
        for _ in range(200):
            if not self.store.turn():
                break
        self.notice_evictions()
        on_ssd = {key for key in self.ready if self.residency(key) & Tier.SSD}
        if self.exact and not r.log_degraded and not r.stranded:
            assert ticket.settled
        if ticket.settled and not ticket.lost:
            assert keys & self.ready.keys() <= on_ssd
            self.durable |= on_ssd
        r.tickets.close(ticket)

    # what goes wrong

    @rule(number=st.integers(0, 99), at=st.integers(0, 2400))
    def corrupt_dram(self, number, at):
        in_dram = {k for k in self.ready if self.residency(k) & Tier.DRAM}
        key = self.choose(number, in_dram)
        if key is None or not self.matters(at):
            return
        elsewhere = bool(self.residency(key) & ~Tier.DRAM)
        self.store.flip_dram(key, at)
        assert self.store.read(self.namespace, self.ns, key) is None
        if not elsewhere:
            self.lose(key)

    @rule(number=st.integers(0, 99), at=st.integers(0, 2400))
    def corrupt_ssd(self, number, at):
        on_ssd = {k for k in self.ready if self.residency(k) == Tier.SSD}
        key = self.choose(number, on_ssd - self.in_flight())
        if key is None or not self.matters(at):
            return
        self.store.flip_ssd(key, at)
        assert self.store.read(self.namespace, self.ns, key) is None
        self.lose(key)
        self.notice_evictions()

    @rule(what=st.sampled_from(["pwrite", "fdatasync", "commit", None, None, None, None]))
    def disk(self, what):
        def before(op, path):
            if op == what:
                raise OSError(5, "Input/output error")

        self.store.disk.before = before if what else no_fault
        self.troubled |= what is not None

    # endings

    def let_go(self):
        for reservation in list(self.reserved):
            self.store.core.reservations.abort(reservation)
            self.drop_reservation(reservation)
        self.leases.clear()

    @rule()
    def restart(self):
        self.store.disk.before = no_fault
        if self.job is not None:
            self.finish_log()
        while self.loads:
            self.finish_load()
        for lease in self.leases:
            self.store.core.release(lease)
        self.let_go()
        for _ in range(5):
            self.store.clock.advance(60.0)
            for _ in range(200):
                if not self.store.turn():
                    break
        self.notice_evictions()
        written = {key for key in self.ready if self.residency(key) & Tier.SSD}
        assert not self.exact or written == self.ready.keys()
        self.store.close()
        self.store.open()
        self.ns = self.store.core.open_namespace(self.namespace)
        self.ready = {key: writer for key, writer in self.ready.items() if key in written}
        found = {k for k in self.parents if self.store_has(k)}
        assert self.ready.keys() <= found
        back = found - self.ready.keys()
        # frames whose commit failed are in the log; a restart may find what was dropped since
        assert not back or self.troubled
        for key in back:
            data = self.store.read(self.namespace, self.ns, key)
            (self.ready[key],) = [w for w in self.ever[key] if data == self.sections(key, w)]
        self.troubled = False
        self.durable = set(self.ready)
        self.unlinked = self.parents.keys() - self.ready.keys()

    @rule(seed=st.integers(0, 1 << 32))
    def power_loss(self, seed):
        self.let_go()
        self.job = self.result = None
        self.loads.clear()
        self.store.power_loss(Random(seed))
        self.ns = self.store.core.open_namespace(self.namespace)
        self.lost = set(self.parents)
        survivors = {}
        for key in self.parents:
            there = self.store_has(key)
            assert there or key not in self.durable, "a durable block is lost"
            data = self.store.read(self.namespace, self.ns, key) if there else None
            if data is None:
                assert key not in self.durable, "a durable block is damaged"
                continue
            (writer,) = [w for w in self.ever[key] if data == self.sections(key, w)]
            if key in self.durable:
                assert writer == self.ready[key]
            survivors[key] = writer
        self.ready = {k: w for k, w in survivors.items() if self.store_has(k)}
        self.durable &= self.ready.keys()
        self.unlinked = self.parents.keys() - self.ready.keys()

    @invariant()
    def the_books_agree(self):
        self.store.core.check_integrity()


TIGHT = {
    "dram.budget_bytes": 12 * 12288,
    "ssd.budget_bytes": "1MiB",
    "ssd.segment_bytes": "128KiB",
    "migration.bounce_bytes_max": 1 << 20,
}


class TightStore(StoreMachine):
    """12 blocks of DRAM, and a few dozen on SSD."""

    exact = False
    layout = BIG_LAYOUT
    policy = "lru"

    def config(self):
        return store_config(**TIGHT, **{"eviction.policy": self.policy})
