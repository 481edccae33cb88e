"""xxh3-128 of sections where they lie, so that they need not pass the host to be verified."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kernels.gpu import device_arrays, runtime
from kernels.gpu.device_table import DeviceTable
from kernels.gpu.plan import SPAN_DTYPE, span_table

DIGEST_BYTES: Final = 16


class Checksums:
    """Launches that hash up to `capacity` runs of bytes of one device.

    `digests`: uint8 [capacity, 16] on the device, filled by `run`: xxh3-128 with seed 0 in its
    canonical form, the bytes of ``xxhash.xxh3_128_digest``. Load, then run, on one stream; captured
    as in `PageMoves`.
    """

    def __init__(self, capacity: int, *, device: int = 0) -> None:
        self._device = device
        self._table = DeviceTable(SPAN_DTYPE, capacity, device)
        self._arrays: tuple[Any, ...] = ()
        cp = runtime.cupy()
        with cp.cuda.Device(device):
            self.digests = cp.zeros((capacity, DIGEST_BYTES), np.uint8)

    def warm_up(self) -> None:
        """Compile and load the kernel."""
        runtime.warm_up(["checksum"], self._device)

    def load(self, runs: Sequence[Any]) -> None:
        """What the next runs hash: uint8 arrays of 256 bytes to 1 GiB, multiples of 16.

        They are kept alive until the next load. TypeError, ValueError: what is no such array, on
        another device, or too many.
        """
        arrays = [device_arrays.on_device("run", run, [np.uint8]) for run in runs]
        for array in arrays:
            device_arrays.same_device("run", array, self.digests)
        addresses = [int(array.data.ptr) for array in arrays]
        self._table.load(span_table(addresses, [array.nbytes for array in arrays]))
        self._arrays = tuple(arrays)

    def run(self) -> None:
        """Queue the hashing of what is loaded."""
        count = self._table.launch_entries()
        if count:
            runtime.launch(self._device, "checksum", (count,), (self._table.array, self.digests))
