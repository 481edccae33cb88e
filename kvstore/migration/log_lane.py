"""Everything that is written to the log, one job at a time: write-back, compaction, removals.

The lane decides what the next job is; a worker executes it (`kvstore.migration.workers`) and its
result comes back through `done` or `failed`. One job at a time is what makes the order safe: frames
are durable before the index names them, an entry is gone from the index before its segment is
deleted, and a key's removal never overtakes its next write. A job is as large as what has gathered
while the last one ran, so that one sync serves many puts.

Space comes back a segment at a time. While frames find room nothing is evicted. Without room, the
policy's victims leave the store until some segment has enough dead bytes; what is still wanted of
it is appended again, and it is deleted. So what is appended again is what the policy prefers to all
that went. A block for which a victim would have to go that the policy holds for worth more is
declined, with all below it; not where somebody waits for it to become durable. Where nothing may
go, the lane is stuck: dirty blocks stay in DRAM, which then sheds its coldest leaves, and that in
turn lets the log's blocks go. Where all that keeps them is their guaranteed lifetime, the dirty
blocks are refused: nobody waits for them to become durable any more, though they will be if there
is room before they leave DRAM.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block import Tier
from kvstore.config import MigrationConfig
from kvstore.errors import DiskError
from kvstore.index import READY
from kvstore.migration.lifetime import Lifetime
from kvstore.migration.promotion import Promotion
from kvstore.migration.residency import Residency
from kvstore.tiers.base import Location, LogTier, Slot
from kvstore.tiers.frame import FrameError

_log = logging.getLogger(__name__)
_UNSURE_KEYS_MAX = 1 << 18
"""Keys remembered while the disk fails on and on; more may come back with the next start."""


@dataclass(frozen=True, slots=True)
class Append:
    """One frame for the log's end: from `slot`, or (compaction of what DRAM does not hold) read
    from `source` first. `source` is None for a write-back."""

    row: int
    key: bytes
    namespace_id: bytes
    length: int
    location: Location
    slot: Slot | None
    source: Location | None


@dataclass(slots=True)
class LogJob:
    """One turn of the log, in this order: make namespaces known, remove and append, drop a segment,
    look again at the free space."""

    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    appends: list[Append] = field(default_factory=list)
    removes: list[bytes] = field(default_factory=list)
    drop: int | None = None
    refresh: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.namespaces or self.appends or self.removes or self.drop is not None or self.refresh
        )


@dataclass(slots=True)
class LogResult:
    """What became of a job. `errors`: per append None, or why that one frame could not be appended:
    a `FrameError` of its bytes, or the `DiskError` of reading its source. `failure`: the disk
    refused the job as a whole; nothing of it holds. The tier knows what became of every place."""

    errors: list[Exception | None]
    failure: DiskError | None = None


class LogLane:
    """See the module. `namespace_ids`: by the index's namespace number; it grows. `wall_offset_s`:
    wall time less the `now_s` of calls."""

    def __init__(
        self,
        residency: Residency,
        promotion: Promotion,
        ssd: LogTier,
        config: MigrationConfig,
        segment_bytes: int,
        namespace_ids: Sequence[bytes],
        lifetime: Lifetime,
        wall_offset_s: float,
    ) -> None:
        self._residency, self._promotion, self._ssd = residency, promotion, ssd
        self._config, self._segment_bytes = config, segment_bytes
        self._namespace_ids = namespace_ids
        self._lifetime, self._wall_offset_s = lifetime, wall_offset_s
        self._new_namespaces: dict[bytes, bytes] = {}
        self._job: LogJob | None = None
        self._unsure: set[bytes] = set()
        self._given_up = False
        self._append_failed = False
        self._backoff_s = 0.0
        self._retry_at_s = self._room_at_s = 0.0
        self._stuck_live_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    @property
    def degraded(self) -> bool:
        """Whether the disk failed the last job; the next is tried after a while."""
        return self._residency.log_degraded

    def room_since(self) -> bool:
        """Whether something left the log since nothing could be written for want of room."""
        return self._ssd.live_bytes < self._stuck_live_bytes

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing under way."""
        r = self._residency
        return not (self._job or r.dirty or r.removes or self._new_namespaces)

    def add_namespace(self, namespace_id: bytes, descriptor: bytes) -> None:
        """Make a namespace durable with the next job."""
        self._new_namespaces[namespace_id] = descriptor

    # the next job

    def next_job(self, now_s: float) -> LogJob | None:
        """What to do now, or None. `finish` MUST be called before the next."""
        if self._job is not None or now_s < self._retry_at_s:
            return None
        if self._new_namespaces:
            # first and without appends: a frame's place is settled by writing the frame alone
            job = LogJob(namespaces=self._new_namespaces)
            self._new_namespaces = {}
        else:
            job = self._reclaim() or self._write_back(now_s) or LogJob(refresh=self._given_up)
        self._forget_unsure()
        if not (job or self._residency.removes):
            return None
        job.removes = list(self._residency.removes)
        self._residency.removes.clear()
        self._job = job
        return job

    def _forget_unsure(self) -> None:
        """A job that failed may have been done all the same. What it wrote and nobody wants any
        more must not come back with the next start."""
        r = self._residency
        for key in list(self._unsure):
            row = r.index.find(key)
            if row is not None and row in r.dirty:
                continue
            self._unsure.discard(key)
            if not self._on_ssd(key):
                r.removes[key] = None

    def _reclaim(self) -> LogJob | None:
        victim = self._ssd.victim_segment()
        if victim is None or self._ssd.live_in(victim) or self._promotion.reads_in(victim):
            return None
        return LogJob(drop=victim)

    def _write_back(self, now_s: float) -> LogJob | None:
        r, job, size = self._residency, LogJob(), 0
        for row in list(r.dirty):
            if r.index.parent[row] in r.declined and not r.tickets.wanted(row):
                r.decline(row)
                continue
            slot = r.slot_of(row)
            if job.appends and size + slot.length > self._config.write_batch_bytes_max:
                break
            location = self._ssd.place(slot.length)
            if location is None:
                if job.appends:
                    break
                room = self._make_room(row, now_s)
                if row in r.declined:
                    continue
                return room
            size += slot.length
            self._append(job, row, location, slot, None)
        if job.appends:
            r.log_stuck_at = None
            r.log_refuses = False
        return job

    def _append(
        self, job: LogJob, row: int, location: Location, slot: Slot | None, source: Location | None
    ) -> None:
        r = self._residency
        if slot is not None:
            r.use(slot)
        r.pin([row])
        namespace_id = self._namespace_ids[r.index.namespace[row]]
        length = r.index.stored_bytes[row]
        job.appends.append(
            Append(row, r.index.keys[row], namespace_id, length, location, slot, source)
        )

    # room in the log

    def _make_room(self, for_row: int, now_s: float) -> LogJob | None:
        r = self._residency
        if now_s < self._room_at_s:
            return None
        length, wall_s = r.index.stored_bytes[for_row], now_s + self._wall_offset_s
        admitted = r.tickets.wanted(for_row)
        while True:
            victim = self._ssd.victim_segment()
            row = self._lifetime.victim(wall_s)
            if victim is not None and self._worth_moving(victim, length, row):
                job = self._move_out(victim)
                if job or self._promotion.reads_in(victim):
                    return job
            if row is None:
                break
            if not admitted and not r.ssd_policy.admits(for_row, row):
                r.decline(for_row)
                return None
            # room comes by segments: the others go for the blocks that come next
            admitted = True
            self._lifetime.evict(row, wall_s)
        if victim is not None and self._gain(victim) >= length and (job := self._move_out(victim)):
            return job
        self._stuck(now_s)
        # it may be others' files that fill the disk, and they may be gone
        return LogJob(refresh=True)

    def _stuck(self, now_s: float) -> None:
        r = self._residency
        refuses = self._lifetime.refuses(now_s + self._wall_offset_s)
        if r.log_stuck_at is None or refuses != r.log_refuses:
            why = "all is younger than ssd.lifetime_min_s" if refuses else "all is in use"
            _log.warning("nothing on ssd may go (%s): new blocks stay in dram, which sheds", why)
        r.log_refuses = refuses
        self._stuck_live_bytes = self._ssd.live_bytes
        if refuses:
            r.refuse_dirty()
        r.changes += 1
        r.log_stuck_at = r.changes
        self._room_at_s = now_s + self._config.retry_s_min

    def _gain(self, segment: int) -> int:
        return self._segment_bytes - self._ssd.live_in(segment)

    def _worth_moving(self, segment: int, length: int, next_to_go: int | None) -> bool:
        """Whether enough of a segment is dead. Not while the policy's next victim lies in it: it
        would be appended again only to go."""
        least = self._config.compaction_dead_fraction_min * self._segment_bytes
        if self._gain(segment) < max(least, length):
            return False
        return next_to_go is None or self._residency.index.segment[next_to_go] != segment

    def _move_out(self, segment: int) -> LogJob | None:
        """Append what is wanted of a segment again, as much as one job takes; delete it if that is
        nothing. None where not even compaction finds room, or readers keep the segment."""
        r, job, size = self._residency, LogJob(), 0
        for row in r.index.rows_in_segment(segment, Tier.SSD).tolist():
            length = r.index.stored_bytes[row]
            if job.appends and size + length > self._config.write_batch_bytes_max:
                break
            location = self._ssd.place(length, compaction=True)
            if location is None:
                break
            size += length
            slot = r.slot_of(row) if r.index.tiers[row] & Tier.DRAM else None
            self._append(job, row, location, slot, r.location_of(row))
        if job.appends:
            return job
        return self._reclaim()

    # results

    def finish(self, job: LogJob, result: LogResult, now_s: float) -> None:
        """The job ran: bring the books in line with what the disk holds now."""
        assert job is self._job, "a job was answered that is not under way"
        self._job = None
        if result.failure is None:
            self._settle(job, result)
            # deleting what a failed append left may work where appending fails again
            if job.appends or not (self._append_failed and self._residency.dirty):
                self._recovered()
            self._given_up &= not job.refresh
        else:
            self._undo(job)
            self._degrade(result.failure, now_s)
        if not job.refresh:
            self._residency.changes += 1

    def _settle(self, job: LogJob, result: LogResult) -> None:
        r = self._residency
        written = []
        for item, error in zip(job.appends, result.errors, strict=True):
            current = self._is_current(item)
            if error is not None:
                self._refused(item, error, current)
            elif current:
                r.enter_ssd(item.row, item.location, item.length)
                self._count(item)
                if item.source is None:
                    written.append(item.row)
            else:
                self._ssd.mark_dead(item.location, item.length)
                if not self._on_ssd(item.key):
                    r.removes[item.key] = None
        self._release(job)
        r.policies.arrived(written, Tier.SSD)
        if job.drop is not None:
            r.metrics.add("segments_reclaimed")

    def _undo(self, job: LogJob) -> None:
        r = self._residency
        self._release(job)
        for key in job.removes:
            if not self._on_ssd(key):
                r.removes[key] = None
        if len(self._unsure) + len(r.removes) < _UNSURE_KEYS_MAX:
            self._unsure.update(item.key for item in job.appends if item.source is None)
        self._given_up |= bool(job.appends)
        self._append_failed |= bool(job.appends)
        self._new_namespaces = {**job.namespaces, **self._new_namespaces}

    def _degrade(self, error: DiskError, now_s: float) -> None:
        """Try again after a while that doubles up to the limit."""
        self._residency.metrics.add("disk_errors")
        config = self._config
        self._backoff_s = min(max(2 * self._backoff_s, config.retry_s_min), config.retry_s_max)
        self._retry_at_s = now_s + self._backoff_s
        if not self.degraded:
            _log.error("ssd degraded, writing again in %.1f s: %s", self._backoff_s, error)
        self._residency.log_degraded = True

    def _is_current(self, item: Append) -> bool:
        """Whether the row still is the block, and the copy, that the job was about."""
        index, r, row = self._residency.index, self._residency, item.row
        if index.state[row] != READY or index.keys[row] != item.key:
            return False
        if item.source is not None:
            return bool(index.tiers[row] & Tier.SSD) and r.location_of(row) == item.source
        return bool(index.tiers[row] & Tier.DRAM) and r.slot_of(row) == item.slot

    def _on_ssd(self, key: bytes) -> bool:
        row = self._residency.index.find(key)
        return row is not None and bool(self._residency.index.tiers[row] & Tier.SSD)

    def _refused(self, item: Append, error: Exception, current: bool) -> None:
        r = self._residency
        if isinstance(error, DiskError):
            r.metrics.add("disk_errors")
            if current:
                _log.error("lost block %s while reclaiming its segment: %s", item.key.hex(), error)
                r.lose(item.row, Tier.SSD)
        elif isinstance(error, FrameError):
            if current:
                r.quarantine(item.row, Tier.DRAM if item.slot else Tier.SSD, error)
        else:
            raise error

    def _count(self, item: Append) -> None:
        kind = "write_back" if item.source is None else "compacted"
        self._residency.metrics.add(f"{kind}_blocks")
        self._residency.metrics.add(f"{kind}_bytes", item.length)

    def _release(self, job: LogJob) -> None:
        r = self._residency
        if not job.appends:
            return
        for item in job.appends:
            if item.slot is not None:
                r.end_use(item.slot)
        r.unpin([item.row for item in job.appends])

    def _recovered(self) -> None:
        self._backoff_s = self._retry_at_s = 0.0
        self._append_failed = False
        if self.degraded:
            _log.info("ssd accepts again")
            self._residency.log_degraded = False
