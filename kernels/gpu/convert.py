"""Values to records and back on a device."""

from typing import Any

import numpy as np

from kernels.gpu import device_arrays, runtime
from kernels.gpu.plan import ConvertPlan, convert_plan
from kernels.layout import record_kind


def quantize(kind: str, x: Any, out: Any = None) -> Any:
    """Rows of values [..., D] to records [..., record_bytes(kind, D)] of that kind.

    x: float32, or bfloat16 held as uint16. D is a multiple of 64 (`nvfp4`) or 128. Returns `out`,
    or a new uint8 array. Errors as in `kernels.quantize`; `GpuUnavailableError`.
    """
    checked_kind = record_kind(kind)
    x = device_arrays.on_device("x", x, [np.float32, np.uint16])
    shape = (*x.shape[:-1], checked_kind.record_bytes(x.shape[-1]))
    values = "float32" if x.dtype == np.float32 else "bfloat16"
    plan = convert_plan(checked_kind, values, _rows(x.shape), x.shape[-1], quantizing=True)
    result = device_arrays.result_array(out, shape, np.uint8, x)
    _launch(plan, x, result)
    return result


def dequantize(kind: str, rec: Any, out_dtype: str = "bfloat16", out: Any = None) -> Any:
    """Records of that kind to rows of float32, or of bfloat16 held as uint16; errors as above."""
    checked_kind = record_kind(kind)
    if out_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"out_dtype {out_dtype!r} is unknown; use 'float32' or 'bfloat16'")
    rec = device_arrays.on_device("rec", rec, [np.uint8])
    channels = checked_kind.channels(rec.shape[-1])
    plan = convert_plan(checked_kind, out_dtype, _rows(rec.shape), channels, quantizing=False)
    dtype: type[np.generic] = np.float32 if out_dtype == "float32" else np.uint16
    result = device_arrays.result_array(out, (*rec.shape[:-1], channels), dtype, rec)
    _launch(plan, rec, result)
    return result


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows


def _launch(plan: ConvertPlan, source: Any, result: Any) -> None:
    if plan.rows == 0:
        return
    runtime.launch(
        source.device.id,
        plan.kernel,
        (plan.blocks,),
        (
            source,
            result,
            np.uint64(plan.rows),
            np.uint32(plan.channels),
            np.uint32(plan.tile_rows),
        ),
        plan.shared_bytes,
    )
