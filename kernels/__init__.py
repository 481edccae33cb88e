"""FP4 and FP8 cache-record codecs (ds41f §4), on the CPU.

Three kinds of record, `nvfp4` (global KV), `mxfp4` (index keys) and `fp8` (window KV), each with a
quantise and a dequantise function; `kernels.layout` draws their bytes.

Arrays. Values are C-contiguous NumPy arrays [..., D] of float32, or of bfloat16 held as uint16
(from torch: ``t.view(torch.int16).numpy().view(np.uint16)``). Records are uint8
[..., record_bytes(kind, D)]. Leading dimensions are free and may be empty; D is a multiple of 16
(`nvfp4`) or 32. Every function takes ``out``, an array of the result's shape and dtype to fill and
return.

Values. The result is a function of the input alone, the same bits from every backend. A code's
sign bit is the input's, at zero too. Magnitudes beyond the largest code saturate. An infinity
saturates as well: its group's scale is that of the largest finite float. A NaN makes its whole
group NaN: the scale byte is NaN (e4m3 0x7f, ue8m0 0xff) and the codes are zero. Dequantised values
are rounded once to float32, which changes nothing in a record that quantising gave except that a
product beyond float32's range is an infinity; then half to even to bfloat16. A NaN reads back as
the positive quiet one (0x7fc00000, 0x7fc0).

Errors. TypeError for what is no array or has another dtype; ValueError for a shape, a memory
layout, an overlap or a read-only ``out`` that can't be right. Nothing was written then.

Backends. `avx2` and `portable` are the compiled extension, which releases the interpreter lock;
`numpy` runs where it could not be built and says so once. `KERNELS_BACKEND` in the environment
forces one. `kernels.reference` is the oracle, with the same six names.
"""

from kernels import reference
from kernels.arrays import Records, Values, ValueType
from kernels.codec import backend, dequantize, quantize
from kernels.layout import record_bytes

__all__ = [
    "backend",
    "fp8_dequantize",
    "fp8_quantize",
    "mxfp4_dequantize",
    "mxfp4_quantize",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "record_bytes",
    "reference",
]


def nvfp4_quantize(x: Values, out: Records | None = None) -> Records:
    """Global KV entries [..., D] to records [..., D/2 + D/16]: e2m1 codes, e4m3 scales per 16."""
    return quantize("nvfp4", x, out)


def nvfp4_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """The values [..., D] that `nvfp4_quantize` kept; exact in bfloat16 too."""
    return dequantize("nvfp4", rec, out_dtype, out)


def mxfp4_quantize(x: Values, out: Records | None = None) -> Records:
    """Index keys [..., D] to records [..., D/2 + D/32]: e2m1 codes, ue8m0 scales per 32."""
    return quantize("mxfp4", x, out)


def mxfp4_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """The values [..., D] that `mxfp4_quantize` kept; exact in bfloat16 too."""
    return dequantize("mxfp4", rec, out_dtype, out)


def fp8_quantize(x: Values, out: Records | None = None) -> Records:
    """Window KV rows [..., D] to records [..., D + D/32]: e4m3 codes, ue8m0 scales per 32."""
    return quantize("fp8", x, out)


def fp8_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """The values [..., D] that `fp8_quantize` kept; exact in bfloat16 too."""
    return dequantize("fp8", rec, out_dtype, out)
