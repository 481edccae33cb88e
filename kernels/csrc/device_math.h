// records.h's arithmetic in the form that suits a device: the same bits, fewer instructions.
//
// A device multiplies subnormals at full speed and divides slowly; a host does the opposite. So
// here codes are read through subnormals, a group divides by its scale once, and the scale of a
// group travels as a number together with its inverse.
#pragma once

#include "records.h"

typedef unsigned long long kv_u64;
static_assert(sizeof(kv_u64) == 8, "integer widths");

// a * b + c, rounded once.
KV_HD float kv_fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return kv_host_result(__builtin_fmaf(a, b, c));
#endif
}

// The value, or the NaN that records read back as.
KV_HD float kv_one_nan(float value) { return value == value ? value : kv_float(kKvNan); }

// ---- codes to values -----------------------------------------------------------------------

// A code's bits, moved to where a float has its exponent and mantissa, are its value times a power
// of two, its subnormals included. 0x7f of e4m3 would read as 480.
KV_HD float kv_e2m1_value(kv_u32 code) {
    return kv_mul(kv_float(((code & 8u) << 28) | ((code & 7u) << 22)), 0x1p126f);
}

KV_HD float kv_e4m3_value(kv_u32 code) {
    const float value =
        kv_mul(kv_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20)), 0x1p120f);
    return (code & 0x7fu) == kKvE4m3Nan ? kv_float(kKvNan) : value;
}

// Four neighbouring channels: what one thread handles at a time.
struct KvFour {
    float a, b, c, d;
};

KV_HD KvFour kv_times(KvFour x, float scale) {
    return {kv_mul(x.a, scale), kv_mul(x.b, scale), kv_mul(x.c, scale), kv_mul(x.d, scale)};
}

KV_HD KvFour kv_one_nan(KvFour x) {
    return {kv_one_nan(x.a), kv_one_nan(x.b), kv_one_nan(x.c), kv_one_nan(x.d)};
}

KV_HD kv_u32 kv_max_bits(kv_u32 a, kv_u32 b) { return a > b ? a : b; }

// The largest |x| of the four, as an integer; NaN is above everything.
KV_HD kv_u32 kv_abs_bits(KvFour x) {
    return kv_max_bits(kv_max_bits(kv_abs_bits(x.a), kv_abs_bits(x.b)),
                       kv_max_bits(kv_abs_bits(x.c), kv_abs_bits(x.d)));
}

KV_HD kv_u32 kv_pair_to_bf16(float low, float high) {
    return (kv_u32)kv_float_to_bf16(low) | ((kv_u32)kv_float_to_bf16(high) << 16);
}

KV_HD KvFour kv_four_from_bf16(kv_u32 low, kv_u32 high) {
    return {kv_float(low << 16), kv_float(low & 0xffff0000u), kv_float(high << 16),
            kv_float(high & 0xffff0000u)};
}

// ---- values to codes -----------------------------------------------------------------------

// Division of many numbers by one scale, for codes. `kind.encode(x, scale)` and
// `KvScale<kind>(byte).encode(x)` are the same code for every x and every scale that quantising
// gives.
template <class Kind>
struct KvScale;

// The scale is 2^n, so that its inverse is exact and x * 2^-n is the quotient.
struct KvPowerOfTwoScale {
    float inverse;

    KV_HD explicit KvPowerOfTwoScale(kv_u8 byte)
        : inverse(byte == kKvUe8m0Nan ? kv_float(kKvNan) : kv_ue8m0_decode((kv_u8)(254 - byte))) {}

    KV_HD float quotient(float x) const { return kv_mul(x, inverse); }
};

template <>
struct KvScale<KvMxfp4> : KvPowerOfTwoScale {
    using KvPowerOfTwoScale::KvPowerOfTwoScale;
    KV_HD kv_u32 encode(float x) const { return kv_e2m1_encode(quotient(x)) & kv_keep(inverse); }
};

template <int Group>
struct KvScale<KvFp8Group<Group>> : KvPowerOfTwoScale {
    using KvPowerOfTwoScale::KvPowerOfTwoScale;
    KV_HD kv_u32 encode(float x) const { return kv_e4m3_encode(quotient(x)) & kv_keep(inverse); }
};

// Markstein's division: a quotient from the rounded inverse, then one correction by its exact
// remainder. What lies beyond the largest code is cut off first, so that nothing overflows.
template <>
struct KvScale<KvNvfp4> {
    float scale, inverse, largest;

    KV_HD explicit KvScale(kv_u8 byte)
        : scale(kv_e4m3_decode(byte)),
          inverse(kv_div(1.0f, scale)),
          largest(kv_mul(scale, kKvE2m1Max)) {}

    KV_HD kv_u32 encode(float x) const {
        const float magnitude = kv_min(kv_float(kv_abs_bits(x)), largest);
        const float rough = kv_mul(magnitude, inverse);
        const float rest = kv_fma(-scale, rough, magnitude);
        const float quotient = kv_fma(rest, inverse, rough);
        const kv_u32 sign = (kv_bits(x) >> 28) & 8u;
        return (kv_minifloat_encode(quotient, 1, 0) | sign) & kv_keep(scale);
    }
};

// Four codes as they lie in a record, the first channel lowest.
template <class Kind>
KV_HD kv_u32 kv_encode(const KvScale<Kind>& scale, KvFour x) {
    constexpr int bits = Kind::kCodeBits;
    return scale.encode(x.a) | (scale.encode(x.b) << bits) | (scale.encode(x.c) << 2 * bits) |
           (scale.encode(x.d) << 3 * bits);
}

// The values of four codes before the scale.
template <int Bits>
KV_HD KvFour kv_code_values(kv_u32 codes);

template <>
KV_HD KvFour kv_code_values<4>(kv_u32 codes) {
    return {kv_e2m1_value(codes & 15u), kv_e2m1_value((codes >> 4) & 15u),
            kv_e2m1_value((codes >> 8) & 15u), kv_e2m1_value((codes >> 12) & 15u)};
}

template <>
KV_HD KvFour kv_code_values<8>(kv_u32 codes) {
    return {kv_e4m3_value(codes & 255u), kv_e4m3_value((codes >> 8) & 255u),
            kv_e4m3_value((codes >> 16) & 255u), kv_e4m3_value(codes >> 24)};
}
