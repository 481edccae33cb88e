"""A recorded life of a log, and what must hold of every disk that a crash in it may leave."""

import errno
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvstore.config import SsdConfig
from kvstore.errors import DiskError
from kvstore.testing.clock import ManualClock
from kvstore.testing.disk import DiskState, SimDisk, fail_next, no_fault
from kvstore.testing.tiers_frames import (
    DESCRIPTOR,
    NAMESPACE_ID,
    Stored,
    key_of,
    load,
    make_frame,
    rows,
    store,
)
from kvstore.tiers.base import Recovered, WriteItem
from kvstore.tiers.frame import decode_header, verify_frame
from kvstore.tiers.ssd import SsdTier

DIRECTORY = Path("/srv/store")
CONFIG = SsdConfig(
    budget_bytes=1 << 20, segment_bytes=64 << 10, free_floor_bytes=0, compression="zstd"
)


def open_log(disk: SimDisk, directory: Path = DIRECTORY) -> tuple[SsdTier, Recovered]:
    """The log on a simulated disk."""
    return SsdTier.open(directory, CONFIG, ManualClock(), files=disk, open_index=disk.open_index)


@dataclass
class Ledger:
    """What was promised, by position in the disk's log.

    `versions[key]`: every frame ever handed in under a key. `events`: (position, key, durable):
    from there on the key is durable, or may be gone.
    """

    versions: dict[bytes, list[bytes]] = field(default_factory=dict)
    events: list[tuple[int, bytes, bool]] = field(default_factory=list)

    def durable(self, cut: int) -> set[bytes]:
        """Keys that must be there after the first `cut` operations."""
        keys: set[bytes] = set()
        for position, key, durable in self.events:
            if position > cut:
                break
            (keys.add if durable else keys.discard)(key)
        return keys


class Workload:
    """Batches, removes, compaction, failures and restarts, from a seed, on a recording disk."""

    def __init__(self, seed: int, disk: SimDisk | None = None) -> None:
        self.random = Random(seed)
        self.disk = disk or SimDisk()
        self.disk.late = seed % 2 == 1
        self.ledger = Ledger()
        self.live: dict[bytes, Stored] = {}
        self.names = self.restarts = 0
        self.tier, _ = open_log(self.disk)

    def run(self, steps: int) -> None:
        """Take `steps` random steps; every kind of step comes up."""
        kinds = (self.write, self.write, self.rewrite, self.remove, self.fail, self.restart)
        for step in range(steps):
            kinds[step % len(kinds)]()
            while (victim := self.tier.victim_segment()) is not None and self.full():
                self.compact(victim)
            self.tier.check_integrity()

    def full(self) -> bool:
        """Whether compaction is due: early, so that it happens often."""
        return self.tier.used_bytes > CONFIG.budget_bytes // 5

    def frame(self, key: bytes | None = None) -> memoryview:
        """A new frame, under a new key unless one is given."""
        self.names += 1
        key = key or key_of(self.names)
        lengths = [self.random.randint(1, 9000) for _ in range(self.random.randint(1, 3))]
        packable = self.names % 2 == 0
        frame = make_frame(key, lengths, seed=self.names, packable=packable)
        self.ledger.versions.setdefault(key, []).append(bytes(frame))
        return frame

    def promise(self, stored: list[Stored]) -> None:
        """The log said that these are durable."""
        for s in stored:
            self.live[s.key] = s
            self.ledger.events.append((len(self.disk.log), s.key, True))

    def write(self) -> None:
        """A batch of new objects, and some removes in the same commit."""
        removes = self.doom(self.random.randint(0, 2))
        self.promise(
            store(self.tier, [self.frame() for _ in range(self.random.randint(1, 5))], removes)
        )

    def rewrite(self) -> None:
        """An object is written again with other bytes, as after it had been evicted."""
        keys = self.random.sample(sorted(self.live), min(2, len(self.live)))
        for key in keys:
            old = self.live[key]
            self.promise(store(self.tier, [self.frame(key)]))
            self.tier.mark_dead(old.location, old.length)

    def doom(self, count: int) -> list[bytes]:
        """Choose objects to remove: from now on they may be gone."""
        keys = self.random.sample(sorted(self.live), min(count, len(self.live)))
        for key in keys:
            old = self.live.pop(key)
            self.ledger.events.append((len(self.disk.log), key, False))
            self.tier.mark_dead(old.location, old.length)
        return keys

    def remove(self) -> None:
        """Evict a third."""
        self.tier.remove(self.doom(len(self.live) // 3))

    def compact(self, victim: int) -> None:
        """Write what lives in a segment again, and drop it."""
        moving = [s for s in self.live.values() if s.location.segment == victim]
        frames = [load(self.tier, s.location, s.length) for s in moving]
        assert all(verify_frame(f, s.key) is None for f, s in zip(frames, moving, strict=True))
        self.promise(store(self.tier, frames))
        for s in moving:
            self.tier.mark_dead(s.location, s.length)
        self.tier.drop_segment(victim)

    def fail(self) -> None:
        """A batch that fails half-way; a restart may find some of its frames whole."""
        what = self.random.choice(["tear", "fdatasync", "commit"])
        number = self.tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
        items = []
        for _ in range(self.random.randint(1, 4)):
            frame = self.frame()
            location = self.tier.place(len(frame))
            assert location is not None
            items.append(WriteItem(location, decode_header(frame).key, number, frame))
        if what == "tear":
            self.disk.tear_next = self.random.randrange(sum(len(i.frame) for i in items))
        else:
            # twice: a commit that was outstanding may be the first to fail, and is made good unseen
            self.disk.before = fail_next(what, errno.EIO, times=2)
        # a batch that only adds is durable, and acknowledged, before its commit
        removes = [key_of("unknown")] if what == "commit" else []
        try:
            self.tier.write_batch(items, removes)
        except DiskError:
            pass
        else:
            raise AssertionError(f"{what} failed and nobody said so")
        finally:
            self.disk.before = no_fault

    def restart(self) -> None:
        """After another failure, close or die, and open again; what the log adopted is as durable
        as the rest, and of two frames under one key the index may know the older. A clean
        stop leaves nothing to adopt."""
        self.fail()
        self.restarts += 1
        if stopped := self.restarts % 2 == 0:
            self.tier.close()
        else:
            self.disk.abandon()
        self.tier, recovered = open_log(self.disk)
        there = rows(recovered)
        assert set(self.live) <= set(there)
        assert not stopped or (set(self.live) == set(there) and not recovered.notes)
        self.promise(
            [
                Stored(key, memoryview(load(self.tier, location, length)), location)
                for key, (location, length) in there.items()
            ]
        )


def check(disk: SimDisk, ledger: Ledger, durable: set[bytes], go_on: bool = True) -> Recovered:
    """Open what a crash left: it opens, every frame verifies and is one that was handed in under
    its key, every durable key is there, and (`go_on`) the log goes on and can be opened again."""
    tier, recovered = open_log(disk)
    there = rows(recovered)
    missing = durable - set(there)
    assert not missing, f"{len(missing)} durable objects are gone"
    for key, (location, length) in there.items():
        frame = load(tier, location, length)
        error = verify_frame(frame, key)
        assert error is None, f"{key.hex()}: {error}"
        assert bytes(frame) in ledger.versions[key], "bytes that nobody stored"
    tier.check_integrity()
    if not go_on:
        return recovered
    (new,) = store(tier, [make_frame(key_of("after the crash"), (5000,))])
    tier.close()
    tier, again = open_log(disk)
    assert rows(again) == {**there, new.key: (new.location, new.length)}
    assert (again.adopted, again.dropped, again.cut_bytes, again.notes) == (0, 0, 0, [])
    assert load(tier, new.location, new.length) == new.frame
    tier.close()
    return recovered


def reopened(state: DiskState) -> SimDisk:
    """A machine that starts again with this on its disk."""
    return SimDisk(state)
