"""The record codecs in NumPy: the oracle that every other implementation must equal bit for bit.

Written from ds41f §4 and the number formats' definitions, for reading before speed. `kernels` says
what the functions take and how they treat NaN and infinity.

It needs NumPy's ordinary arithmetic: a thread that flushes subnormals
(``torch.set_flush_denormal(True)``) gets other bytes for magnitudes below 2^-126.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels import arrays
from kernels.arrays import Records, Values, ValueType
from kernels.layout import FP8, MXFP4, NVFP4, RecordKind

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_FLOAT32_MANTISSA_BITS = 23
_FLOAT32_BIAS = 127
_UE8M0_BIAS = 127
_E4M3_NAN = 0x7F
_UE8M0_NAN = 0xFF


@dataclass(frozen=True)
class _SmallFloat:
    """A sign, an exponent and a mantissa, with subnormals as in IEEE 754."""

    exponent_bits: int
    mantissa_bits: int
    largest: np.float32

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def exponent_min(self) -> int:
        """Of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    def encode(self, x: _Floats) -> _Bytes:
        """Codes of x, half to even, saturating; x is no NaN."""
        magnitude = np.minimum(np.abs(x), self.largest)
        exponent = (magnitude.view(np.int32) >> _FLOAT32_MANTISSA_BITS) - _FLOAT32_BIAS
        exponent = np.maximum(exponent, self.exponent_min)
        step = _power_of_two(exponent - self.mantissa_bits)
        steps = np.rint(magnitude / step).astype(np.int32)
        code = steps + ((exponent - self.exponent_min) << self.mantissa_bits)
        sign: _Bytes = np.signbit(x) * np.uint8(self.sign_bit)
        signed: _Bytes = code.astype(np.uint8) | sign
        return signed

    def values(self) -> _Floats:
        """The value of every code, the sign in the upper half; beyond the largest comes NaN."""
        code = np.arange(self.sign_bit)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent == 0, 0, 1) + mantissa / (1 << self.mantissa_bits)
        value = np.ldexp(significand, np.maximum(exponent, 1) - 1 + self.exponent_min)
        magnitude = np.where(value > self.largest, np.nan, value).astype(np.float32)
        return np.concatenate([magnitude, -magnitude])


def _power_of_two(exponent: npt.NDArray[np.int32]) -> _Floats:
    """2^exponent for exponents of normal numbers."""
    return ((exponent + _FLOAT32_BIAS) << _FLOAT32_MANTISSA_BITS).view(np.float32)


_E2M1 = _SmallFloat(2, 1, largest=np.float32(6))
_E4M3 = _SmallFloat(4, 3, largest=np.float32(448))

_E4M3_VALUES = _E4M3.values()
_UE8M0_VALUES = np.append(2.0 ** (np.arange(255) - _UE8M0_BIAS), np.nan).astype(np.float32)
# What the two channels of a byte hold, the low nibble's first.
_E2M1_PAIRS = np.stack([np.tile(_E2M1.values(), 16), np.repeat(_E2M1.values(), 16)], axis=-1)


# ---- scales: amax [..., groups], finite and not negative, to (bytes, values) -----------------


def _e4m3_scale(amax: _Floats) -> tuple[_Bytes, _Floats]:
    """e4m3_rne(max(amax, 6·2^-9) / 6), saturating at 448."""
    floor = np.float32(6 * 2.0**-9)
    code = _E4M3.encode(np.divide(np.maximum(amax, floor), _E2M1.largest, dtype=np.float32))
    return code, _E4M3_VALUES[code]


def _ue8m0_scale(amax: _Floats, floor: np.float32, largest: np.float32) -> tuple[_Bytes, _Floats]:
    """2^ceil(log2(max(amax, floor) / largest)), the exponent from the quotient's own bits."""
    fraction, exponent = np.frexp(np.maximum(amax, floor) / largest)
    ceiling = np.where(fraction == np.float32(0.5), exponent - 1, exponent)
    code = (ceiling + _UE8M0_BIAS).astype(np.uint8)
    return code, _UE8M0_VALUES[code]


def _scale(kind: RecordKind, amax: _Floats) -> tuple[_Bytes, _Floats]:
    if kind == NVFP4:
        return _e4m3_scale(amax)
    if kind == MXFP4:
        return _ue8m0_scale(amax, np.float32(6 * 2.0**-126), _E2M1.largest)
    return _ue8m0_scale(amax, np.float32(1e-4), _E4M3.largest)


# ---- rows ------------------------------------------------------------------------------------


def _codes(kind: RecordKind, scaled: _Floats) -> _Bytes:
    """Codes as they lie in the record: bytes, or nibbles with the even channel low."""
    if kind.code_bits == 8:
        return _E4M3.encode(scaled)
    code = _E2M1.encode(scaled)
    packed: _Bytes = code[..., 0::2] | code[..., 1::2] << np.uint8(4)
    return packed


def _decoded(kind: RecordKind, codes: _Bytes) -> _Floats:
    """The codes' values before the scale; one more dimension, of the codes in a byte."""
    return np.take(_E4M3_VALUES if kind.code_bits == 8 else _E2M1_PAIRS, codes, axis=0)


def _to_float32(x: Values) -> _Floats:
    if x.dtype == np.float32:
        return x.astype(np.float32, copy=False)
    return (x.astype(np.uint32) << 16).view(np.float32)


def e4m3_values(codes: _Bytes) -> _Floats:
    """What e4m3 codes stand for; 0x7f and 0xff are NaN."""
    values: _Floats = _E4M3_VALUES[codes]
    return values


def e4m3_codes(x: _Floats) -> _Bytes:
    """The nearest e4m3 codes, half to even, saturating; of NaN, any."""
    return _E4M3.encode(np.where(np.isnan(x), np.float32(0), x))


def e2m1_codes(x: _Floats) -> _Bytes:
    """The nearest e2m1 codes, one per byte; as `e4m3_codes`."""
    return _E2M1.encode(np.where(np.isnan(x), np.float32(0), x))


def e2m1_values(codes: _Bytes) -> _Floats:
    """What e2m1 codes, one per byte, stand for."""
    values: _Floats = _E2M1.values()[codes]
    return values


def ue8m0_values(scales: _Bytes) -> _Floats:
    """What ue8m0 scale bytes stand for; 0xff is NaN."""
    values: _Floats = _UE8M0_VALUES[scales]
    return values


def to_bfloat16(x: _Floats) -> npt.NDArray[np.uint16]:
    """Round half to even; every NaN becomes 0x7fc0."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def quantize_into(kind: RecordKind, x: Values, out: Records) -> None:
    """Fill the records [..., record bytes] from x [..., D]; both as `arrays` has checked them."""
    grouped = _to_float32(x).reshape(*x.shape[:-1], x.shape[-1] // kind.group, kind.group)
    amax = np.abs(grouped).max(axis=-1)
    no_number = np.isnan(amax)
    finite = np.clip(np.where(no_number, np.float32(0), amax), None, np.finfo(np.float32).max)
    scale_bytes, scales = _scale(kind, finite)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        scaled = grouped / scales[..., None]
    scaled[no_number] = 0
    codes = kind.code_bytes(x.shape[-1])
    out[..., :codes] = _codes(kind, scaled.reshape(x.shape))
    nan_byte = _E4M3_NAN if kind == NVFP4 else _UE8M0_NAN
    out[..., codes:] = np.where(no_number, np.uint8(nan_byte), scale_bytes)


def dequantize_into(kind: RecordKind, rec: Records, out: Values) -> None:
    """Fill out [..., D] from the records; both as `arrays` has checked them."""
    codes = kind.code_bytes(out.shape[-1])
    scale_bytes = rec[..., codes:]
    scales = (_E4M3_VALUES if kind == NVFP4 else _UE8M0_VALUES)[scale_bytes]
    decoded = _decoded(kind, rec[..., :codes]).reshape(*scale_bytes.shape, kind.group)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        values = (decoded * scales[..., None]).reshape(out.shape)
    values[np.isnan(values)] = np.nan
    out[...] = values if out.dtype == np.float32 else to_bfloat16(values)


def _quantize(kind: RecordKind, x: Values, out: Records | None) -> Records:
    result = arrays.for_quantize(kind, x, out)
    quantize_into(kind, x, result)
    return result


def _dequantize(kind: RecordKind, rec: Records, out_dtype: str, out: Values | None) -> Values:
    result = arrays.for_dequantize(kind, rec, out_dtype, out)
    dequantize_into(kind, rec, result)
    return result


def nvfp4_quantize(x: Values, out: Records | None = None) -> Records:
    """As `kernels.nvfp4_quantize`."""
    return _quantize(NVFP4, x, out)


def nvfp4_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """As `kernels.nvfp4_dequantize`."""
    return _dequantize(NVFP4, rec, out_dtype, out)


def mxfp4_quantize(x: Values, out: Records | None = None) -> Records:
    """As `kernels.mxfp4_quantize`."""
    return _quantize(MXFP4, x, out)


def mxfp4_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """As `kernels.mxfp4_dequantize`."""
    return _dequantize(MXFP4, rec, out_dtype, out)


def fp8_quantize(x: Values, out: Records | None = None) -> Records:
    """As `kernels.fp8_quantize`."""
    return _quantize(FP8, x, out)


def fp8_dequantize(
    rec: Records, out_dtype: ValueType = "float32", out: Values | None = None
) -> Values:
    """As `kernels.fp8_dequantize`."""
    return _dequantize(FP8, rec, out_dtype, out)
