"""The ways without a tier: LMDB alone, and a file per object.

LMDB reads through the page cache, so its reads are no disk reads where memory is free; it is here
for its writes. Files are written and read with O_DIRECT; a durable one costs a sync of its own.
"""

import os
import time
from pathlib import Path
from random import Random

import lmdb
import numpy as np

from benchmarks.ssd.load import BATCH, Load
from kvstore.testing.tiers_frames import key_of
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.ssd.files import aligned_buffer

_OBJECTS = 256


def _page_bytes(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class Lmdb:
    """Objects as values, a durable transaction per batch."""

    def __init__(self, directory: Path, load: Load) -> None:
        self._env = lmdb.open(str(directory), map_size=4 << 30, writemap=False)
        self._value = np.random.default_rng(0).bytes(load.payload)
        self._random, self._size, self._names = Random(1), load.payload, 0
        self._batches = max(1, _OBJECTS // BATCH)

    def write(self) -> float:
        """GB/s of durable batches; what was written goes again, outside the time."""
        batches = []
        for _ in range(self._batches):
            batches.append([key_of(self._names + i) for i in range(BATCH)])
            self._names += BATCH
        began = time.perf_counter()
        for keys in batches:
            with self._env.begin(write=True) as txn:
                for key in keys:
                    txn.put(key, self._value)
        seconds = time.perf_counter() - began
        self._keys = [key for keys in batches for key in keys]
        return self._size * len(self._keys) / seconds / 1e9

    def read(self) -> float:
        """GB/s of copies out of the map (page cache)."""
        room = np.empty(self._size, np.uint8)
        keys = self._random.sample(self._keys, len(self._keys))
        began = time.perf_counter()
        with self._env.begin(buffers=True) as txn:
            for key in keys:
                np.copyto(room, np.frombuffer(txn.get(key), np.uint8))
        seconds = time.perf_counter() - began
        with self._env.begin(write=True) as txn:
            for key in self._keys:
                txn.delete(key)
        return self._size * len(keys) / seconds / 1e9

    def close(self) -> None:
        """Let go of it."""
        self._env.close()


class Files:
    """A file per object, with O_DIRECT, one after the other."""

    def __init__(self, directory: Path, load: Load) -> None:
        self._directory, self._size = directory, load.payload
        self._room = aligned_buffer(_page_bytes(load.payload))
        np.frombuffer(self._room, np.uint8)[:] = np.random.default_rng(0).integers(
            0, 256, len(self._room), np.uint8
        )
        self._random = Random(2)
        self._paths = [directory / key_of(i).hex() for i in range(_OBJECTS)]

    def write(self) -> float:
        """GB/s, each file synced, its name once at the end."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        began = time.perf_counter()
        for path in self._paths:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.pwrite(fd, self._room, 0)
            os.fdatasync(fd)
            os.close(fd)
        fd = os.open(self._directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        return self._size * len(self._paths) / (time.perf_counter() - began) / 1e9

    def read(self) -> float:
        """GB/s in any order."""
        paths = self._random.sample(self._paths, len(self._paths))
        began = time.perf_counter()
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [self._room], 0)
            os.close(fd)
        return self._size * len(paths) / (time.perf_counter() - began) / 1e9
