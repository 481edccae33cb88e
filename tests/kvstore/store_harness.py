"""The core driven by hand: one thread, no event loop, every job in the test's own time."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random

from kvstore.block import BlockPut, PutOutcome, Tier
from kvstore.clock import SteadyClock
from kvstore.config import StoreConfig, build_config
from kvstore.metrics import Metrics
from kvstore.migration.hbm_copies import HbmCopies, HbmJob, HbmResult
from kvstore.migration.log_lane import LogJob
from kvstore.migration.promotion import Load
from kvstore.migration.workers import Filling, LogWriter, check_frame, fill_frame, read_loads
from kvstore.namespace import Layout, Namespace
from kvstore.store import boot
from kvstore.store.core import Core
from kvstore.store.reservations import Draft
from kvstore.testing.clock import ManualClock
from kvstore.testing.disk import History, SimDisk
from kvstore.tiers.dram import DramTier
from kvstore.tiers.frame import BlockName, BlockShape, FrameError, slices_of
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.simulated import SimulatedDevice
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import aligned_buffer

DIR = Path("/store")
SECRET = bytes(32)


def store_config(ssd: bool = True, **settings) -> StoreConfig:
    given = {
        "dir": DIR if ssd else None,
        "dram": {"budget_bytes": "1MiB"},
        "ssd": {
            "budget_bytes": "64MiB",
            "segment_bytes": "256KiB",
            "free_floor_bytes": 0,
            "lifetime_min_s": 0,
        },
    }
    return build_config(StoreConfig, given, settings)


ROOM_TURNS_MAX = 200
"""Turns of the log within which one put has room, or nothing may come of waiting."""


class HandDrivenStore:
    """A core with its tiers on a simulated disk."""

    def __init__(self, config: StoreConfig, disk: SimDisk | None = None) -> None:
        self.config, self.clock = config, ManualClock()
        self.disk = disk or SimDisk()
        self._base = deepcopy(self.disk.state)
        self.open()

    def open(self) -> None:
        config = self.config
        self.metrics = Metrics()
        self.dram = DramTier(config.dram.budget_bytes)
        self.ssd: SsdTier | None = None
        recovered = None
        if config.dir is not None and config.ssd is not None:
            self.ssd, recovered = SsdTier.open(
                config.dir, config.ssd, self.clock, self.disk, self.disk.open_index
            )
        secret = self.ssd.tenant_secret if self.ssd else SECRET
        offset_s = SteadyClock(self.clock).wall_offset_s
        now_s = self.clock.monotonic_s
        self.hbm: HbmTier | None = None
        if config.hbm.device == "simulated":
            devices = [SimulatedDevice(i, stepped=True) for i in config.hbm.devices]
            self.hbm = HbmTier(devices, config.hbm.budget_bytes)
            self.copies = HbmCopies(self.hbm, self.dram, config.hbm.copy_s_max)
        self.core = Core(
            config, self.dram, self.ssd, secret, self.metrics, now_s, 1, offset_s, self.hbm
        )
        if self.ssd is not None and recovered is not None:
            boot.load(self.core, recovered, secret)
            numbers = {row.namespace_id: row.number for row in recovered.namespaces}
            self.writer = LogWriter(self.ssd, self.dram, numbers)

    @property
    def now(self) -> float:
        return self.clock.monotonic_s()

    # endings

    def close(self) -> None:
        self.flush()
        if self.ssd is not None:
            self.ssd.close()
        self.dram.close()

    def power_loss(self, random: Random) -> None:
        """The process is gone, and with it what the disk had not made durable."""
        self.dram.close()
        history = History(self.disk.log, self._base)
        self.disk = SimDisk(history.torn(len(history.ops), random))
        self._base = deepcopy(self.disk.state)
        self.open()

    # puts

    def reserve(
        self, namespace_id: bytes, blocks: Sequence[tuple[bytes, bytes]], ttl_s: float | None = None
    ) -> tuple[int, Draft]:
        reservations = self.core.reservations
        reservations.check(namespace_id, blocks)
        draft = reservations.begin(namespace_id, [key for key, _ in blocks], set())
        turns = ROOM_TURNS_MAX
        for _, parent in blocks:
            while not reservations.reserve_next(draft, parent, self.clock.wall_s()):
                turns -= 1
                assert turns > 0, "the log is busy on and on, and no room comes of it"
                if not self._room_comes():
                    reservations.refuse_next(draft)
                    break
        reservation_id, _ = reservations.grant(draft, self.now, ttl_s)
        return reservation_id, draft

    def _room_comes(self) -> bool:
        for _ in range(3):
            if not self.core.reservations.may_get_room():
                return False
            if self.log_turn():
                return True
            self.clock.advance(1.0)
        return False

    def write(self, reservation_id: int, block: BlockPut) -> bool:
        reservations = self.core.reservations
        draft = reservations.rights.get(reservation_id, self.now).held
        layout = self.core.namespaces.layout(draft.number)
        incoming = reservations.start_copy(reservation_id, block.key, self.now)
        name = BlockName(
            incoming.key,
            draft.namespace_id,
            incoming.parent,
            incoming.depth,
            incoming.reserved_wall_s,
        )
        filling = Filling(
            self.dram.view(incoming.slot),
            name,
            BlockShape.of(layout.section_bytes),
            block.sections,
            b"".join(block.checksums or ()),
        )
        right = fill_frame(filling)
        reservations.end_copies([incoming], [right])
        return right

    def put(self, namespace_id: bytes, blocks: Sequence[BlockPut]) -> list[PutOutcome]:
        reservation_id, draft = self.reserve(namespace_id, [(b.key, b.parent) for b in blocks])
        if not reservation_id:
            return draft.outcomes
        by_key = {block.key: block for block in reversed(blocks)}
        for key in list(draft.blocks):
            self.write(reservation_id, by_key[key])
        return self.core.reservations.commit(reservation_id, self.now).outcomes

    # the log

    def log_turn(self) -> bool:
        """One job of the log from beginning to end; whether there was one."""
        job = self.begin_log()
        if job is None:
            return False
        self.finish_log(job)
        return True

    def begin_log(self) -> LogJob | None:
        return self.core.lane.next_job(self.now) if self.core.lane else None

    def finish_log(self, job: LogJob) -> None:
        assert self.core.lane is not None
        self.core.lane.finish(job, self.writer.run(job), self.now)

    def flush(self) -> None:
        while self.turn():
            pass

    # hbm

    def begin_hbm(self) -> HbmJob | None:
        return self.core.hbm_lane.next_job(self.now) if self.core.hbm_lane else None

    def finish_hbm(self, job: HbmJob, result: HbmResult | None = None) -> None:
        assert self.core.hbm_lane is not None
        self.core.hbm_lane.finish(job, result or self.copies.run(job), self.now)

    def turn(self) -> bool:
        """One job of the log and one of HBM; whether there was any."""
        job = self.begin_hbm()
        if job is not None:
            self.finish_hbm(job)
        return self.log_turn() or job is not None

    # reads

    def read(self, namespace: Namespace, namespace_id: bytes, key: bytes) -> list[bytes] | None:
        """The sections of a block from the fastest tier, or None; what is wrong is quarantined."""
        core = self.core
        number = core.namespaces.number(namespace_id)
        while (row := core.ready_row(number, key)) is not None:
            if core.index.tiers[row] & Tier.DRAM:
                return self._read_dram(namespace.layout, key, row)
            load, new = core.promotion.begin(row, namespace_id)
            assert new
            sections = self.finish_load(namespace.layout, load)
            if sections is not None or load.source is None:
                return sections
        return None

    def _read_dram(self, layout: Layout, key: bytes, row: int) -> list[bytes] | None:
        r = self.core.residency
        slot = r.slot_of(row)
        r.use(slot)
        sections = self.sections(layout, key, self.dram.view(slot))
        r.end_use(slot)
        if isinstance(sections, FrameError):
            r.quarantine(row, Tier.DRAM, sections)
            return None
        return sections

    def finish_load(self, layout: Layout, load: Load) -> list[bytes] | None:
        view = self.dram.view(load.slot) if load.slot else aligned_buffer(load.length)
        if load.source is not None:
            (loaded,), _ = self.copies.read([load], [view])
        else:
            assert self.ssd is not None
            (loaded,), _ = read_loads(self.ssd, [load], [view])
        corrupt = loaded.error if isinstance(loaded.error, FrameError) else None
        lost = loaded.error is not None
        good = self.core.promotion.finish(load, corrupt, lost)
        sections = self.sections(layout, load.key, view) if good else None
        if good and load.slot is not None:
            for _ in range(load.readers):
                self.core.residency.end_use(load.slot)
        assert not isinstance(sections, FrameError)
        return sections

    @staticmethod
    def sections(layout: Layout, key: bytes, view: memoryview) -> list[bytes] | FrameError:
        wanted = tuple(range(len(layout.sections)))
        checked = check_frame(view, key, layout.section_bytes, wanted, verify=True)
        if isinstance(checked, FrameError):
            return checked
        return [bytes(view[place]) for place in slices_of(layout.section_bytes, wanted)]

    # damage

    def flip_dram(self, key: bytes, at: int) -> None:
        row = self.core.index.find(key)
        assert row is not None
        view = self.dram.view(self.core.residency.slot_of(row))
        view[at] ^= 0x40

    def hbm_view(self, key: bytes) -> memoryview:
        """What lies on the device."""
        row = self.core.index.find(key)
        assert row is not None
        assert self.hbm is not None
        slot = self.core.residency.hbm_slot_of(row)
        device, offset = self.hbm.place(slot)
        memory = self.hbm.devices[device].memory
        return memory[offset : offset + slot.length]

    def flip_ssd(self, key: bytes, at: int) -> None:
        row = self.core.index.find(key)
        assert row is not None
        place = self.core.residency.location_of(row)
        (path,) = [p for p in self.disk.state.names if p.endswith(f"/{place.segment:08d}.seg")]
        content = self.disk.state.file(self.disk.state.names[path])
        content[place.offset + at] ^= 0x40

    def residency(self, key: bytes) -> Tier:
        row = self.core.index.find(key)
        return Tier.NONE if row is None else Tier(self.core.index.tiers[row])
