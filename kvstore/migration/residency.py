"""Which tiers hold a block, and the moves that keep index, arena, log and policies in step.

Every change of residency is one method here, so that the books of all of them agree after each.
Rules that hold throughout:

* With a log, every READY block is on SSD, *dirty* (in DRAM only, waiting to be written) or
  *declined* (in DRAM only: the SSD is full of blocks that its policy holds for worth more). A dirty
  block leaves DRAM only while the log can't take it (`log_stalled`): the disk fails, or nothing on
  it may go. It is lost then, which is a miss; a full or failing disk must not close DRAM. A
  declined block may leave DRAM like any other, and is lost; when it is used again, or its
  durability is asked for, it is dirty again.
* A block leaves its last tier only without children and pins, so that nothing unreachable is kept
  while something reachable goes. A policy victim of the SSD leaves DRAM and HBM too: the SSD is the
  store's capacity, they are its front.
* A block may be in any set of tiers. In HBM alone with a log, it is *stranded*: not on SSD, and not
  where it could be written from. It came so by the loss of its other copies, or left DRAM while
  the log could not take it; it is copied back to DRAM as soon as the log takes blocks again.
* A slot is given back when the last user of its bytes is done, however long ago its block left.
* A corrupt copy leaves its tier alone and at once, whoever holds the block. Where it was the last
  copy, the block is a ghost until its key is put again; what hangs below it can't be reached
  meanwhile and is first to go.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.block import Tier
from kvstore.config import EvictionConfig
from kvstore.index import READY, BlockIndex
from kvstore.metrics import Metrics
from kvstore.migration.policies import TierPolicies
from kvstore.migration.slot_users import SlotUsers
from kvstore.migration.tickets import Ticket, Tickets
from kvstore.tiers.base import PAGE_BYTES, Location, LogTier, PoolTier, Slot, SlotTier

_HBM, _DRAM, _SSD = int(Tier.HBM), int(Tier.DRAM), int(Tier.SSD)
_log = logging.getLogger(__name__)


class Residency:
    """See the module. `ssd` and `hbm` are None in a store without them. `changes` grows whenever
    something may have become evictable or free: who was told "no room" need not ask again before
    that. `log_degraded`, `log_stuck_at` (a value of `changes`), `log_refuses` (stuck, and only the
    age of what the SSD holds is the reason): set by the log's lane. `refused`: dirty rows that the
    SSD did not take for that reason; they stay in the queue."""

    def __init__(
        self,
        index: BlockIndex,
        dram: SlotTier,
        ssd: LogTier | None,
        eviction: EvictionConfig,
        metrics: Metrics,
        now_s: Callable[[], float],
        hbm: PoolTier | None = None,
    ) -> None:
        self.index, self.dram, self.ssd, self.metrics = index, dram, ssd, metrics
        self.hbm = hbm
        budgets = {
            Tier.HBM: hbm.budget_bytes if hbm else 0,
            Tier.DRAM: dram.budget_bytes,
            Tier.SSD: ssd.budget_bytes if ssd else 0,
        }
        self.policies = TierPolicies(index, eviction, budgets, now_s)
        self.hbm_policy, self.dram_policy, self.ssd_policy = self.policies.of.values()
        self.dirty: dict[int, None] = {}
        self.dirty_bytes = 0
        self.stranded: dict[int, None] = {}
        self.removes: dict[bytes, None] = {}
        self.tickets = Tickets()
        self.log_degraded = False
        self.log_stuck_at: int | None = None
        self.log_refuses = False
        self.refused: set[int] = set()
        self.declined: dict[int, None] = {}
        self.changes = 0
        self.dram_users = SlotUsers(dram, self._changed)
        self.hbm_users = SlotUsers(hbm or dram, self._changed)

    def _changed(self) -> None:
        self.changes += 1

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
        """Somebody touches the bytes of a slot of DRAM until `end_use`."""
        self.dram_users.use(slot)

    def end_use(self, slot: Slot) -> None:
        """One user fewer; an orphaned slot goes back with the last."""
        self.dram_users.end_use(slot)

    def use_all(self, pages: Sequence[int]) -> None:
        """`use`, for slots named by their pages."""
        self.dram_users.use_all(pages)

    def end_use_all(self, pages: Sequence[int]) -> None:
        """`end_use`, for slots named by their pages."""
        self.dram_users.end_use_all(pages)

    def free_slot(self, slot: Slot) -> None:
        """Nobody owns the slot of DRAM any more: free it, now or after its last user."""
        self.dram_users.free(slot)

    @property
    def slots_in_use(self) -> int:
        """Slots of DRAM whose bytes somebody touches now."""
        return len(self.dram_users)

    def slot_of(self, row: int) -> Slot:
        """The slot of a row that DRAM holds."""
        return self.dram.slot_at(self.index.slot[row])

    def hbm_slot_of(self, row: int) -> Slot:
        """The slot of a row that HBM holds."""
        return self._pool_tier.slot_at(self.index.hbm_slot[row])

    def location_of(self, row: int) -> Location:
        """The place of a row that the SSD holds."""
        return Location(self.index.segment[row], self.index.page[row] * PAGE_BYTES)

    # moves

    def enter_dram(self, row: int, slot: Slot) -> None:
        """A READY row's bytes now lie in `slot`; dirty where no other tier has them. It MUST be
        told as arrived after (`policies.arrived`)."""
        self.enter_dram_all((row,), (slot,))

    def enter_dram_all(self, rows: Sequence[int], slots: Sequence[Slot]) -> None:
        """`enter_dram` for rows in the order in which they were foreseen."""
        index = self.index
        state, tiers = index.state, index.tiers
        for row, slot in zip(rows, slots, strict=True):
            assert state[row] == READY
            assert not tiers[row] & _DRAM
            index.slot[row] = slot.page
            index.stored_bytes[row] = slot.length
            tiers[row] |= _DRAM
            self.stranded.pop(row, None)
            if self.ssd is not None and not tiers[row] & _SSD:
                self.dirty[row] = None
                self.dirty_bytes += slot.length
        if rows:
            self.policies.frame_seen(slots[-1].length)
            self.dram_policy.add_all(rows)

    def leave_dram(self, row: int) -> None:
        """The row's bytes leave DRAM; the caller knows that another tier holds them, or forgets
        the row after."""
        index = self.index
        slot = self.slot_of(row)
        index.tiers[row] &= ~_DRAM
        self.dram_policy.remove(row)
        self._no_longer_dirty(row, slot.length)
        self._note_stranded(row)
        self.free_slot(slot)

    def enter_hbm(self, row: int, slot: Slot) -> None:
        """A READY row's bytes now lie in `slot` too. It MUST be told as arrived after
        (`policies.arrived`)."""
        index = self.index
        assert index.state[row] == READY
        assert not index.tiers[row] & _HBM
        index.hbm_slot[row] = slot.page
        index.tiers[row] |= _HBM
        self.hbm_policy.add(row)

    def leave_hbm(self, row: int) -> None:
        """The row's bytes leave HBM; the caller knows that another tier holds them, or forgets the
        row after."""
        slot = self.hbm_slot_of(row)
        self.index.tiers[row] &= ~_HBM
        self.hbm_policy.remove(row)
        self.stranded.pop(row, None)
        self.hbm_users.free(slot)

    def _note_stranded(self, row: int) -> None:
        if self.ssd is not None and self.index.tiers[row] == _HBM:
            self.stranded[row] = None

    def enter_ssd(self, row: int, location: Location, length: int) -> None:
        """The row's frame lies durable at `location`; a former place of it is dead. Rows that are
        new there MUST be told as arrived after (`policies.arrived`)."""
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
        self._note_stranded(row)
        self.changes += 1

    def drop(self, row: int) -> None:
        """The block leaves every tier and the index (a ghost stays where it has children)."""
        tiers = self.index.tiers[row]
        if tiers & _HBM:
            self.leave_hbm(row)
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
            for policy in self.policies.of.values():
                policy.reconsider(parent)

    def quarantine(self, row: int, tier: Tier, why: object) -> None:
        """The copy on `tier` is not what was accepted: it leaves, counted and logged."""
        name = str(tier.name).lower()
        self.metrics.add(f"corrupt_{name}_blocks")
        _log.warning("quarantined block %s on %s: %s", self.index.keys[row].hex(), name, why)
        self.lose(row, tier)

    def lose(self, row: int, tier: Tier) -> None:
        """The copy on `tier` is of no use any more. Another copy serves on; without one the block
        is gone, children or not."""
        index = self.index
        if tier is Tier.DRAM:
            self.leave_dram(row)
        elif tier is Tier.HBM:
            self.leave_hbm(row)
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
            for policy in self.policies.of.values():
                policy.cool(unreachable)

    def asked(self, rows: Sequence[int]) -> None:
        """A request found these blocks and is going to read them."""
        declined = [row for row in rows if row in self.declined] if self.declined else []
        self.policies.asked(rows, declined)
        self.undecline(declined)

    # durability

    def ticket(self, rows: set[int]) -> Ticket:
        """A ticket for dirty rows. MUST be closed."""
        ticket = self.tickets.open(rows)
        if self.log_refuses:
            for row in rows & self.refused:
                self.tickets.refused(row)
        return ticket

    def wanted_durable(self, rows: Iterable[int]) -> set[int]:
        """Those of the rows that are dirty or stranded; what was declined of them, and of the
        blocks before them, is dirty again and among them."""
        wanted = set(rows)
        if self.declined:
            for row in list(wanted):
                above = self.index.ancestors(row)
                wanted.update(other for other in above if other in self.declined)
            self.undecline(sorted(wanted, key=self.index.depth.__getitem__))
        return wanted & (self.dirty.keys() | self.stranded.keys())

    def decline(self, row: int) -> None:
        """The SSD's policy holds what would have to go for a dirty row for worth more."""
        self._no_longer_dirty(row, self.slot_of(row).length)
        self.declined[row] = None
        self.metrics.add("declined_ssd_blocks")
        self.changes += 1

    def undecline(self, rows: Iterable[int]) -> None:
        """Those of the rows that were declined are dirty again."""
        for row in rows:
            if row in self.declined:
                del self.declined[row]
                self.dirty[row] = None
                self.dirty_bytes += self.slot_of(row).length

    def refuse_dirty(self) -> None:
        """The SSD takes none of the dirty blocks for now: count each once, let nobody wait."""
        new = self.dirty.keys() - self.refused
        self.refused |= new
        self.metrics.add("refused_ssd_blocks", len(new))
        for row in self.refused:
            self.tickets.refused(row)

    # who may go

    def may_leave_dram(self, row: int) -> bool:
        """Whether the policy's choice for DRAM can go now."""
        index = self.index
        if index.slot[row] in self.dram_users:
            return False
        if index.tiers[row] & _SSD:
            return True
        stays_dirty = not self.log_stalled and row not in self.declined
        return not stays_dirty and (bool(index.tiers[row] & _HBM) or self.is_free(row))

    def may_leave_hbm(self, row: int) -> bool:
        """Whether the policy's choice for HBM can go now, if need be by way of DRAM."""
        return self.index.hbm_slot[row] not in self.hbm_users

    def may_leave_store(self, row: int) -> bool:
        """Whether a block can leave its last tier now."""
        index = self.index
        tiers = index.tiers[row]
        in_use = (tiers & _DRAM and index.slot[row] in self.dram_users) or (
            tiers & _HBM and index.hbm_slot[row] in self.hbm_users
        )
        return not in_use and self.is_free(row)

    def is_free(self, row: int) -> bool:
        """Whether nothing keeps the block in the store: no child, no pin."""
        return not self.index.children[row] and not self.index.pins[row]

    def demote(self, row: int) -> None:
        """A DRAM victim goes: another tier's copy stays, or it is gone for good."""
        if self.index.tiers[row] & (_SSD | _HBM):
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

    @property
    def _pool_tier(self) -> PoolTier:
        assert self.hbm is not None, "this store has no HBM"
        return self.hbm

    def _no_longer_dirty(self, row: int, length: int) -> None:
        self.declined.pop(row, None)
        if row in self.dirty:
            del self.dirty[row]
            self.refused.discard(row)
            self.dirty_bytes -= length

    def check_integrity(
        self, other_slots: Iterable[Slot] = (), other_hbm_slots: Iterable[Slot] = ()
    ) -> None:
        """Raise `AssertionError` where index, tiers and policies disagree. `other_slots`: handed
        out by DRAM (or by HBM) and held by no READY row: reservations, transfers under way."""
        in_hbm, in_dram, on_ssd = (self.index.rows_on(t).tolist() for t in (_HBM, _DRAM, _SSD))
        of_tiers = zip((in_hbm, in_dram, on_ssd), self.policies.of.items(), strict=True)
        for rows, (tier, policy) in of_tiers:
            name = tier.name
            assert len(rows) == len(policy), f"{name}'s policy has other rows than the index"
            assert all(row in policy for row in rows), f"{name}'s policy lacks a row"
            policy.check_integrity()
        self.dram_users.check_integrity([*map(self.slot_of, in_dram), *other_slots])
        if self.hbm is None:
            assert not in_hbm, "a block is in HBM, and there is none"
        else:
            self.hbm_users.check_integrity([*map(self.hbm_slot_of, in_hbm), *other_hbm_slots])
        self._check_log(in_dram, on_ssd)
        alone = [row for row in in_hbm if self.index.tiers[row] == _HBM]
        assert self.stranded.keys() == set(alone if self.ssd else ()), "stranded rows are off"

    def _check_log(self, in_dram: Sequence[int], on_ssd: Sequence[int]) -> None:
        index = self.index
        if self.ssd is None:
            assert not on_ssd
            assert not self.dirty, "nothing can be dirty without a log"
            return
        alone = {row for row in in_dram if not index.tiers[row] & _SSD}
        dirty = alone - self.declined.keys()
        assert self.declined.keys() <= alone, "a block is declined that DRAM does not hold alone"
        assert dirty == self.dirty.keys(), "the queue of dirty blocks is not what DRAM alone holds"
        assert self.refused <= self.dirty.keys(), "a block is refused that is not dirty"
        total = sum(self.slot_of(row).length for row in dirty)
        assert total == self.dirty_bytes, f"{total} B are dirty, {self.dirty_bytes} B are counted"
        places = {self.location_of(row) for row in on_ssd}
        assert len(places) == len(on_ssd), "two blocks share a place in the log"
        for key in self.removes:
            row = index.find(key)
            assert row is None or not index.tiers[row] & _SSD, "a wanted block is to be removed"
