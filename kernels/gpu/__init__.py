"""The record codecs, page gather and scatter, and checksums on a CUDA device, through CuPy.

Importing this needs neither CuPy nor a device; the first call does, and `GpuUnavailableError` says
what is missing. The kernels are compiled at run time (NVRTC) from `kernels/csrc` and give the bytes
of `kernels.reference` and `kernels.engine_reference`, bit for bit.

Arrays are CuPy's, or anything with ``__cuda_array_interface__`` (a torch tensor), C-contiguous and
16-byte aligned; bfloat16 is held as uint16. Work is queued on the current CuPy stream of the
arrays' device and nothing waits for it. With ``out`` given, or through `PageMoves` and
`Checksums`, a launch allocates nothing, so that it can be captured in a CUDA graph.
"""

from kernels.gpu.checksums import Checksums
from kernels.gpu.convert import dequantize, quantize
from kernels.gpu.page_moves import PageMoves, PoolMoves, pool_moves
from kernels.gpu.runtime import GpuUnavailableError, available, check, on_stream, warm_up

__all__ = [
    "Checksums",
    "GpuUnavailableError",
    "PageMoves",
    "PoolMoves",
    "available",
    "check",
    "dequantize",
    "on_stream",
    "pool_moves",
    "quantize",
    "warm_up",
]
