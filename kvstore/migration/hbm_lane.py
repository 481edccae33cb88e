"""What goes into HBM and out of it: promotion from DRAM, demotion to DRAM, one job at a time.

Blocks that a reader hits are nominated, chain by chain, and copied in from DRAM as long as the
policy finds room: its victims leave at once where DRAM holds them too, else they are copied back to
DRAM first. Nothing waits for any of this: a reader takes a block from where it is.

A job is made here, executed by a worker (`kvstore.migration.hbm_copies`), and its result comes back
through `finish`. Until then its rows are pinned and its slots in use; a block is in HBM when the
event behind its copy was seen.

A copy that fails costs that copy, and a pause that doubles. A device that hangs costs the tier: the
slots that it might still touch are never used again, what HBM alone held is lost, and all goes on
without it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.block import Tier
from kvstore.config import HbmConfig, MigrationConfig
from kvstore.index import READY
from kvstore.migration.hbm_copies import CopyIn, HbmJob, HbmResult
from kvstore.migration.promotion import Promotion
from kvstore.migration.residency import Residency
from kvstore.migration.workers import Loaded
from kvstore.tiers.base import Slot
from kvstore.tiers.frame import FrameError
from kvstore.tiers.hbm.device import DeviceHangs

_HBM, _DRAM, _SSD = int(Tier.HBM), int(Tier.DRAM), int(Tier.SSD)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Candidates, root first, and all rows that were hit with them: those make no room for one
    another."""

    left: deque[int]
    members: frozenset[int]


class HbmLane:
    """See the module. `namespace_ids`: by the index's namespace number; it grows."""

    def __init__(
        self,
        residency: Residency,
        promotion: Promotion,
        config: HbmConfig,
        migration: MigrationConfig,
        namespace_ids: Sequence[bytes],
    ) -> None:
        self._residency, self._promotion = residency, promotion
        self._config, self._migration = config, migration
        self._namespace_ids = namespace_ids
        self._chains: deque[_Chain] = deque()
        self._candidates = 0
        self._job: HbmJob | None = None
        self._going: dict[int, int] = {}
        """Victims on their way to DRAM, and their bytes."""
        self._backoff_s = self._retry_at_s = 0.0
        self.failed = False
        """The tier was given up."""

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    @property
    def degraded(self) -> bool:
        """Whether copies failed lately, or the tier was given up."""
        return self.failed or self._backoff_s > 0

    def nominate(self, rows: Sequence[int]) -> None:
        """Rows of one chain were hit, root first: they may come in."""
        tiers = self._residency.index.tiers
        room = self._config.candidates_max - self._candidates
        left = deque([row for row in rows if not tiers[row] & _HBM][: max(0, room)])
        if left and not self.failed:
            self._chains.append(_Chain(left, frozenset(rows)))
            self._candidates += len(left)

    # the next job

    def next_job(self, now_s: float) -> HbmJob | None:
        """What to do now, or None. `finish` MUST be called before the next."""
        if self._job is not None or self.failed or now_s < self._retry_at_s:
            return None
        job = HbmJob()
        self._rescue(job)
        while self._chains and self._copy_next(job):
            pass
        if not job:
            return None
        self._job = job
        return job

    def _rescue(self, job: HbmJob) -> None:
        """Bring what HBM alone holds to where it can be written from."""
        r = self._residency
        if r.log_stalled:
            return
        for row in list(r.stranded):
            if job.size_bytes >= self._config.copy_bytes_max or not self._copy_back(row, job):
                return

    def _copy_back(self, row: int, job: HbmJob) -> bool:
        namespace_id = self._namespace_ids[self._residency.index.namespace[row]]
        load = self._promotion.begin_copy_back(row, namespace_id)
        if load is not None:
            job.loads.append(load)
            job.size_bytes += load.length
        return load is not None

    def _copy_next(self, job: HbmJob) -> bool:
        """Deal with the first candidate; False where the job is full, or there is no room now."""
        chain = self._chains[0]
        row = chain.left[0]
        if not self._wanted(row) or not self._fits(row):
            self._pass_over(1)
            return True
        source = self._residency.slot_of(row)
        size = source.length
        if job and job.size_bytes + size > self._config.copy_bytes_max:
            return False
        # held first, so that making room for the block does not evict it
        self._residency.use(source)
        self._residency.pin([row])
        target = self._room(chain, row, size, job)
        if target is None:
            self._let_go(row, source)
            if self._going:
                return False  # it comes with the job
            self._pass_over(len(chain.left))
            return True
        self._pass_over(1)
        namespace_id = self._namespace_ids[self._residency.index.namespace[row]]
        key = self._residency.index.keys[row]
        job.copies.append(CopyIn(row, key, namespace_id, source, target))
        job.size_bytes += size
        return True

    def _wanted(self, row: int) -> bool:
        index = self._residency.index
        tiers = index.tiers[row] if index.state[row] == READY else 0
        return bool(tiers & _DRAM) and not tiers & _HBM

    def _fits(self, row: int) -> bool:
        """Whether an empty HBM would have room for the row; if not, nothing is to go for it."""
        r = self._residency
        return r.hbm is not None and r.slot_of(row).length <= r.hbm.slot_bytes_max

    def _pass_over(self, rows: int) -> None:
        left = self._chains[0].left
        for _ in range(rows):
            left.popleft()
        self._candidates -= rows
        if not left:
            self._chains.popleft()

    def _room(self, chain: _Chain, row: int, size: int, job: HbmJob) -> Slot | None:
        """A slot, if the policy lets others go for the row; None also while they are on their way
        out (`_going`), as many as the chain has use for. What a lease pins stays."""
        r = self._residency
        assert r.hbm is not None
        going_max = min(len(chain.left) * size, self._config.copy_bytes_max)
        refused: set[int] = set()

        def may_go(v: int) -> bool:
            kept = v in chain.members or v in refused or r.index.pins[v]
            return not kept and r.may_leave_hbm(v)

        slot = r.hbm.alloc(size)
        while slot is None and sum(self._going.values()) < going_max:
            victim = r.hbm_policy.victim(may_go)
            if victim is None or not r.hbm_policy.admits(row, victim):
                return None
            if not self._make_leave(victim, job):
                refused.add(victim)
            slot = r.hbm.alloc(size)
        return slot

    def _make_leave(self, victim: int, job: HbmJob) -> bool:
        """A victim goes, now or by way of DRAM; False where it has to stay."""
        r = self._residency
        tiers = r.index.tiers[victim]
        if not tiers & _DRAM and self._copy_back(victim, job):
            self._going[victim] = job.loads[-1].length
            return True
        if tiers & (_DRAM | _SSD):
            r.leave_hbm(victim)
            r.metrics.add("demoted_hbm_blocks")
            return True
        if not r.is_free(victim):
            return False
        r.drop(victim)
        r.metrics.add("evicted_hbm_blocks")
        return True

    def _let_go(self, row: int, source: Slot) -> None:
        self._residency.end_use(source)
        self._residency.unpin([row])

    # results

    def finish(self, job: HbmJob, result: HbmResult, now_s: float) -> list[bool]:
        """The job ran: bring the books in line with what the device holds now. Per load, whether
        its bytes may be used, as `Promotion.finish` tells it."""
        assert job is self._job, "a job was answered that is not under way"
        self._job = None
        good = [self._end_load(loaded) for loaded in result.loaded]
        self._going.clear()
        r = self._residency
        back = [loaded.load.row for loaded in result.loaded]
        r.policies.arrived([row for row in back if r.index.tiers[row] & _DRAM], Tier.DRAM)
        entered = [
            copy.row
            for copy, error in zip(job.copies, result.errors, strict=True)
            if self._settle(copy, error)
        ]
        r.policies.arrived(entered, Tier.HBM)
        r.changes += 1
        errors = [*(loaded.error for loaded in result.loaded), *result.errors]
        self._note_errors(errors, now_s)
        return good

    def _end_load(self, loaded: Loaded) -> bool:
        load, error = loaded.load, loaded.error
        if isinstance(error, DeviceHangs):
            self._promotion.abandon(load)
            return False
        corrupt = error if isinstance(error, FrameError) else None
        good = self._promotion.finish(load, corrupt, error is not None)
        if good and load.row in self._going and load.source is not None:
            self._leave_by_dram(load.row, load.source)
        return good

    def _leave_by_dram(self, row: int, source: Slot) -> None:
        r = self._residency
        in_dram = r.index.tiers[row] & _DRAM
        if in_dram and self._promotion.is_in_hbm(row, source) and r.may_leave_hbm(row):
            r.leave_hbm(row)
            r.metrics.add("demoted_hbm_blocks")

    def _settle(self, copy: CopyIn, error: Exception | None) -> bool:
        """Whether the block is in HBM now."""
        r, row = self._residency, copy.row
        index = r.index
        in_dram = index.state[row] == READY and index.tiers[row] & _DRAM
        current = bool(in_dram) and r.slot_of(row) == copy.source
        if isinstance(error, DeviceHangs):
            # the device may still read the one and write the other
            r.hbm_users.abandon(copy.target)
            r.unpin([row])
            return False
        entered = current and error is None and not index.tiers[row] & _HBM and not self.failed
        if entered:
            r.enter_hbm(row, copy.target)
            r.metrics.add("promoted_hbm_blocks")
            r.metrics.add("promoted_hbm_bytes", copy.source.length)
        else:
            r.hbm_users.free(copy.target)
        if current and isinstance(error, FrameError):
            r.quarantine(row, Tier.DRAM, error)
        self._let_go(row, copy.source)
        return entered

    # errors

    def _note_errors(self, errors: Sequence[Exception | None], now_s: float) -> None:
        wrong = [e for e in errors if e is not None and not isinstance(e, FrameError)]
        if not wrong:
            self._backoff_s = 0.0
            return
        self.note_error(wrong[0], now_s)
        for error in wrong:
            if isinstance(error, DeviceHangs):
                self.give_up(error)

    def note_error(self, error: Exception, now_s: float) -> None:
        """A copy failed: pause, for a while that doubles up to the limit."""
        self._residency.metrics.add("device_errors")
        config = self._migration
        self._backoff_s = min(max(2 * self._backoff_s, config.retry_s_min), config.retry_s_max)
        self._retry_at_s = now_s + self._backoff_s
        _log.error("hbm degraded, copying again in %.1f s: %s", self._backoff_s, error)

    def give_up(self, error: Exception) -> None:
        """The device hangs: go on without the tier."""
        if self.failed:
            return
        self.failed = True
        r = self._residency
        _log.critical("hbm is given up until the next start: %s", error)
        self._chains.clear()
        self._candidates = 0
        for row in r.index.rows_on(_HBM).tolist():
            if r.index.tiers[row] & _HBM:
                r.lose(row, Tier.HBM)

    # inspection

    def slots(self) -> list[Slot]:
        """Slots of HBM that are being filled."""
        return [copy.target for copy in self._job.copies] if self._job else []

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the queue's books disagree."""
        waiting = [len(chain.left) for chain in self._chains]
        assert sum(waiting) == self._candidates, "candidates are miscounted"
        assert all(waiting), "an empty chain is waiting"
        for copy in self._job.copies if self._job else ():
            assert self._residency.index.pins[copy.row], f"row {copy.row} is copied, not pinned"
