"""The core against a model that is nothing but dictionaries, with crashes among the rules.

`RoomyStore` never runs out of anything, so the model knows every outcome exactly. `TightStore` has
room for a few dozen blocks, so blocks leave as its policy likes, each policy in turn; the model
then holds the store to what it promises: pinned blocks stay, no block stays without its parent,
bytes are right, and what was made durable is lost to eviction only.
"""

from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_harness import HandDrivenStore, store_config

from kvstore.block import BlockPut, Outcome, PutOutcome, Tier
from kvstore.eviction import POLICIES
from kvstore.index import READY
from kvstore.namespace import Layout
from kvstore.testing.blocks import TINY_LAYOUT, chain, payload, tiny_namespace
from kvstore.testing.disk import no_fault

BIG_LAYOUT = Layout(TINY_LAYOUT.sections, 16)
paths = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=9)
writers = st.integers(0, 2)
STORED = PutOutcome.STORED


@dataclass
class Reserved:
    """A reservation in the model. `written`: key → whether its bytes were right."""

    blocks: list[BlockPut]
    outcomes: list[PutOutcome]
    writer: int
    expires_s: float
    written: dict[bytes, bool] = field(default_factory=dict)

    @property
    def keys(self) -> list[bytes]:
        return [b.key for b, o in zip(self.blocks, self.outcomes, strict=True) if o is STORED]


class StoreMachine(RuleBasedStateMachine):
    exact = True
    layout = TINY_LAYOUT

    def config(self):
        return store_config(**{"dram.budget_bytes": "16MiB"})

    @initialize()
    def start(self):
        self.store = HandDrivenStore(self.config())
        self.namespace = tiny_namespace(layout=self.layout)
        self.ns = self.store.core.open_namespace(self.namespace)
        self.parents: dict[bytes, bytes] = {}
        self.ready: dict[bytes, int] = {}
        self.ever: dict[bytes, set[int]] = {}
        self.durable: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.unlinked: set[bytes] = set()
        self.reserved: dict[int, Reserved] = {}
        self.leases: dict[int, tuple[list[bytes], float]] = {}
        self.job = None
        self.result = None
        self.loads = []
        self.troubled = False

    # the model

    def chain(self, path, writer=0) -> list[BlockPut]:
        blocks = chain(self.ns, self.layout, path, writer)
        self.parents.update((b.key, b.parent) for b in blocks)
        return blocks

    def pending(self) -> set[bytes]:
        return {key for r in self.reserved.values() for key in r.keys}

    def leased(self) -> set[bytes]:
        return {key for keys, _ in self.leases.values() for key in keys}

    def has_descendants(self, key: bytes) -> bool:
        """Whether the store knows of one. What hangs below a lost block does not lead further up
        after a restart: the index then knows the lost one by name alone."""
        held = set(self.ready) | self.pending() | self.leased()
        return any(key in self.known_ancestors(other) for other in held)

    def known_ancestors(self, key: bytes) -> list[bytes]:
        above = []
        for ancestor in self.ancestors(key):
            above.append(ancestor)
            if ancestor in self.unlinked:
                break
        return above

    def ancestors(self, key: bytes) -> list[bytes]:
        above = []
        while (key := self.parents[key]) != self.ns:
            above.append(key)
        return above

    def in_flight(self) -> set[bytes]:
        keys = {load.key for load in self.loads}
        return keys | ({item.key for item in self.job.appends} if self.job else set())

    def sections(self, key: bytes, writer: int) -> list[bytes]:
        return payload(self.layout, key, writer)

    def gone(self, key: bytes) -> None:
        self.ready.pop(key, None)
        self.durable.discard(key)

    def notice_evictions(self) -> None:
        """What the policy threw out is gone from the model too, if it was free to go."""
        if self.exact:
            return
        missing = [key for key in self.ready if not self.store_has(key)]
        for key in missing:
            assert key not in self.leased(), "a leased block was evicted"
            self.gone(key)
        for key in self.ready:
            for above in self.known_ancestors(key):
                there = above in self.ready or above in self.pending() or above in self.lost
                assert there, "a block stayed behind without its parent"

    def store_has(self, key: bytes) -> bool:
        row = self.store.core.index.find(key)
        return row is not None and self.store.core.index.state[row] == READY

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

    def expected_reserve(self, blocks: list[BlockPut]) -> list[PutOutcome]:
        outcomes, mine, pending = [], set(), self.pending()
        for block in blocks:
            known = block.parent == self.ns or block.parent in self.ready
            if block.key in self.ready:
                outcomes.append(PutOutcome.PRESENT)
            elif block.key in pending | mine:
                outcomes.append(PutOutcome.PENDING)
            elif known or block.parent in pending | mine:
                outcomes.append(STORED)
                mine.add(block.key)
            else:
                outcomes.append(PutOutcome.PARENT_MISSING)
        return outcomes

    def choose(self, number: int, of):
        return sorted(of)[number % len(of)] if of else None

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

    def drop_reservation(self, reservation):
        keys = self.reserved.pop(reservation).keys
        self.lost.update(key for key in keys if self.has_descendants(key))

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

    def matters(self, at: int) -> bool:
        """Whether a byte of a frame is covered: not the padding behind header and sections."""
        return at < 512 + self.layout.block_bytes

    def lose(self, key: bytes) -> None:
        self.gone(key)
        if self.has_descendants(key) or key in self.leased():
            self.lost.add(key)

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


class TightStore(StoreMachine):
    exact = False
    layout = BIG_LAYOUT
    policy = "lru"

    def config(self):
        return store_config(
            **{
                "eviction.policy": self.policy,
                "dram.budget_bytes": 12 * 12288,
                "ssd.budget_bytes": "1MiB",
                "ssd.segment_bytes": "128KiB",
                "migration.bounce_bytes_max": 1 << 20,
            }
        )


EXAMPLES = 2 * settings.default.max_examples // 5

TestRoomyStore = StoreMachine.TestCase
TestRoomyStore.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)


def tight_under(policy: str) -> type:
    """The test of a store without room, under one policy."""
    machine = type(f"TightStoreUnder{policy}", (TightStore,), {"policy": policy})
    test = machine.TestCase
    test.settings = settings(max_examples=EXAMPLES // 3, stateful_step_count=60)
    return test


TestTightStoreUnderArc = tight_under("arc")
TestTightStoreUnderGittins = tight_under("gittins")
TestTightStoreUnderLRU = tight_under("lru")
TestTightStoreUnderS3Fifo = tight_under("s3_fifo")
TestTightStoreUnderSieve = tight_under("sieve")
TestTightStoreUnderWTinyLfu = tight_under("w_tinylfu")


def test_the_machine_runs_under_every_policy():
    tests = [test for name, test in globals().items() if name.startswith("TestTightStoreUnder")]
    assert len(tests) == len(POLICIES)
