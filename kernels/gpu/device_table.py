"""A table on the device that a captured launch reads: filled anew between replays of its graph."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.gpu import runtime


class DeviceTable:
    """Room for `capacity` entries on a device and, pinned, on the host. Entries start as zeros."""

    def __init__(self, dtype: np.dtype[Any], capacity: int, device: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity {capacity}: make room for at least one entry")
        cp = runtime.cupy()
        self.capacity = capacity
        self.count = 0
        self._device = device
        nbytes = capacity * dtype.itemsize
        with cp.cuda.Device(device):
            self.array = cp.zeros(nbytes, np.uint8)
            self._copied = cp.cuda.Event(disable_timing=True)
            self._pinned = cp.cuda.alloc_pinned_memory(nbytes)
        self._staged: npt.NDArray[np.void] = np.frombuffer(self._pinned, dtype, capacity)
        self._staged[...] = 0

    def load(self, entries: npt.NDArray[np.void]) -> None:
        """Queue the copy of these entries, and zeros behind them, on the current stream.

        Waits until an earlier load has left the host. ValueError: more than the capacity.
        RuntimeError: the stream is being captured.
        """
        if len(entries) > self.capacity:
            raise ValueError(f"{len(entries)} entries: this table has room for {self.capacity}")
        if entries.dtype != self._staged.dtype:
            raise TypeError(f"entries are {entries.dtype}; this table holds {self._staged.dtype}")
        stream = runtime.current_stream(self._device)
        if stream.is_capturing():
            raise RuntimeError("load the table before the capture and between replays, not in it")
        self._copied.synchronize()
        self._staged[: len(entries)] = entries
        self._staged[len(entries) :] = 0
        self.count = len(entries)
        address = self._staged.__array_interface__["data"][0]
        with runtime.cupy().cuda.Device(self._device):
            self.array.data.copy_from_host_async(address, self.array.nbytes, stream)
            self._copied.record(stream)

    def launch_entries(self) -> int:
        """How many entries a launch must cover: in a capture, all that may be loaded later."""
        capturing = runtime.current_stream(self._device).is_capturing()
        return self.capacity if capturing else self.count
