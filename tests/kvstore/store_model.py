"""What a store holds, as nothing but dictionaries, beside the hand-driven core."""

import gc
from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, initialize
from store_harness import HandDrivenStore, store_config

from kvstore.block import BlockPut, PutOutcome
from kvstore.index import READY
from kvstore.testing.blocks import TINY_LAYOUT, chain, payload, tiny_namespace

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


class StoreModel(RuleBasedStateMachine):
    """The store under test and what is to be in it; rules change both.

    `ready`: who wrote each block. `ever`: who ever did. `durable`: what no power loss may take.
    `lost`: names that the index keeps without a block, because something hangs below them.
    `unlinked`: lost ones that a restart knows by name alone. `exact`: whether the model knows every
    outcome, because the store has room for everything.
    """

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

    def drop_reservation(self, reservation):
        keys = self.reserved.pop(reservation).keys
        self.lost.update(key for key in keys if self.has_descendants(key))

    def matters(self, at: int) -> bool:
        """Whether a byte of a frame is covered: not the padding behind header and sections."""
        return at < 512 + self.layout.block_bytes

    def lose(self, key: bytes) -> None:
        self.gone(key)
        if self.has_descendants(key) or key in self.leased():
            self.lost.add(key)

    def teardown(self):
        """Give arena and disk back: the collector, which counts objects and neither bytes nor open
        files, would let those of many examples pile up."""
        if hasattr(self, "store"):
            self.store.dram.close()
            del self.store
            gc.collect()
