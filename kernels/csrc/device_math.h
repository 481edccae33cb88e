// records.h's arithmetic in the form that suits a device: the same bits, fewer instructions.
//
// A device has floating-point adders to spare and few integer units; it multiplies subnormals at
// full speed and divides slowly. So codes become values by table and by subnormals, four at a time,
// values become codes by additions that round, and a group divides by its scale once.
#pragma once

#include "device_packed.h"

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

// 1 / x, rounded once.
KV_HD float kv_inverse(float x) {
#if defined(__CUDA_ARCH__)
    return __frcp_rn(x);
#else
    return kv_host_result(1.0f / x);
#endif
}

// The lesser; of a number and NaN, the number: one instruction.
KV_HD float kv_least(float a, float b) {
#if defined(__CUDA_ARCH__)
    return fminf(a, b);
#else
    return __builtin_fminf(a, b);
#endif
}

KV_HD float kv_abs(float x) { return kv_float(kv_abs_bits(x)); }

// The value, or the NaN that records read back as.
KV_HD float kv_one_nan(float value) { return value == value ? value : kv_float(kKvNan); }

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

// Four bfloat16 as two words, the first channel lowest.
struct KvPairs {
    kv_u32 low, high;

    KV_HD KvFour four() const {
        return {kv_low_bf16(low), kv_high_bf16(low), kv_low_bf16(high), kv_high_bf16(high)};
    }
};

// ---- codes to values, before the scale -----------------------------------------------------

template <int Bits>
KV_HD KvPairs kv_code_pairs(kv_u32 codes);

// e2m1: the two bytes of each bfloat16 come out of tables of eight bytes.
template <>
KV_HD KvPairs kv_code_pairs<4>(kv_u32 codes) {
    const kv_u32 magnitudes = codes & 0x7777u;
    const kv_u32 low = kv_permute(0xc0800000u, 0xc0804000u, magnitudes);
    const kv_u32 high = kv_permute(0x3f3f3f00u, 0x40404040u, magnitudes);
    // 0x80 for a positive code, 0xff for a negative one.
    const kv_u32 signs = kv_permute(0x80808080u, 0x80808080u, codes);
    const kv_u32 signed_high = high | (signs << 1 & 0x80808080u);
    return {kv_permute(low, signed_high, 0x5140u), kv_permute(low, signed_high, 0x7362u)};
}

// e4m3 times 2^-120: a code's bits, moved to where a bfloat16 has its exponent and mantissa, are
// that, its subnormals included. Codes of NaN read as 480 * 2^-120.
template <>
KV_HD KvPairs kv_code_pairs<8>(kv_u32 codes) {
    const kv_u32 low = kv_permute(codes, 0, 0x4140u), high = kv_permute(codes, 0, 0x4342u);
    return {(low << 4 & 0x07f007f0u) | (low << 8 & 0x80008000u),
            (high << 4 & 0x07f007f0u) | (high << 8 & 0x80008000u)};
}

constexpr float kKvE4m3Unit = 0x1p120f;
constexpr kv_u32 kKvE4m3UnitPair = 0x7b807b80u;

// Whether one of four e4m3 codes is NaN.
KV_HD bool kv_any_nan_code(kv_u32 codes) {
    return (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
}

KV_HD float kv_nan_for(kv_u32 code, float value) {
    return (code & 0x7fu) == kKvE4m3Nan ? kv_float(kKvNan) : value;
}

template <int Bits>
KV_HD KvFour kv_code_values(kv_u32 codes) {
    const KvFour x = kv_code_pairs<Bits>(codes).four();
    if constexpr (Bits == 4) return x;
    const KvFour scaled = kv_times(x, kKvE4m3Unit);
    if (!kv_any_nan_code(codes)) return scaled;
    return {kv_nan_for(codes, scaled.a), kv_nan_for(codes >> 8, scaled.b),
            kv_nan_for(codes >> 16, scaled.c), kv_nan_for(codes >> 24, scaled.d)};
}

// Four codes times their scale, as bfloat16, every NaN the one that is defined. The products of
// e2m1 are exact in bfloat16; those of e4m3 are rounded once.
template <int Bits>
KV_HD KvPairs kv_scaled_pairs(kv_u32 codes, float scale) {
    constexpr kv_u32 nan = (kKvNan >> 16) * 0x10001u;
    const bool is_nan = !(scale == scale);
    if constexpr (Bits == 8) {
        if (kv_any_nan_code(codes)) {
            const KvFour x = kv_one_nan(kv_times(kv_code_values<8>(codes), scale));
            return {kv_pair_to_bf16(x.a, x.b), kv_pair_to_bf16(x.c, x.d)};
        }
    }
    KvPairs x = kv_code_pairs<Bits>(codes);
    if constexpr (Bits == 8)
        x = {kv_pair_mul(x.low, kKvE4m3UnitPair), kv_pair_mul(x.high, kKvE4m3UnitPair)};
    const kv_u32 factor = kv_permute(kv_bits(scale), 0, 0x3232u);
    return {is_nan ? nan : kv_pair_mul(x.low, factor), is_nan ? nan : kv_pair_mul(x.high, factor)};
}

// ---- values to codes -----------------------------------------------------------------------

// Added to a number of less than 2^22, it makes the adder round to whole numbers, half to even,
// and leaves them in the low bits.
constexpr float kKvRound = 12582912.0f;

// A code counts codes: twice the number up to 2, the number and 2 up to 4, half of it and 4 beyond.
// Of these the least is right, and it may be taken after rounding, which keeps the order. `unit`
// times x is the number; it must be exact.
KV_HD float kv_e2m1_rounded(float x, float unit) {
    const float fine = kv_fma(x, 2.0f * unit, kKvRound);
    const float middle = kv_fma(x, unit, kKvRound + 2.0f);
    const float coarse = kv_fma(x, 0.5f * unit, kKvRound + 4.0f);
    return kv_least(kv_least(fine, middle), coarse);
}

// A code in the low nibble, its sign x's; rubbish above.
KV_HD kv_u32 kv_with_sign(float rounded, float x) {
    return kv_bits(rounded) | (kv_bits(x) >> 28 & 8u);
}

// As records.h rounds to e4m3, but so that the code comes out as the low byte of one sum: `grid`
// is the exponent's power of two, and 7 * grid are the 56 steps that its own bits are short of.
// Rubbish above the byte, and no sign.
KV_HD kv_u32 kv_e4m3_rounded(float x) {
    const float magnitude = kv_least(kv_abs(x), kKvE4m3Max);
    const float grid = kv_max(kv_float(kv_bits(magnitude) & kKvExponentMask), 0x1p-6f);
    const float sum = kv_add(magnitude, kv_mul(grid, 0x1p20f + 7.0f));
    return kv_bits(sum) + (kv_bits(grid) >> 20);
}

// Division of many numbers by one scale, for codes. For every x and every scale that quantising
// gives, `four` has the codes of `Kind::encode(x, scale)`, as they lie in a record; in the low 16
// bits, with rubbish above, where codes have four bits.
template <class Kind>
struct KvScale;

// The scale is 2^n, so that its inverse is exact and x * 2^-n is the quotient.
struct KvPowerOfTwoScale {
    float inverse;

    KV_HD explicit KvPowerOfTwoScale(kv_u8 byte)
        : inverse(byte == kKvUe8m0Nan ? kv_float(kKvNan) : kv_ue8m0_decode((kv_u8)(254 - byte))) {}

    // All bits where codes are kept, none where the group is NaN.
    KV_HD kv_u32 kept() const { return inverse == inverse ? ~0u : 0u; }
};

template <>
struct KvScale<KvMxfp4> : KvPowerOfTwoScale {
    using KvPowerOfTwoScale::KvPowerOfTwoScale;

    KV_HD kv_u32 one(float x) const {
        const float rounded = kv_e2m1_rounded(kv_abs(x), inverse);
        return kv_with_sign(kv_least(rounded, kKvRound + 7.0f), x);
    }
    KV_HD kv_u32 four(KvFour x) const {
        return ((one(x.d) * 16 + one(x.c)) * 16 + one(x.b)) * 16 + one(x.a);
    }
};

template <int Group>
struct KvScale<KvFp8Group<Group>> : KvPowerOfTwoScale {
    using KvPowerOfTwoScale::KvPowerOfTwoScale;

    KV_HD kv_u32 four(KvFour x) const {
        const KvFour q = kv_times(x, inverse);
        const kv_u32 low = kv_permute(kv_e4m3_rounded(q.a), kv_e4m3_rounded(q.b), 0x0040u);
        const kv_u32 high = kv_permute(kv_e4m3_rounded(q.c), kv_e4m3_rounded(q.d), 0x0040u);
        const kv_u32 low_signs = kv_permute(kv_bits(x.a), kv_bits(x.b), 0x0073u);
        const kv_u32 high_signs = kv_permute(kv_bits(x.c), kv_bits(x.d), 0x0073u);
        return kv_permute(low, high, 0x5410u) |
               (kv_permute(low_signs, high_signs, 0x5410u) & 0x80808080u);
    }
};

// Markstein's division: a quotient from the rounded inverse, then one correction by its exact
// remainder. What lies beyond the largest code is cut off first, so that nothing overflows.
template <>
struct KvScale<KvNvfp4> {
    float scale, inverse, largest;

    KV_HD explicit KvScale(kv_u8 byte)
        : scale(kv_e4m3_decode(byte)),
          inverse(kv_inverse(scale)),
          largest(kv_mul(scale, kKvE2m1Max)) {}

    KV_HD kv_u32 kept() const { return scale == scale ? ~0u : 0u; }

    KV_HD kv_u32 one(float x) const {
        const float magnitude = kv_least(kv_abs(x), largest);
        const float rough = kv_mul(magnitude, inverse);
        const float rest = kv_fma(-scale, rough, magnitude);
        return kv_with_sign(kv_e2m1_rounded(kv_fma(rest, inverse, rough), 1.0f), x);
    }
    KV_HD kv_u32 four(KvFour x) const {
        return ((one(x.d) * 16 + one(x.c)) * 16 + one(x.b)) * 16 + one(x.a);
    }
};
