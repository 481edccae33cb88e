"""Which implementation converts records, and the one place where a conversion is started."""

import os
import warnings
from typing import Final, Literal

from kernels import arrays, reference
from kernels.arrays import Records, Values
from kernels.layout import RecordKind, record_kind

try:
    import kernels._records as _records
except ImportError as error:
    _extension_error: ImportError | None = error
else:
    _extension_error = None

BackendName = Literal["avx2", "portable", "numpy"]

BACKEND_VARIABLE: Final = "KERNELS_BACKEND"

# Bytes of values that the NumPy backend converts at once: its temporaries then fit in the cache.
_NUMPY_CHUNK_BYTES: Final = 1 << 18


def available_backends() -> tuple[str, ...]:
    """What can run here, fastest first; NumPy always can."""
    compiled = _records.backends() if _extension_error is None else ()
    return (*compiled, "numpy")


def choose_backend(forced: str | None) -> str:
    """The backend of that name, or the fastest if None or empty.

    ValueError: no such name. RuntimeError: it can't run here. RuntimeWarning: nothing was forced
    and the compiled extension is missing.
    """
    available = available_backends()
    if not forced:
        if _extension_error is not None:
            warnings.warn(
                f"kernels: the compiled record codecs can't be used ({_extension_error}); running "
                "the slow NumPy path. Install a C++ compiler and reinstall to get them.",
                RuntimeWarning,
                stacklevel=2,
            )
        return available[0]
    if forced not in ("avx2", "portable", "numpy"):
        raise ValueError(f"{BACKEND_VARIABLE}={forced!r}: use avx2, portable or numpy")
    if forced not in available:
        reason = _extension_error or "this processor lacks it"
        raise RuntimeError(
            f"{BACKEND_VARIABLE}={forced!r} can't run here ({reason}); "
            f"available: {', '.join(available)}"
        )
    return forced


_backend: Final = choose_backend(os.environ.get(BACKEND_VARIABLE))


def backend() -> str:
    """What converts records in this process: ``avx2``, ``portable`` or ``numpy``."""
    return _backend


def quantize(
    kind: str, x: Values, out: Records | None = None, *, backend: str = _backend
) -> Records:
    """Rows of values to records of that kind; `kernels` says the rest."""
    checked_kind = record_kind(kind)
    result = arrays.for_quantize(checked_kind, x, out)
    if backend == "numpy":
        _numpy_rows(checked_kind, x, result, quantizing=True)
    else:
        _records.quantize(kind, backend, x, result, x.shape[-1])
    return result


def dequantize(
    kind: str,
    rec: Records,
    out_dtype: str = "float32",
    out: Values | None = None,
    *,
    backend: str = _backend,
) -> Values:
    """Records of that kind to rows of values; `kernels` says the rest."""
    checked_kind = record_kind(kind)
    result = arrays.for_dequantize(checked_kind, rec, out_dtype, out)
    if backend == "numpy":
        _numpy_rows(checked_kind, result, rec, quantizing=False)
    else:
        _records.dequantize(kind, backend, rec, result, result.shape[-1])
    return result


def _numpy_rows(kind: RecordKind, values: Values, records: Records, *, quantizing: bool) -> None:
    values = values.reshape(-1, values.shape[-1])
    records = records.reshape(-1, records.shape[-1])
    step = max(1, _NUMPY_CHUNK_BYTES // values[:1].nbytes) if len(values) else 1
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        if quantizing:
            reference.quantize_into(kind, values[rows], records[rows])
        else:
            reference.dequantize_into(kind, records[rows], values[rows])
