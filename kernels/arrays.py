"""What the codecs take and give: checks that name what is wrong, and the result arrays.

bfloat16 is held as uint16, since NumPy has no such type. From torch without a copy:
``tensor.view(torch.int16).numpy().view(np.uint16)``.
"""

from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kernels.layout import RecordKind

Values = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Records = npt.NDArray[np.uint8]
ValueType = Literal["float32", "bfloat16"]

_Item = TypeVar("_Item", bound=np.generic)

_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(np.uint16)


def for_quantize(kind: RecordKind, x: Values, out: Records | None) -> Records:
    """Check the arguments of a quantisation and return its result array, filled with nothing yet.

    TypeError: not an array, or of another dtype. ValueError: shape, layout, overlap, read-only.
    """
    _check_array("x", x)
    if x.dtype not in (_FLOAT32, _BFLOAT16):
        raise TypeError(f"x is {x.dtype}; pass float32, or bfloat16 held as uint16")
    shape = (*x.shape[:-1], kind.record_bytes(x.shape[-1]))
    return _result(out, shape, np.dtype(np.uint8), x)


def for_dequantize(kind: RecordKind, rec: Records, out_dtype: str, out: Values | None) -> Values:
    """Check the arguments of a dequantisation and return its result array; errors as above."""
    _check_array("rec", rec)
    if rec.dtype != np.uint8:
        raise TypeError(f"rec is {rec.dtype}; pass uint8")
    shape = (*rec.shape[:-1], kind.channels(rec.shape[-1]))
    if out_dtype == "float32":
        return _result(cast("npt.NDArray[np.float32] | None", out), shape, _FLOAT32, rec)
    if out_dtype == "bfloat16":
        return _result(cast("npt.NDArray[np.uint16] | None", out), shape, _BFLOAT16, rec)
    raise ValueError(f"out_dtype {out_dtype!r} is unknown; use 'float32' or 'bfloat16'")


def _check_array(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}; pass a NumPy array")
    if array.ndim == 0:
        raise ValueError(f"{name} has no dimension; its last one must hold a row")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}); "
            "pass np.ascontiguousarray of it"
        )


def _result(
    out: npt.NDArray[_Item] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[_Item],
    source: Values | Records,
) -> npt.NDArray[_Item]:
    if out is None:
        return np.empty(shape, dtype)
    _check_array("out", out)
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}; this result is {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; this result has {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; pass a writable array")
    # Both are contiguous, so that their bounds decide it.
    if np.may_share_memory(out, source):
        raise ValueError("out overlaps the input in memory; pass an array of its own")
    return out
