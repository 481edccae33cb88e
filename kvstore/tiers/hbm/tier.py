"""The HBM tier: slots in the pools of one or more devices, all allocated once.

Pages are numbered through over the devices, so a slot names its device too; no slot lies on two.
An object is the same frame as in DRAM and on SSD. The host can't look into it: bytes come and go by
copies on a device's streams (`kvstore.tiers.hbm.device`), which `kvstore.migration.hbm_copies`
makes.

The table of generations is host memory, a memfd that readers of this host map: who uses a slot in
place, or has copied it, looks there *afterwards* whether it still was the same object's.
"""

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.tiers.base import PAGE_BYTES, Slot, StaleSlot
from kvstore.tiers.dram.extents import ExtentAllocator
from kvstore.tiers.hbm.device import Device, DeviceError, PoolHandle, Stream, memory_name
from kvstore.tiers.hbm.opened import OpenedHbm

_GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class SharedPools:
    """What another process of this host needs. `generations`: the name of the table's memory
    (`kvstore.tiers.hbm.device.open_memory`), one u64 per page. `pools`: in the order of their
    pages, each behind the one before it."""

    generations: bytes
    pools: tuple[PoolHandle, ...]


class HbmTier:
    """See the module and `PoolTier`. `budget_bytes`: per device, rounded down to pages.

    Raises `DeviceError` where a device has not so much memory.
    """

    def __init__(self, devices: Sequence[Device], budget_bytes: int) -> None:
        pages = budget_bytes // PAGE_BYTES
        if pages < 1 or not devices:
            raise ValueError(f"{len(devices)} pools of {budget_bytes} B hold no page")
        self.devices = tuple(devices)
        self._device_pages = pages
        self._extents = [ExtentAllocator(pages) for _ in devices]
        self._first_pages = [i * pages for i in range(len(devices))]
        self._streams: list[list[Stream]] = [[] for _ in devices]
        self._lock = threading.Lock()
        allocated: list[Device] = []
        try:
            for device in devices:
                device.allocate(pages * PAGE_BYTES)
                allocated.append(device)
            self._fd, self._generations = _table(len(devices) * pages)
        except BaseException:
            for device in allocated:
                device.close()
            raise

    @property
    def name(self) -> str:
        """The devices, for people."""
        return ", ".join(device.name for device in self.devices)

    @property
    def kind(self) -> str:
        """`cuda` or `simulated`."""
        return self.devices[0].kind

    @property
    def budget_bytes(self) -> int:
        return len(self.devices) * self._device_pages * PAGE_BYTES

    @property
    def slot_bytes_max(self) -> int:
        """The largest slot: no object lies on two devices."""
        return self._device_pages * PAGE_BYTES

    @property
    def used_bytes(self) -> int:
        return sum(extents.used_pages for extents in self._extents) * PAGE_BYTES

    def alloc(self, frame_bytes: int) -> Slot | None:
        """A slot on the device that is used least and has a hole for it."""
        if frame_bytes < 1:
            raise ValueError(f"a slot has at least one byte, not {frame_bytes}")
        pages = -(-frame_bytes // PAGE_BYTES)
        for i in sorted(range(len(self._extents)), key=lambda i: self._extents[i].used_pages):
            start = self._extents[i].alloc(pages)
            if start is not None:
                page = self._first_pages[i] + start
                return Slot(page, pages * PAGE_BYTES, self._generations[page])
        return None

    def _device_of(self, page: int) -> int:
        return bisect_right(self._first_pages, page) - 1

    def _pages_at(self, page: int) -> int:
        i = self._device_of(page)
        return self._extents[i].length(page - self._first_pages[i])

    def slot_at(self, page: int) -> Slot:
        pages = self._pages_at(page)
        if not pages:
            raise StaleSlot(f"no slot starts at page {page}")
        return Slot(page, pages * PAGE_BYTES, self._generations[page])

    def generations_of(self, pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        generations: npt.NDArray[np.uint64] = np.frombuffer(self._generations, np.uint64)[pages]
        return generations

    def free(self, slot: Slot) -> None:
        self._check(slot)
        self._generations[slot.page] += 1
        i = self._device_of(slot.page)
        self._extents[i].free(slot.page - self._first_pages[i])

    def _check(self, slot: Slot) -> None:
        if (
            self._pages_at(slot.page) * PAGE_BYTES != slot.length
            or self._generations[slot.page] != slot.generation
        ):
            raise StaleSlot(f"{slot} was freed")

    def place(self, slot: Slot) -> tuple[int, int]:
        """Where a slot lies: which of `devices`, and the offset in its pool. `StaleSlot` after
        `free`."""
        self._check(slot)
        i = self._device_of(slot.page)
        return i, (slot.page - self._first_pages[i]) * PAGE_BYTES

    @contextmanager
    def stream(self, device: int) -> Iterator[Stream]:
        """*Worker.* A stream of one of `devices`, nobody else's meanwhile. Where the block raises,
        the stream is not used again: copies may be left on it."""
        with self._lock:
            idle = self._streams[device]
            stream = idle.pop() if idle else None
        stream = stream or self.devices[device].stream()
        yield stream
        with self._lock:
            self._streams[device].append(stream)

    def share(self) -> SharedPools:
        """For other processes of this host. Raises `DeviceError`."""
        pools = tuple(device.export() for device in self.devices)
        return SharedPools(memory_name(self._fd), pools)

    def view(self) -> OpenedHbm:
        """The pools for readers in this process, who MUST be gone before `close`. Raises
        `DeviceError`."""
        return OpenedHbm([device.pool() for device in self.devices], memory_name(self._fd))

    def check_integrity(self) -> None:
        for extents in self._extents:
            extents.check_integrity()

    def close(self) -> None:
        """No copy may be under way."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._generations.release()
            for device in self.devices:
                with suppress(DeviceError):  # one that failed takes no orders
                    device.close()


def _table(pages: int) -> tuple[int, memoryview]:
    """The memfd of a table of generations, and the table."""
    fd = os.memfd_create("kvstore-hbm-generations", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, pages * _GENERATION_BYTES)
        return fd, memoryview(mmap.mmap(fd, pages * _GENERATION_BYTES)).cast("Q")
    except BaseException:
        os.close(fd)
        raise
