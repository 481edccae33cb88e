"""The tier as a library: durable batches, scattered reads and prefixes, every read verified.

The log is written by one hand, as in the store: of several clients, one writes what has gathered
from all, up to `migration.write_batch_bytes_max`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.ssd.load import BATCH, Load, percentile_99
from kvstore.config import MigrationConfig, SsdConfig
from kvstore.testing.tiers_frames import DESCRIPTOR, NAMESPACE_ID, key_of, make_frame
from kvstore.tiers.base import Location, ReadItem, WriteItem
from kvstore.tiers.dram import DramTier
from kvstore.tiers.frame import decode_header, seal_frame, verify_frame
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import aligned_buffer

_SLACK_BYTES = 512 << 20
_WRITE_BYTES_MAX = MigrationConfig().write_batch_bytes_max
_CALLS = 128
"""Of one client, made ready before the time: what is measured is the tier and not its caller."""
_Call = tuple[list[ReadItem], list[bytes]]


@dataclass(slots=True)
class _Put:
    """One client's batch: keys and sealed frames, and whether they are durable."""

    frames: list[tuple[bytes, memoryview]]
    done: bool = False


class Log:
    """A store in `directory` with `load.objects` frames in it."""

    def __init__(self, directory: Path, load: Load) -> None:
        self.load = load
        size = load.stored * (load.objects + load.calls * load.clients * BATCH)
        config = SsdConfig(
            budget_bytes=size + _SLACK_BYTES, free_floor_bytes=0, queue_depth_max=load.depth
        )
        self.tier, _ = SsdTier.open(directory, config)
        self.number = self.tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
        self._names = 0
        self._arena = aligned_buffer(load.stored * BATCH * load.calls * load.clients)
        self._fill_arena()
        self.places: list[tuple[bytes, Location]] = []
        self._waiting: list[_Put] = []
        self._line, self._hand = threading.Lock(), threading.Lock()
        self._written: list[WriteItem] = []
        while len(self.places) < load.objects:
            self._put(_Put(self._frames(0, min(BATCH, load.objects - len(self.places)))))
            self.places += [(i.key, i.location) for i in self._written]
            self._written.clear()
        room = load.stored * BATCH
        self._dram = DramTier(max(32 << 20, room * load.clients))
        slots = [self._dram.alloc(room) for _ in range(load.clients)]
        self._into = [self._dram.view(slot) for slot in slots if slot is not None]
        self._random = Random(0)

    def _fill_arena(self) -> None:
        stored = self.load.stored
        first = make_frame(key_of(0), self.load.sections)
        target = np.frombuffer(self._arena, np.uint8)[: len(self._arena) // stored * stored]
        target.reshape(-1, stored)[:] = np.frombuffer(first, np.uint8)[:stored]
        self._header = decode_header(first)

    def _frames(self, slot: int, count: int) -> list[tuple[bytes, memoryview]]:
        """Sealed frames with new keys."""
        frames = []
        for i in range(slot, slot + count):
            self._names += 1
            key = key_of(self._names)
            frame = self._arena[i * self.load.stored : (i + 1) * self.load.stored]
            seal_frame(frame, self._header._replace(key=key))
            frames.append((key, frame))
        return frames

    def _put(self, put: _Put) -> None:
        """Make a batch durable, with what others gave meanwhile, or by somebody who did so."""
        with self._line:
            self._waiting.append(put)
        most = max(1, _WRITE_BYTES_MAX // (self.load.stored * BATCH))
        with self._hand:
            while not put.done:
                with self._line:
                    puts, self._waiting = self._waiting[:most], self._waiting[most:]
                self._write([frame for each in puts for frame in each.frames])
                for each in puts:
                    each.done = True

    def _write(self, frames: list[tuple[bytes, memoryview]]) -> None:
        items = []
        for key, frame in frames:
            location = self.tier.place(len(frame))
            assert location is not None, "the budget is too small for the benchmark"
            items.append(WriteItem(location, key, self.number, frame))
        if any(self.tier.write_batch(items)):
            raise AssertionError("the log refused a frame")
        self._written += items

    def _in_threads(self, work: Callable[[int], None]) -> float:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, self.load.clients)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def write(self) -> tuple[float, float]:
        """Durable batches of `BATCH` objects: GB/s until the index has them all too, and the p99 of
        one batch's time, µs."""
        load, times = self.load, []
        batches = [
            [_Put(self._frames((n * load.calls + c) * BATCH, BATCH)) for c in range(load.calls)]
            for n in range(load.clients)
        ]

        def work(client: int) -> None:
            for put in batches[client]:
                began = time.perf_counter()
                self._put(put)
                times.append((time.perf_counter() - began) * 1e6)

        began = time.perf_counter()
        self._in_threads(work)
        self.tier.refresh()
        seconds = time.perf_counter() - began
        written = load.payload * BATCH * load.calls * load.clients
        self._forget()
        return written / seconds / 1e9, percentile_99(times)

    def _forget(self) -> None:
        items, self._written = self._written, []
        self.tier.remove([i.key for i in items])
        for item in items:
            self.tier.mark_dead(item.location, len(item.frame))
        for segment in sorted({i.location.segment for i in items}):
            if not self.tier.live_in(segment) and segment == self.tier.victim_segment():
                self.tier.drop_segment(segment)

    def read(self, count: int, adjacent: bool, seconds: float) -> tuple[float, float]:
        """Calls of `count` objects, scattered or one behind the other, each verified: GB/s, and the
        p99 of one object's time from the call to its arrival, µs."""
        load, times, bytes_read = self.load, list[float](), list[int]()
        calls = [self._calls(client, count, adjacent) for client in range(load.clients)]

        def work(client: int) -> None:
            done, ends = 0, time.perf_counter() + seconds
            for items, keys in cycle(calls[client]):
                self._call(items, keys, times)
                done += count
                if time.perf_counter() > ends:
                    break
            bytes_read.append(done * load.payload)

        took = self._in_threads(work)
        return sum(bytes_read) / took / 1e9, percentile_99(times)

    def _calls(self, client: int, count: int, adjacent: bool) -> list[_Call]:
        random, load, room = self._random, self.load, self._into[client]
        rooms = [room[i * load.stored : (i + 1) * load.stored] for i in range(count)]
        calls = []
        for _ in range(_CALLS):
            if adjacent:
                start = random.randrange(load.objects - count + 1)
                picks = self.places[start : start + count]
            else:
                picks = random.sample(self.places, count)
            items = [ReadItem(at, into) for (_, at), into in zip(picks, rooms, strict=True)]
            calls.append((items, [key for key, _ in picks]))
        return calls

    def _call(self, items: list[ReadItem], keys: list[bytes], times: list[float]) -> None:
        began = time.perf_counter()

        def arrived(i: int) -> None:
            times.append((time.perf_counter() - began) * 1e6)
            error = verify_frame(items[i].into, keys[i], NAMESPACE_ID)
            if error is not None:
                raise error

        errors = [e for e in self.tier.read_batch(items, arrived) if e is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let go of the directory."""
        self.tier.close()
        self._dram.close()
