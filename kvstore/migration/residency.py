"""Which tiers hold a block, and the moves that keep index, arena, log and policies in step.

Every change of residency is one method here, so that the books of all of them agree after each.
Rules that hold throughout:

* With a log, every READY block is on SSD or *dirty*: in DRAM only, waiting to be written. A dirty
  block leaves DRAM only while the log can't take it (`log_stalled`): the disk fails, or nothing on
  it may go. It is lost then, which is a miss; a full or failing disk must not close DRAM.
* A block leaves its last tier only without children and pins, so that nothing unreachable is kept
  while something reachable goes. A policy victim of the SSD leaves DRAM too: the SSD is the
  store's capacity, DRAM its front.
* A slot is given back when the last user of its bytes is done, however long ago its block left.
* A corrupt copy leaves its tier alone and at once, whoever holds the block. Where it was the last
  copy, the block is a ghost until its key is put again; what hangs below it can't be reached
  meanwhile and is first to go.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.block import Tier
from kvstore.eviction import POLICIES, EvictionPolicy
from kvstore.index import READY, BlockIndex
from kvstore.metrics import Metrics
from kvstore.migration.tickets import Tickets
from kvstore.tiers.base import PAGE_BYTES, Location, LogTier, Slot, SlotTier

_DRAM, _SSD = int(Tier.DRAM), int(Tier.SSD)
_log = logging.getLogger(__name__)


class Residency:
    """See the module. `ssd` is None in a store of DRAM alone. `changes` grows whenever something
    may have become evictable or free: who was told "no room" need not ask again before that.
    `log_degraded`, `log_stuck_at` (a value of `changes`): set by the log's lane."""

    def __init__(
        self,
        index: BlockIndex,
        dram: SlotTier,
        ssd: LogTier | None,
        policy: str,
        metrics: Metrics,
    ) -> None:
        self.index, self.dram, self.ssd, self.metrics = index, dram, ssd, metrics
        self.dram_policy: EvictionPolicy = POLICIES[policy]()
        self.ssd_policy: EvictionPolicy = POLICIES[policy]()
        self.dirty: dict[int, None] = {}
        self.dirty_bytes = 0
        self.removes: dict[bytes, None] = {}
        self.tickets = Tickets()
        self.log_degraded = False
        self.log_stuck_at: int | None = None
        self.changes = 0
        self._users: dict[int, int] = {}
        self._orphaned: dict[int, Slot] = {}

    @property
    def log_stalled(self) -> bool:
        """Whether dirty blocks may have to go unwritten: there is no log, the disk fails, or
        nothing on it could go when it was last tried."""
        return self.ssd is None or self.log_degraded or self.log_stuck_at is not None

    @property
    def log_may_write(self) -> bool:
        """Whether waiting for write-back can help."""
        stuck = self.log_stuck_at == self.changes
        return bool(self.dirty) and not self.log_degraded and not stuck

    # slots and their users

    def use(self, slot: Slot) -> None:
        """Somebody touches the slot's bytes until `end_use`."""
        self._users[slot.page] = self._users.get(slot.page, 0) + 1

    def end_use(self, slot: Slot) -> None:
        """One user fewer; an orphaned slot goes back with the last."""
        left = self._users[slot.page] - 1
        if left:
            self._users[slot.page] = left
            return
        del self._users[slot.page]
        self.changes += 1
        if self._orphaned.pop(slot.page, None):
            self.dram.free(slot)

    def use_all(self, pages: Sequence[int]) -> None:
        """`use`, for slots named by their pages."""
        users = self._users
        for page in pages:
            users[page] = users.get(page, 0) + 1

    def end_use_all(self, pages: Sequence[int]) -> None:
        """`end_use`, for slots named by their pages."""
        users, orphaned = self._users, self._orphaned
        for page in pages:
            left = users[page] - 1
            if left:
                users[page] = left
                continue
            del users[page]
            slot = orphaned.pop(page, None)
            if slot is not None:
                self.dram.free(slot)
        self.changes += bool(pages)

    def free_slot(self, slot: Slot) -> None:
        """Nobody owns the slot any more: free it, now or after its last user."""
        self.changes += 1
        if slot.page in self._users:
            self._orphaned[slot.page] = slot
        else:
            self.dram.free(slot)

    @property
    def slots_in_use(self) -> int:
        """Slots whose bytes somebody touches now."""
        return len(self._users)

    def slot_of(self, row: int) -> Slot:
        """The slot of a row that DRAM holds."""
        return self.dram.slot_at(self.index.slot[row])

    def location_of(self, row: int) -> Location:
        """The place of a row that the SSD holds."""
        return Location(self.index.segment[row], self.index.page[row] * PAGE_BYTES)

    # moves

    def enter_dram(self, row: int, slot: Slot) -> None:
        """A READY row's bytes now lie in `slot`; dirty where no other tier has them."""
        index = self.index
        assert index.state[row] == READY
        assert not index.tiers[row] & _DRAM
        index.slot[row] = slot.page
        index.stored_bytes[row] = slot.length
        index.tiers[row] |= _DRAM
        self.dram_policy.add(row)
        if self.ssd is not None and not index.tiers[row] & _SSD:
            self.dirty[row] = None
            self.dirty_bytes += slot.length

    def leave_dram(self, row: int) -> None:
        """The row's bytes leave DRAM; the caller knows that another tier holds them, or forgets
        the row after."""
        index = self.index
        slot = self.slot_of(row)
        index.tiers[row] &= ~_DRAM
        self.dram_policy.remove(row)
        self._no_longer_dirty(row, slot.length)
        self.free_slot(slot)

    def enter_ssd(self, row: int, location: Location, length: int) -> None:
        """The row's frame lies durable at `location`; a former place of it is dead. Rows that are
        new there MUST be touched after, so that none is warmer than its parent."""
        index = self.index
        if index.tiers[row] & _SSD:
            self._log_tier.mark_dead(self.location_of(row), index.stored_bytes[row])
        else:
            index.tiers[row] |= _SSD
            self.ssd_policy.add(row)
        index.segment[row] = location.segment
        index.page[row] = location.offset // PAGE_BYTES
        index.stored_bytes[row] = length
        self._no_longer_dirty(row, length)
        self.tickets.durable(row)
        self.changes += 1

    def leave_ssd(self, row: int) -> None:
        """The row's frame is no longer wanted; its index entry goes with the log's next job."""
        index = self.index
        index.tiers[row] &= ~_SSD
        self.ssd_policy.remove(row)
        self._log_tier.mark_dead(self.location_of(row), index.stored_bytes[row])
        self.removes[index.keys[row]] = None
        self.changes += 1

    def drop(self, row: int) -> None:
        """The block leaves every tier and the index (a ghost stays where it has children)."""
        tiers = self.index.tiers[row]
        if tiers & _SSD:
            self.leave_ssd(row)
        if tiers & _DRAM:
            self.leave_dram(row)
        self.forget(row)

    def forget(self, row: int) -> None:
        """The row is on no tier: take it out of the index, and look at its parent again."""
        parent = self.index.parent[row]
        self.tickets.lost(row)
        self.index.forget(row)
        self.changes += 1
        if parent >= 0 and not self.index.children[parent]:
            self.dram_policy.reconsider(parent)
            self.ssd_policy.reconsider(parent)

    def quarantine(self, row: int, tier: Tier, why: object) -> None:
        """The copy on `tier` is not what was accepted: it leaves, counted and logged."""
        name = "dram" if tier is Tier.DRAM else "ssd"
        self.metrics.add(f"corrupt_{name}_blocks")
        _log.warning("quarantined block %s on %s: %s", self.index.keys[row].hex(), name, why)
        self.lose(row, tier)

    def lose(self, row: int, tier: Tier) -> None:
        """The copy on `tier` is of no use any more. Another copy serves on; without one the block
        is gone, children or not."""
        index = self.index
        if tier is Tier.DRAM:
            self.leave_dram(row)
        else:
            self.leave_ssd(row)
            if index.tiers[row] & _DRAM:
                self.dirty[row] = None
                self.dirty_bytes += self.slot_of(row).length
        if not index.tiers[row]:
            unreachable: Sequence[int] = ()
            if index.children[row]:
                unreachable = index.descendants(row).tolist()
            self.forget(row)
            self.dram_policy.cool(unreachable)
            self.ssd_policy.cool(unreachable)

    def touch(self, rows: Sequence[int]) -> None:
        """Rows were used, and with each all blocks before it."""
        parent = self.index.parent
        if rows and rows[0] >= 0 > parent[rows[0]]:
            # the usual case: a chain from its root on
            chain = np.asarray(rows, np.int64)
            if (self.index.view("parent")[chain[1:]] == chain[:-1]).all():
                self.dram_policy.touch(rows)
                if self.ssd is not None:
                    self.ssd_policy.touch(rows)
                return
        seen: set[int] = set()
        order: list[int] = []
        for row in reversed(rows):
            while row >= 0 and row not in seen:
                seen.add(row)
                order.append(row)
                row = parent[row]
        # deepest first so far, each chain in one piece
        order.sort(key=self.index.depth.__getitem__)
        self.dram_policy.touch(order)
        self.ssd_policy.touch(order)

    # who may go

    def may_leave_dram(self, row: int) -> bool:
        """Whether the policy's choice for DRAM can go now."""
        index = self.index
        if index.slot[row] in self._users:
            return False
        return bool(index.tiers[row] & _SSD) or (self.log_stalled and self._is_free(row))

    def may_leave_store(self, row: int) -> bool:
        """Whether a block can leave its last tier now."""
        index = self.index
        in_use = index.tiers[row] & _DRAM and index.slot[row] in self._users
        return not in_use and self._is_free(row)

    def _is_free(self, row: int) -> bool:
        return not self.index.children[row] and not self.index.pins[row]

    def demote(self, row: int) -> None:
        """A DRAM victim goes: to the SSD's copy alone, or for good."""
        if self.index.tiers[row] & _SSD:
            self.leave_dram(row)
            self.metrics.add("demoted_blocks")
        else:
            self.drop(row)
            self.metrics.add("evicted_dram_blocks")

    # pins

    def pin(self, rows: Sequence[int]) -> None:
        """Keep rows in the store."""
        self.index.pin(rows)

    def unpin(self, rows: Sequence[int]) -> None:
        """Undo `pin`."""
        self.index.unpin(rows)
        self.changes += 1

    # the rest

    @property
    def _log_tier(self) -> LogTier:
        assert self.ssd is not None, "a store of DRAM alone has no log"
        return self.ssd

    def _no_longer_dirty(self, row: int, length: int) -> None:
        if row in self.dirty:
            del self.dirty[row]
            self.dirty_bytes -= length

    def check_integrity(self, other_slots: Iterable[Slot] = ()) -> None:
        """Raise `AssertionError` where index, tiers and policies disagree. `other_slots`: handed
        out by the arena and held by no READY row (reservations, loads under way)."""
        index = self.index
        in_dram, on_ssd = index.rows_on(_DRAM).tolist(), index.rows_on(_SSD).tolist()
        assert len(in_dram) == len(self.dram_policy), "DRAM's policy has other rows than the index"
        assert all(row in self.dram_policy for row in in_dram), "DRAM's policy lacks a row"
        assert len(on_ssd) == len(self.ssd_policy), "SSD's policy has other rows than the index"
        assert all(row in self.ssd_policy for row in on_ssd), "SSD's policy lacks a row"
        self.dram_policy.check_integrity()
        self.ssd_policy.check_integrity()
        self._check_slots(in_dram, list(other_slots))
        self._check_log(in_dram, on_ssd)
        self.dram.check_integrity()

    def _check_slots(self, in_dram: Sequence[int], others: Sequence[Slot]) -> None:
        slots = [self.slot_of(row) for row in in_dram]
        slots += [*others, *self._orphaned.values()]
        assert len({s.page for s in slots}) == len(slots), "two owners share a slot"
        held = sum(s.length for s in slots)
        used = self.dram.used_bytes
        assert held == used, f"slots of {held} B have owners, the arena gave out {used} B"
        assert self._users.keys() <= {s.page for s in slots}, "a user reads a slot that was freed"
        assert used <= self.dram.budget_bytes, "DRAM is over its budget"

    def _check_log(self, in_dram: Sequence[int], on_ssd: Sequence[int]) -> None:
        index = self.index
        if self.ssd is None:
            assert not on_ssd
            assert not self.dirty, "nothing can be dirty without a log"
            return
        dirty = {row for row in in_dram if not index.tiers[row] & _SSD}
        assert dirty == self.dirty.keys(), "the queue of dirty blocks is not what DRAM alone holds"
        total = sum(self.slot_of(row).length for row in dirty)
        assert total == self.dirty_bytes, f"{total} B are dirty, {self.dirty_bytes} B are counted"
        places = {self.location_of(row) for row in on_ssd}
        assert len(places) == len(on_ssd), "two blocks share a place in the log"
        for key in self.removes:
            row = index.find(key)
            assert row is None or not index.tiers[row] & _SSD, "a wanted block is to be removed"
