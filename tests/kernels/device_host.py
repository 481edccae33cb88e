"""The device kernels' own bodies, compiled for the host and run thread by thread.

What runs is `kernels/csrc`, with the launches of `kernels.gpu.plan`; only the entry points differ
(device_emulation.cpp). Threads of a phase run one after the other, in one of three orders, and
shared memory begins as rubbish, so that a missing barrier or an unset byte shows.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np

from kernels.gpu.plan import MOVE_DTYPE, SPAN_DTYPE

CSRC = Path(__file__).parents[2] / "kernels" / "csrc"
EMULATION = Path(__file__).with_name("device_emulation.cpp")
ORDERS = (0, 1, 2)
GUARD_BYTES = 64
GUARD = 0xE7
COMMAND = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra"]
COMMAND += ["-Werror", "-Wno-unknown-pragmas"]


def build(cache: Path, compiler: str = "g++") -> "HostKernels":
    """The kernels, compiled anew only if a source has changed. `cache`: a folder to keep them."""
    sources = [EMULATION, *sorted(CSRC.glob("*.h"))]
    digest = hashlib.sha256(" ".join([compiler, *COMMAND]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = cache / f"device-{digest.hexdigest()[:24]}.so"
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *COMMAND, f"-I{CSRC}", str(EMULATION), "-o", str(own)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        own.replace(library)
    return HostKernels(library)


def has_compiler() -> bool:
    return shutil.which("g++") is not None


class Guarded:
    """A 16-byte aligned array between guards that nobody may touch.

    While there are some, kernels that are run by a plan or a table may touch nothing else.
    """

    alive: ClassVar = weakref.WeakSet()

    def __init__(self, shape, dtype, fill=0xA9):
        dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(shape)) * dtype.itemsize
        self._raw = np.full(self.nbytes + 2 * GUARD_BYTES + 16, GUARD, np.uint8)
        start = GUARD_BYTES + -(self._raw.ctypes.data + GUARD_BYTES) % 16
        self._inside = slice(start, start + self.nbytes)
        self._raw[self._inside] = fill
        self.array = self._raw[self._inside].view(dtype).reshape(shape)
        Guarded.alive.add(self)

    @classmethod
    def of(cls, array):
        self = cls(array.shape, array.dtype)
        self.array[...] = array
        return self

    @property
    def address(self):
        return self._raw.ctypes.data + self._inside.start

    def check(self):
        before, behind = self._raw[: self._inside.start], self._raw[self._inside.stop :]
        assert (before == GUARD).all()
        assert (behind == GUARD).all()


def _pointer(address):
    return ctypes.c_void_p(int(address))


class HostKernels:
    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.take_faults.restype = ctypes.c_ulong

    def _check_faults(self):
        assert self._library.take_faults() == 0, "an address that faults on a device"

    @contextlib.contextmanager
    def _guarded_only(self):
        """Every address outside the guarded arrays is a fault."""
        ranges = [(each.address, each.address + each.nbytes) for each in Guarded.alive]
        flat = np.array(ranges, np.uint64)
        self._library.allow(_pointer(flat.ctypes.data), ctypes.c_uint32(len(ranges)))
        try:
            yield
        finally:
            self._library.allow(None, ctypes.c_uint32(0))

    def convert(self, plan, source, target, order=0):
        """Addresses of a quantisation's or dequantisation's input and output."""
        if plan.rows == 0:
            return
        args = (source, target, plan.rows, plan.channels, plan.tile_rows)
        with self._guarded_only():
            self.run_convert(plan.kernel, plan.blocks, plan.shared_bytes, args, order)

    def run_convert(self, kernel, blocks, shared_bytes, args, order=0):
        source, target, rows, channels, tile_rows = args
        getattr(self._library, kernel)(
            _pointer(source),
            _pointer(target),
            ctypes.c_uint64(int(rows)),
            ctypes.c_uint32(int(channels)),
            ctypes.c_uint32(int(tile_rows)),
            ctypes.c_uint32(blocks),
            ctypes.c_uint32(shared_bytes),
            order,
        )
        self._check_faults()

    def move(self, kernel, table, split, tiles, order=0):
        moves = Guarded.of(np.asarray(table, MOVE_DTYPE))
        with self._guarded_only():
            self.run_move(kernel, (tiles, len(table)), (moves.address, split), order)

    def run_move(self, kernel, grid, args, order=0):
        tiles, count = grid
        moves, split = args
        getattr(self._library, kernel)(
            _pointer(moves),
            ctypes.c_uint32(int(split)),
            ctypes.c_uint32(tiles),
            ctypes.c_uint32(count),
            order,
        )
        self._check_faults()

    def checksum(self, table, digests, order=0):
        spans = Guarded.of(np.asarray(table, SPAN_DTYPE))
        with self._guarded_only():
            self.run_checksum(len(table), (spans.address, digests), order)

    def run_checksum(self, count, args, order=0):
        spans, digests = args
        self._library.checksum(_pointer(spans), _pointer(digests), ctypes.c_uint32(count), order)
        self._check_faults()

    def codes_both_ways(self, kind, scale, x):
        """Codes of float32 values under one scale byte, by records.h and by the device's way."""
        plain, device = np.empty(len(x), np.uint8), np.empty(len(x), np.uint8)
        self._library.codes_both_ways(
            ["nvfp4", "mxfp4", "fp8"].index(kind),
            ctypes.c_uint8(scale),
            _pointer(x.ctypes.data),
            ctypes.c_size_t(len(x)),
            _pointer(plain.ctypes.data),
            _pointer(device.ctypes.data),
        )
        return plain, device
