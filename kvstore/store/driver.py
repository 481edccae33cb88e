"""Runs the core: carries its jobs to the workers, brings results back, wakes who waits.

Everything here happens on one event loop; only the functions given to `workers` run elsewhere.
`pump` is called after whatever may have given the core something to do or somebody something to
hear. One job of the log runs at a time, in one task.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from kvstore.block import Tier
from kvstore.clock import Clock
from kvstore.config import StoreConfig
from kvstore.errors import DiskError, Unavailable
from kvstore.migration.log_lane import LogJob, LogLane
from kvstore.migration.tickets import Ticket
from kvstore.migration.workers import Lane, LogWriter, Workers
from kvstore.store.core import Core
from kvstore.store.costs import CostEstimate
from kvstore.store.waiting import KeyWaiters, wait_until

_log = logging.getLogger(__name__)


class Driver:
    """See the module. `writer` is None in a store of DRAM alone."""

    def __init__(
        self,
        core: Core,
        config: StoreConfig,
        clock: Clock,
        workers: Workers,
        writer: LogWriter | None,
    ) -> None:
        self.core, self.config, self.clock = core, config, clock
        self.workers, self._writer = workers, writer
        self.loop = asyncio.get_running_loop()
        self.settled = KeyWaiters(config.limits.waiters_max)
        self.closing = self._stopped = False
        self.pinned: Counter[int] = Counter()
        self._seen_changes = -1
        self._change_waiters: list[asyncio.Future[None]] = []
        self._ticket_waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._log_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.start_hbm: Callable[[], None] | None = None
        """Starts what the HBM lane has to do; set where there is that tier."""
        self.look_around: Callable[[], None] | None = None
        """Called every `limits.upkeep_s`; set where there is an SSD."""
        self._observed_s: dict[Tier, float] = {}
        self._estimates = {
            Tier.HBM: CostEstimate(50e-6, 20e9),
            Tier.DRAM: CostEstimate(50e-6, 8e9),
            Tier.SSD: CostEstimate(300e-6, 1e9),
        }
        self._publish_costs()
        self._upkeep_timer = self.loop.call_later(config.limits.upkeep_s, self._upkeep)

    def now_s(self) -> float:
        """The injected monotonic clock, on which rights expire."""
        return self.clock.monotonic_s()

    def enter(self) -> None:
        """Every call begins here: what has lapsed is over. Raises `Unavailable` once closing."""
        if self.closing:
            raise Unavailable("the store is closing")
        self.core.expire(self.now_s())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that outlives the call that began it; errors are logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self.reap)

    def reap(self, task: "asyncio.Task[Any]") -> None:
        """A task of the store is done: its error is logged."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of the store failed", exc_info=error)

    # work and news

    def pump(self) -> None:
        """Start what can be started, wake whom it concerns."""
        self._start_log()
        if self.start_hbm is not None and not self._stopped:
            self.start_hbm()
        self._tell()

    def _tell(self) -> None:
        settled = self.core.reservations.settled
        if settled:
            self.settled.wake(settled)
            settled.clear()
        for ticket, future in self._ticket_waiters.items():
            if ticket.settled and not future.done():
                future.set_result(None)
        changes = self.core.residency.changes
        if changes != self._seen_changes:
            self._seen_changes = changes
            for future in self._change_waiters:
                if not future.done():
                    future.set_result(None)

    def _start_log(self) -> None:
        lane = self.core.lane
        if lane is None or self._log_task is not None or self._stopped:
            return
        job = lane.next_job(self.now_s())
        if job is not None:
            self._log_task = self.loop.create_task(self._run_log(lane, job))
            self._log_task.add_done_callback(self.reap)

    async def _run_log(self, lane: LogLane, job: LogJob | None) -> None:
        assert self._writer is not None
        try:
            while job is not None:
                result = await self.workers.run(Lane.LOG, partial(self._writer.run, job))
                lane.finish(job, result, self.now_s())
                self._tell()
                job = None if self._stopped else lane.next_job(self.now_s())
        finally:
            self._log_task = None

    def _upkeep(self) -> None:
        self.core.expire(self.now_s())
        if self.look_around is not None:
            self.look_around()
        self.pump()
        self._upkeep_timer = self.loop.call_later(self.config.limits.upkeep_s, self._upkeep)

    # rows that a call under way holds

    def pin(self, rows: Sequence[int]) -> None:
        """Keep rows in the store until `unpin`, for a call under way."""
        self.core.residency.pin(rows)
        self.pinned.update(rows)

    def unpin(self, rows: Sequence[int]) -> None:
        """Undo `pin`."""
        self.pinned.subtract(rows)
        self.pinned = +self.pinned
        self.core.residency.unpin(rows)

    # waits

    def deadline(self, wait_s: float) -> float:
        """So long from now, on the loop's clock."""
        return self.loop.time() + wait_s

    async def changed(self, deadline_s: float) -> bool:
        """Whether anything became free or may go before `deadline_s`."""
        future = self.loop.create_future()
        self._change_waiters.append(future)
        try:
            return await wait_until(future, deadline_s)
        finally:
            self._change_waiters.remove(future)

    async def durable(self, tickets: Sequence[Ticket], wait_s: float) -> None:
        """Until all blocks of these tickets are on SSD; closes them. Raises `DiskError` after
        `wait_s`, or where some left the store before."""
        deadline, left, lost, refused = self.deadline(wait_s), 0, 0, 0
        self.pump()
        try:
            for ticket in tickets:
                if not ticket.settled:
                    future = self._ticket_waiters[ticket] = self.loop.create_future()
                    await wait_until(future, deadline)
        finally:
            for ticket in tickets:
                left, lost = left + len(ticket.waiting), lost + ticket.lost
                refused += ticket.refused
                self._ticket_waiters.pop(ticket, None)
                self.core.residency.tickets.close(ticket)
        if refused:
            raise DiskError(
                f"{refused} blocks were not taken by the ssd: its budget is full of blocks younger "
                "than ssd.lifetime_min_s. They can be read as long as dram holds them; raise "
                "ssd.budget_bytes, lower the lifetime, or evict blocks"
            )
        if left or lost:
            raise DiskError(
                f"{left} blocks were not durable on {self.config.dir} after {wait_s:g} s and "
                f"{lost} had to leave before: the disk fails, is slow, or nothing on it may go; "
                "see the log. What dram still holds can be read"
            )

    # costs

    def observe(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """A read from `tier` was made; lookups tell its cost from now on."""
        self._estimates[tier].observe(size_bytes, seconds)
        self._observed_s[tier] = self.now_s()
        self._publish_costs()

    def cost_age_s(self, tier: Tier) -> float | None:
        """Seconds since a read from `tier` was observed; None before the first."""
        at_s = self._observed_s.get(tier)
        return None if at_s is None else self.now_s() - at_s

    def _publish_costs(self) -> None:
        tiers = [Tier.HBM] * (self.core.hbm_lane is not None)
        tiers += [Tier.DRAM] + [Tier.SSD] * (self.core.lane is not None)
        self.core.costs = {tier: self._estimates[tier].cost() for tier in tiers}

    # the end

    async def drain(self) -> None:
        """Write what is dirty, as long as the disk takes it and at most `drain_s_max`; then stop.
        Calls still under way are the caller's to avoid."""
        deadline = self.deadline(self.config.limits.drain_s_max)
        lane, r = self.core.lane, self.core.residency
        while lane is not None and not (lane.idle and not r.stranded) and not r.log_stalled:
            self.pump()
            if self._log_task is not None:
                # not every job of the log changes anything
                left_s = max(0.0, deadline - self.loop.time())
                done, _ = await asyncio.wait((self._log_task,), timeout=left_s)
                ended = bool(done)
            else:
                ended = await self.changed(deadline)
            if not ended:
                break
        self._stopped = True
        self._upkeep_timer.cancel()
        if self._log_task is not None:
            await asyncio.wait((self._log_task,), timeout=max(0.0, deadline - self.loop.time()))
        if left := len(r.dirty) + len(r.stranded):
            _log.error("%d blocks were not written before the store closed", left)
        for task in list(self._tasks):
            task.cancel()

    @property
    def log_hangs(self) -> bool:
        """Whether a job of the log did not come back."""
        return self._log_task is not None
