"""Blocks on their way in: reserve, write, commit. All sections of a block or nothing of it.

A draft becomes a reservation when every block of the call has its answer. A reserved block has a
RESERVED row, which other writers and readers meet as PENDING, and a slot of the arena. It becomes
READY at commit, if all its bytes came and were right and its parent is still there. However a
reservation ends, what did not become READY leaves nothing behind.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.block import PutOutcome, Tier
from kvstore.config import StoreConfig
from kvstore.errors import BlockOutOfOrder, InvalidRequest, MessageTooLarge, ReservationExpired
from kvstore.index import GHOST, NO_PARENT, READY, ROOT
from kvstore.lease import RightsTable
from kvstore.migration.demotion import Demotion
from kvstore.migration.residency import Residency
from kvstore.migration.tickets import Ticket
from kvstore.namespace import DIGEST_BYTES
from kvstore.store.namespaces import Namespaces
from kvstore.tiers.base import Slot


class Arrival(Enum):
    """How far a reserved block's bytes are."""

    AWAITED = 0
    COPYING = 1
    THERE = 2
    WRONG = 3


@dataclass(slots=True, eq=False)
class Incoming:
    """One reserved block. `place`: its index in the call. `reserved_wall_s`: its time of birth."""

    row: int
    key: bytes
    parent: bytes
    depth: int
    slot: Slot
    place: int
    reserved_wall_s: float
    arrival: Arrival = Arrival.AWAITED


@dataclass(slots=True, eq=False)
class Draft:
    """The blocks of one call, in its order. `outcomes` so far; `blocks`: the reserved ones;
    `refused`: keys that found no room, here or earlier in the same put."""

    number: int
    namespace_id: bytes
    keys: list[bytes]
    outcomes: list[PutOutcome] = field(default_factory=list)
    blocks: dict[bytes, Incoming] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)


class Reservations:
    """All reservations and drafts. `settled` gathers keys that stopped being RESERVED, for those
    who wait for them; the driver empties it."""

    def __init__(
        self,
        config: StoreConfig,
        namespaces: Namespaces,
        residency: Residency,
        demotion: Demotion,
        first_id: int,
    ) -> None:
        self._limits, self._namespaces = config.limits, namespaces
        self._write_back_bytes_max = config.migration.write_back_bytes_max
        self._residency, self._demotion = residency, demotion
        self._drafts: set[Draft] = set()
        self.settled: list[bytes] = []
        self.rights: RightsTable[Draft] = RightsTable(
            "reservation",
            ReservationExpired,
            config.lease.reservations_max,
            config.lease.reservation_ttl_s_default,
            config.lease.reservation_ttl_s_max,
            first_id,
        )

    # reserve

    def check(self, namespace_id: bytes, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Whether (key, parent) pairs can be asked for together. Raises `UnknownNamespace`,
        `BlockOutOfOrder`, `InvalidRequest` and `MessageTooLarge`."""
        number = self._namespaces.number(namespace_id)
        if len(blocks) > self._limits.keys_per_call_max:
            raise MessageTooLarge(
                f"{len(blocks)} blocks in one call pass limits.keys_per_call_max "
                f"({self._limits.keys_per_call_max}); ask in parts"
            )
        self._check_names(number, blocks)
        keys = [key for key, _ in blocks]
        parents = [parent for _, parent in blocks]
        if parents[1:] == keys[:-1] and len({*keys, *parents[:1]}) == len(keys) + 1:
            return  # one chain, as most calls have it
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        for i, (key, parent) in enumerate(blocks):
            if first.get(parent, -1) >= i:
                raise BlockOutOfOrder(
                    f"block {i} ({key.hex()}) comes before its parent, block {first[parent]}"
                )

    def begin(self, namespace_id: bytes, keys: Sequence[bytes], refused: set[bytes]) -> Draft:
        """A draft for blocks that passed `check`. Raises `Overloaded`."""
        self.rights.check_room()
        draft = Draft(
            self._namespaces.number(namespace_id), namespace_id, list(keys), refused=refused
        )
        self._drafts.add(draft)
        return draft

    def _check_names(self, number: int, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        for key, parent in blocks:
            if len(key) != DIGEST_BYTES or len(parent) != DIGEST_BYTES:
                raise InvalidRequest(
                    f"keys have {DIGEST_BYTES} B, not {len(key)} (block) and {len(parent)} (parent)"
                )
        index = self._residency.index
        for key, _ in blocks:
            row = index.find(key)
            if row is not None and index.namespace[row] != number:
                raise InvalidRequest(f"key {key.hex()} belongs to another namespace")

    def reserve_next(self, draft: Draft, parent: bytes, wall_s: float) -> bool:
        """Answer the draft's next block; False, with nothing changed, where it has no room now."""
        key = draft.keys[len(draft.outcomes)]
        above = self._parent_row(draft, parent)
        outcome = self._known(draft, key, parent, above)
        if outcome is None:
            assert above is not None
            incoming = self._insert(draft, key, parent, above, wall_s)
            if incoming is None:
                return False
            draft.blocks[key] = incoming
            outcome = PutOutcome.STORED
        draft.outcomes.append(outcome)
        return True

    def refuse_next(self, draft: Draft) -> None:
        """The next block gets no room."""
        draft.refused.add(draft.keys[len(draft.outcomes)])
        draft.outcomes.append(PutOutcome.NO_SPACE)

    def _known(
        self, draft: Draft, key: bytes, parent: bytes, above: int | None
    ) -> PutOutcome | None:
        """The outcome where the index alone decides it."""
        index = self._residency.index
        row = index.find(key)
        if row is not None and index.state[row] != GHOST:
            return PutOutcome.PRESENT if index.state[row] == READY else PutOutcome.PENDING
        if above is None:
            if parent not in draft.refused:
                return PutOutcome.PARENT_MISSING
            draft.refused.add(key)
            return PutOutcome.NO_SPACE
        if row is not None and (
            index.parent[row] not in (above, NO_PARENT)
            or index.depth[row] != self._depth_below(above)
        ):
            return PutOutcome.PARENT_MISSING
        return None

    def _parent_row(self, draft: Draft, parent: bytes) -> int | None:
        if parent == draft.namespace_id:
            return ROOT
        reserved = draft.blocks.get(parent)
        if reserved is not None:
            return reserved.row
        index = self._residency.index
        row = index.find(parent)
        if row is None or index.state[row] == GHOST or index.namespace[row] != draft.number:
            return None
        return row

    def _depth_below(self, row: int) -> int:
        return 0 if row == ROOT else self._residency.index.depth[row] + 1

    def _insert(
        self, draft: Draft, key: bytes, parent: bytes, above: int, wall_s: float
    ) -> Incoming | None:
        r = self._residency
        size = self._namespaces.frame_bytes(draft.number)
        waiting = r.dirty_bytes and not r.log_stalled
        if waiting and r.dirty_bytes + size > self._write_back_bytes_max:
            return None
        # held while room is made, or the parent might be what goes
        held = [above] if above >= 0 else []
        r.index.pin(held)
        try:
            if not self._demotion.row_room(self._limits.index_blocks_max, wall_s):
                return None
            slot = self._demotion.slot(size)
            if slot is None:
                return None
            depth = self._depth_below(above)
            row = r.index.insert(key, draft.number, above, depth, wall_s)
        finally:
            r.index.unpin(held)
        place = len(draft.outcomes)
        return Incoming(row, key, parent, depth, slot, place, wall_s)

    def may_get_room(self) -> bool:
        """Whether waiting can help a block that had no room: something is being written, read,
        or may be given up."""
        r = self._residency
        others = len(self._drafts) + len(self.rights) > 1
        return r.log_may_write or bool(r.slots_in_use) or others

    def grant(self, draft: Draft, now_s: float, ttl_s: float | None) -> tuple[int, float]:
        """The draft's blocks are awaited from now on: reservation id and lifetime; id 0 where
        nothing was reserved."""
        self._drafts.discard(draft)
        ttl_s = self.rights.clamp_ttl(ttl_s)
        metrics = self._residency.metrics
        counts = Counter(draft.outcomes)
        # those to be stored are counted when they are
        del counts[PutOutcome.STORED]
        self._count(counts)
        if not draft.blocks:
            return 0, ttl_s
        try:
            right, ttl_s = self.rights.grant(draft, now_s, ttl_s)
        except BaseException:
            self.abandon(draft)
            raise
        metrics.add("reservations_granted")
        return right.id, ttl_s

    def abandon(self, draft: Draft) -> None:
        """Give up all that the draft or reservation still holds."""
        self._drafts.discard(draft)
        # children first, so that no ghost is left of a parent
        for incoming in reversed(draft.blocks.values()):
            self._give_up(incoming)
        draft.blocks.clear()

    def _give_up(self, incoming: Incoming) -> None:
        self._residency.free_slot(incoming.slot)
        self._residency.forget(incoming.row)
        self.settled.append(incoming.key)

    # write

    def start_copy(self, reservation_id: int, key: bytes, now_s: float) -> Incoming:
        """A block's bytes are about to be copied into its slot. Raises `ReservationExpired`, and
        `InvalidRequest` where the key is not reserved here or was written already."""
        draft = self.rights.get(reservation_id, now_s).held
        incoming = draft.blocks.get(key)
        if incoming is None:
            raise InvalidRequest(f"key {key.hex()} is not part of reservation {reservation_id}")
        if incoming.arrival is not Arrival.AWAITED:
            raise InvalidRequest(f"block {key.hex()} was written already; commit or abort")
        incoming.arrival = Arrival.COPYING
        self._residency.use(incoming.slot)
        return incoming

    def start_copies(self, draft: Draft) -> list[Incoming]:
        """`start_copy` for all blocks of a draft that nobody else writes to."""
        blocks = list(draft.blocks.values())
        for incoming in blocks:
            incoming.arrival = Arrival.COPYING
        self._residency.use_all([incoming.slot.page for incoming in blocks])
        return blocks

    def end_copies(self, blocks: Sequence[Incoming], right: Sequence[bool]) -> None:
        """The copies are over. `right`: the bytes are what their checksums say."""
        for incoming, good in zip(blocks, right, strict=True):
            incoming.arrival = Arrival.THERE if good else Arrival.WRONG
        self._residency.end_use_all([incoming.slot.page for incoming in blocks])

    # commit

    def commit(self, reservation_id: int, now_s: float) -> Draft:
        """Make what is whole READY and drop the rest; the draft then has the final outcomes."""
        draft = self.rights.get(reservation_id, now_s).held
        self.rights.end(reservation_id)
        r, stored, counts = self._residency, [], Counter[PutOutcome]()
        for incoming in draft.blocks.values():
            outcome = self._verdict(incoming)
            draft.outcomes[incoming.place] = outcome
            counts[outcome] += 1
            if outcome is PutOutcome.STORED:
                r.index.make_ready(incoming.row)
                self.settled.append(incoming.key)
                stored.append(incoming)
            else:
                self._give_up(incoming)
        draft.blocks.clear()
        self._count(counts)
        layout = self._namespaces.layout(draft.number)
        r.metrics.add("written_payload_bytes", len(stored) * layout.block_bytes)
        rows = [incoming.row for incoming in stored]
        r.policies.expected(rows)
        r.enter_dram_all(rows, [incoming.slot for incoming in stored])
        r.policies.arrived(rows, Tier.DRAM)
        return draft

    def _count(self, outcomes: Mapping[PutOutcome, int]) -> None:
        for outcome, blocks in outcomes.items():
            self._residency.metrics.add(f"put_{outcome.name.lower()}_blocks", blocks)

    def _verdict(self, incoming: Incoming) -> PutOutcome:
        index = self._residency.index
        if incoming.arrival is not Arrival.THERE:
            return PutOutcome.CORRUPT
        parent = index.parent[incoming.row]
        if parent >= 0 and index.state[parent] == GHOST:
            return PutOutcome.PARENT_MISSING
        return PutOutcome.STORED

    def abort(self, reservation_id: int) -> None:
        """Give a reservation up; nothing where it is over already."""
        right = self.rights.end(reservation_id)
        if right is not None:
            self.abandon(right.held)

    def expire(self, now_s: float) -> None:
        """Abort what has lapsed."""
        for right in self.rights.expire(now_s):
            self._residency.metrics.add("reservations_expired")
            self.abandon(right.held)

    def ticket(self, draft: Draft) -> Ticket:
        """A ticket for the call's blocks that are stored, by it or before, which are to become
        durable. MUST be closed."""
        index, r = self._residency.index, self._residency
        rows, lost = set(), 0
        for key, outcome in zip(draft.keys, draft.outcomes, strict=True):
            if outcome not in (PutOutcome.STORED, PutOutcome.PRESENT):
                continue
            row = index.find(key)
            if row is None or index.state[row] != READY:
                lost += 1
            else:
                rows.add(row)
        ticket = r.ticket(r.wanted_durable(rows))
        ticket.lost = lost
        return ticket

    # inspection

    def _all(self) -> Iterator[Draft]:
        yield from self._drafts
        yield from (right.held for right in self.rights)

    def slots(self) -> list[Slot]:
        """Slots of all reserved blocks."""
        return [block.slot for draft in self._all() for block in draft.blocks.values()]

    def rows(self) -> list[int]:
        """Rows of all reserved blocks."""
        return [block.row for draft in self._all() for block in draft.blocks.values()]
