"""Checks of arrays on a device; messages name what is wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.engine_records import VECTOR_BYTES
from kernels.gpu import runtime


def on_device(name: str, array: Any, dtypes: Sequence[type[np.generic]]) -> Any:
    """The array as CuPy's, without a copy.

    TypeError: on the host, or of another dtype. ValueError: no dimension, not C-contiguous, not
    aligned to 16 bytes.
    """
    cp = runtime.cupy()
    if not isinstance(array, cp.ndarray):
        if not hasattr(array, "__cuda_array_interface__"):
            raise TypeError(f"{name} is a {type(array).__name__}; pass an array on a CUDA device")
        array = cp.asarray(array)
    if array.dtype not in [np.dtype(d) for d in dtypes]:
        wanted = " or ".join(np.dtype(d).name for d in dtypes)
        raise TypeError(f"{name} is {array.dtype}; pass {wanted} (bfloat16 is held as uint16)")
    if array.ndim == 0:
        raise ValueError(f"{name} has no dimension; its last one must hold a row")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}); "
            "pass ascontiguousarray of it"
        )
    if array.size and array.data.ptr % VECTOR_BYTES:
        raise ValueError(
            f"{name} begins at {array.data.ptr:#x}; a device needs a multiple of {VECTOR_BYTES}"
        )
    return array


def result_array(out: Any, shape: tuple[int, ...], dtype: type[np.generic], source: Any) -> Any:
    """`out` if it can hold the result, or a new array on the source's device. Errors as above."""
    cp = runtime.cupy()
    if out is None:
        with cp.cuda.Device(source.device.id):
            return cp.empty(shape, dtype)
    out = on_device("out", out, [dtype])
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; this result has {shape}")
    same_device("out", out, source)
    if overlap(out, source):
        raise ValueError("out overlaps the input in memory; pass an array of its own")
    return out


def same_device(name: str, array: Any, other: Any) -> None:
    """ValueError: the two are on different devices."""
    if array.device.id != other.device.id:
        raise ValueError(
            f"{name} is on device {array.device.id}, its partner on device {other.device.id}"
        )


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory."""
    if not a.size or not b.size:
        return False
    start, other = int(a.data.ptr), int(b.data.ptr)
    return bool(start < other + b.nbytes and other < start + a.nbytes)
