"""The HBM tier as a client on the same host sees it: pools read in place, opened by handle where
they are another process's.

A block is found by its frame's offset, numbered through over the pools, and its slot's generation.
The store changes the generation before it gives the slot to anybody else; so what was made of a
slot's bytes counts only if the generation is the same *afterwards*.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.hbm.device import (
    CUDA,
    SIMULATED,
    DeviceError,
    OpenedPool,
    PoolHandle,
    open_memory,
)
from kvstore.tiers.hbm.simulated import SimulatedPool


def open_pool(handle: PoolHandle) -> OpenedPool:
    """Raises `DeviceError` where it can't be opened, or the kind is unknown here."""
    if handle.kind == SIMULATED:
        return SimulatedPool(handle)
    if handle.kind == CUDA:
        from kvstore.tiers.hbm.cupy_device import IpcPool

        return IpcPool(handle)
    raise DeviceError(f"a pool of the unknown kind {handle.kind!r}")


class OpenedHbm:
    """All pools, in the order of their pages, and their generations, by the name of the table's
    memory. Raises `DeviceError` where that can't be mapped."""

    def __init__(self, pools: Sequence[OpenedPool], generations: bytes) -> None:
        starts = [0]
        for pool in pools:
            starts.append(starts[-1] + pool.handle.size_bytes)
        self._starts = starts
        self._table = _map_table(generations, starts[-1] // PAGE_BYTES)
        self.pools = list(pools)

    @classmethod
    def by_handles(cls, handles: Sequence[PoolHandle], generations: bytes) -> "OpenedHbm":
        """Another process's. Raises `DeviceError` where one can't be opened."""
        pools: list[OpenedPool] = []
        try:
            for handle in handles:
                pools += [open_pool(handle)]
            return cls(pools, generations)
        except BaseException as e:
            for pool in pools:
                pool.close()
            if isinstance(e, Exception) and not isinstance(e, DeviceError):
                raise DeviceError(f"a pool can't be opened: {e!r}") from e
            raise

    @property
    def kind(self) -> str:
        """`cuda` or `simulated`."""
        return self.pools[0].handle.kind

    def place(self, offset: int, length: int) -> tuple[OpenedPool, int] | None:
        """The pool in which a range lies, and where; None where no frame can lie there."""
        i = bisect_right(self._starts, offset) - 1
        if offset % PAGE_BYTES or not 0 <= i < len(self.pools):
            return None
        if offset + length > self._starts[i + 1]:
            return None
        return self.pools[i], offset - self._starts[i]

    def array(self, offset: int, length: int) -> Any:
        """The bytes in place, see `OpenedPool`; None where no frame can lie there."""
        found = self.place(offset, length)
        return None if found is None else found[0].array(found[1], length)

    def intact(self, places: Sequence[tuple[int, int]]) -> bool:
        """Whether all slots, by offset and generation, still are the same blocks'."""
        table = np.array(places, np.uint64).reshape(-1, 2)
        pages = table[:, 0] // PAGE_BYTES
        return bool((pages < len(self._table)).all() and (self._table[pages] == table[:, 1]).all())

    def close(self) -> None:
        """Let go of the pools; arrays of them MUST be gone."""
        for pool in self.pools:
            pool.close()
        self.pools = []


def _map_table(name: bytes, pages: int) -> Any:
    try:
        fd = open_memory(name)
        try:
            if os.fstat(fd).st_size < pages * 8:
                raise ValueError(f"a table of fewer than {pages} generations")
            return np.frombuffer(mmap.mmap(fd, pages * 8, prot=mmap.PROT_READ), "<u8")
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        raise DeviceError(f"the generations can't be mapped: {e}") from e
