"""The tier as a library: durable batches, scattered reads and prefixes, every read verified."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.ssd.load import BATCH, Load, percentile_99
from kvstore.config import SsdConfig
from kvstore.testing.tiers_frames import DESCRIPTOR, NAMESPACE_ID, key_of, make_frame
from kvstore.tiers.base import Location, ReadItem, WriteItem
from kvstore.tiers.dram import DramTier
from kvstore.tiers.frame import decode_header, seal_frame, verify_frame
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import aligned_buffer

_SLACK_BYTES = 512 << 20


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
        while len(self.places) < load.objects:
            items = self._items(0, min(BATCH, load.objects - len(self.places)))
            self._write(items)
            self.places += [(i.key, i.location) for i in items]
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

    def _items(self, slot: int, count: int) -> list[WriteItem]:
        """Frames with new keys, at places of their own."""
        items = []
        for i in range(slot, slot + count):
            self._names += 1
            key = key_of(self._names)
            frame = self._arena[i * self.load.stored : (i + 1) * self.load.stored]
            seal_frame(frame, self._header._replace(key=key))
            location = self.tier.place(len(frame))
            assert location is not None, "the budget is too small for the benchmark"
            items.append(WriteItem(location, key, self.number, frame))
        return items

    def _write(self, items: list[WriteItem]) -> None:
        if any(self.tier.write_batch(items)):
            raise AssertionError("the log refused a frame")

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
            [self._items((n * load.calls + c) * BATCH, BATCH) for c in range(load.calls)]
            for n in range(load.clients)
        ]

        def work(client: int) -> None:
            for items in batches[client]:
                began = time.perf_counter()
                self._write(items)
                times.append((time.perf_counter() - began) * 1e6)

        began = time.perf_counter()
        self._in_threads(work)
        self.tier.refresh()
        seconds = time.perf_counter() - began
        written = load.payload * BATCH * load.calls * load.clients
        self._forget([item for own in batches for items in own for item in items])
        return written / seconds / 1e9, percentile_99(times)

    def _forget(self, items: list[WriteItem]) -> None:
        self.tier.remove([i.key for i in items])
        for item in items:
            self.tier.mark_dead(item.location, len(item.frame))
        for segment in sorted({i.location.segment for i in items}):
            if not self.tier.live_in(segment) and segment == self.tier.victim_segment():
                self.tier.drop_segment(segment)

    def read(self, count: int, adjacent: bool, seconds: float) -> tuple[float, float]:
        """Calls of `count` objects, scattered or one behind the other, each verified: GB/s, and the
        p99 of one object's time from the call to its arrival, µs."""
        load, times, bytes_read = self.load, [], []
        seeds = [self._random.random() for _ in range(load.clients)]

        def work(client: int) -> None:
            random, done = Random(seeds[client]), 0
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends:
                if adjacent:
                    start = random.randrange(load.objects - count + 1)
                    picks = self.places[start : start + count]
                else:
                    picks = random.sample(self.places, count)
                self._call(client, picks, times)
                done += count
            bytes_read.append(done * load.payload)

        took = self._in_threads(work)
        return sum(bytes_read) / took / 1e9, percentile_99(times)

    def _call(self, client: int, picks: list[tuple[bytes, Location]], times: list[float]) -> None:
        stored, room = self.load.stored, self._into[client]
        items = [
            ReadItem(location, room[i * stored : (i + 1) * stored])
            for i, (_, location) in enumerate(picks)
        ]
        began = time.perf_counter()

        def arrived(i: int) -> None:
            times.append((time.perf_counter() - began) * 1e6)
            error = verify_frame(items[i].into, picks[i][0], NAMESPACE_ID)
            if error is not None:
                raise error

        errors = [e for e in self.tier.read_batch(items, arrived) if e is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let go of the directory."""
        self.tier.close()
        self._dram.close()
