"""The number formats once more, by definition and exhaustive search, to test the oracle itself."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)[:127]
UE8M0 = np.array([2.0 ** (byte - 127) for byte in range(255)])

CODE_VALUES = {"nvfp4": E2M1, "mxfp4": E2M1, "fp8": E4M3}
SCALE_VALUES = {"nvfp4": E4M3, "mxfp4": UE8M0, "fp8": UE8M0}
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF, "fp8": 0xFF}
AMAX_FLOOR = {
    "nvfp4": np.float32(6 * 2.0**-9),
    "mxfp4": np.float32(6 * 2.0**-126),
    "fp8": np.float32(1e-4),
}
GROUP = {"nvfp4": 16, "mxfp4": 32, "fp8": 32}
NAN_BITS = 0x7FC00000


def nearest_codes(values, x):
    """The index of the value nearest to each |x|; of two equally near, the even one."""
    x = np.minimum(np.abs(np.asarray(x, np.float64)), values[-1])
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    below = above - 1
    distance_below, distance_above = x - values[below], values[above] - x
    even = np.where(below % 2 == 0, below, above)
    nearer = np.where(distance_below < distance_above, below, above)
    return np.where(distance_below == distance_above, even, nearer)


def scale_bytes(kind, amax):
    """Groups' scales by the formulas, single-precision division included; amax is finite."""
    largest = np.float32(CODE_VALUES[kind][-1])
    quotient = np.maximum(np.asarray(amax, np.float32), AMAX_FLOOR[kind]) / largest
    assert quotient.dtype == np.float32
    if kind == "nvfp4":
        return nearest_codes(E4M3, quotient)
    return np.searchsorted(UE8M0, quotient.astype(np.float64))


def sign_bit(kind):
    return 0x80 if kind == "fp8" else 0x8


def pack(kind, codes):
    """Codes [..., D], one per byte, as they lie in a record."""
    codes = np.asarray(codes, np.uint8)
    if kind == "fp8":
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(kind, record, channels):
    """Codes [..., D] and scale bytes [..., groups] of records."""
    scales = channels // GROUP[kind]
    packed, scale_bytes = record[..., :-scales], record[..., -scales:]
    if kind == "fp8":
        return packed, scale_bytes
    return np.stack([packed & 15, packed >> 4], -1).reshape(
        *packed.shape[:-1], channels
    ), scale_bytes


def bits(values):
    """Float32 or bfloat16 arrays as integers, so that -0.0 and NaN compare."""
    return values.view(np.uint32) if values.dtype == np.float32 else values


def to_bfloat16(x):
    """Float32 to the nearest of its two bfloat16 neighbours, even on a tie; NaN to 0x7fc0."""
    low = (x.view(np.uint32) >> 16).astype(np.uint32)
    high = low + 1
    with np.errstate(over="ignore", invalid="ignore"):
        exact = x.astype(np.float64)
        distance_low = np.abs(exact - (low << 16).view(np.float32).astype(np.float64))
        # The neighbour beyond the largest number is 2^128, not infinity, for rounding.
        high_value = (high << 16).view(np.float32).astype(np.float64)
        high_value = np.where(np.isinf(high_value), np.copysign(2.0**128, exact), high_value)
        distance_high = np.abs(high_value - exact)
    tie = distance_low == distance_high
    up = np.where(tie, low % 2 == 1, distance_high < distance_low)
    rounded = np.where(up & np.isfinite(x), high, low)
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
