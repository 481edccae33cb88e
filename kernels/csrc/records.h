// The arithmetic of the cache records (ds41f §4), one value at a time.
//
// Host C++ and CUDA compile this file alike, so it includes nothing, keeps no tables (a table
// becomes local memory on a device) and names every rounding. It needs IEEE single precision
// without contraction and without flushing of subnormals.
//
// What a record kind is, as a struct:
//   kGroup             channels that share one scale
//   kCodeBits          4 (two codes per byte, channel 2i in the low nibble) or 8
//   scale(amax_bits)   a group's scale byte, from the bits of its largest |x|
//   scale_value(byte)  what that byte multiplies by
//   encode(x, scale)   a channel's code; the code's sign bit is x's, at zero too
//   decode(code)       the code's value, before the scale
//
// Not-a-number: a group that holds one gets the scale byte that means NaN (e4m3 0x7f, ue8m0 0xff)
// and codes of zero, so the whole group reads back as NaN. Infinity: the scale is that of the
// largest finite float and the code the largest of its sign. Every NaN that comes out is the
// positive quiet one.
#pragma once

#if defined(__CUDACC__)
#define KV_HD __host__ __device__ __forceinline__
#else
#define KV_HD inline
#endif

typedef unsigned char kv_u8;
typedef unsigned short kv_u16;
typedef unsigned int kv_u32;
static_assert(sizeof(kv_u8) == 1 && sizeof(kv_u16) == 2 && sizeof(kv_u32) == 4, "integer widths");
static_assert(sizeof(float) == 4, "IEEE single precision");

// Bits of single-precision numbers.
constexpr kv_u32 kKvExponentMask = 0x7f800000u;
constexpr kv_u32 kKvMagnitudeMask = 0x7fffffffu;
constexpr kv_u32 kKvInfinity = 0x7f800000u;
constexpr kv_u32 kKvLargestFinite = 0x7f7fffffu;
constexpr kv_u32 kKvNan = 0x7fc00000u;
constexpr int kKvMantissaBits = 23;
constexpr int kKvExponentBias = 127;

// Bytes of scales.
constexpr kv_u8 kKvE4m3Nan = 0x7f;
constexpr kv_u8 kKvUe8m0Nan = 0xff;

// Largest magnitudes of the codes.
constexpr float kKvE2m1Max = 6.0f;
constexpr float kKvE4m3Max = 448.0f;

KV_HD kv_u32 kv_bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    kv_u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

KV_HD float kv_float(kv_u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// What host arithmetic gives. A host build that stands in for a device (KV_EMULATE_DEVICE) turns
// every NaN into the one that a device's arithmetic makes, so that code which relies on the
// processor's own NaN is found out.
KV_HD float kv_host_result(float value) {
#if defined(KV_EMULATE_DEVICE)
    return value == value ? value : kv_float(0x7fffffffu);
#else
    return value;
#endif
}

// Quotient, sum and product, each rounded once whatever the compiler's flags.
KV_HD float kv_div(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return kv_host_result(a / b);
#endif
}

KV_HD float kv_add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return kv_host_result(a + b);
#endif
}

KV_HD float kv_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return kv_host_result(a * b);
#endif
}

KV_HD float kv_bf16_to_float(kv_u16 bf16) { return kv_float((kv_u32)bf16 << 16); }

KV_HD kv_u16 kv_float_to_bf16(float value) {
    const kv_u32 bits = kv_bits(value);
    if ((bits & kKvMagnitudeMask) > kKvInfinity) return (kv_u16)(kKvNan >> 16);
    return (kv_u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// |x| as an integer; it orders like the number, and NaN above everything.
KV_HD kv_u32 kv_abs_bits(float x) { return kv_bits(x) & kKvMagnitudeMask; }

KV_HD bool kv_is_nan_bits(kv_u32 abs_bits) { return abs_bits > kKvInfinity; }

// The magnitude code of a >= 0 in a small float format, rounded half to even. exponent_min is the
// exponent of the smallest normal number. a must be finite and at most the largest code's value.
//
// Adding 2^(e + 23 - mantissa_bits) makes the adder itself round a to the format's grid at a's
// exponent e; the low bits of the sum then count grid steps.
KV_HD kv_u32 kv_minifloat_encode(float a, int mantissa_bits, int exponent_min) {
    const kv_u32 floor = (kv_u32)(exponent_min + kKvExponentBias) << kKvMantissaBits;
    const kv_u32 own = kv_bits(a) & kKvExponentMask;
    // Neither has the top bit; signed comparison is the one that SSE2 has.
    const kv_u32 exponent = (int)own < (int)floor ? floor : own;
    const kv_u32 shift = (kv_u32)(kKvMantissaBits - mantissa_bits);
    const kv_u32 magic = exponent + (shift << kKvMantissaBits);
    const kv_u32 steps = kv_bits(kv_add(a, kv_float(magic))) - magic;
    return steps + ((exponent - floor) >> shift);
}

// The value of a magnitude code, exact.
KV_HD float kv_minifloat_decode(kv_u32 code, int mantissa_bits, int exponent_min) {
    const kv_u32 one = 1u << kKvMantissaBits;
    const kv_u32 smallest_normal = (kv_u32)(exponent_min + kKvExponentBias) << kKvMantissaBits;
    const kv_u32 fraction = code << (kKvMantissaBits - mantissa_bits);
    if (fraction >= one) return kv_float(smallest_normal - one + fraction);
    // Below the smallest normal number: as if there were a leading one, less that one.
    return kv_add(kv_float(smallest_normal + fraction), -kv_float(smallest_normal));
}

KV_HD float kv_min(float a, float b) { return a < b ? a : b; }

KV_HD float kv_max(float a, float b) { return a > b ? a : b; }

KV_HD float kv_negated_if(bool negative, float magnitude) {
    return negative ? -magnitude : magnitude;
}

// ---- e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign ------------------------------------

KV_HD kv_u8 kv_e2m1_encode(float x) {
    const float magnitude = kv_min(kv_float(kv_abs_bits(x)), kKvE2m1Max);
    return (kv_u8)(kv_minifloat_encode(magnitude, 1, 0) | ((kv_bits(x) >> 28) & 8u));
}

KV_HD float kv_e2m1_decode(kv_u8 code) {
    return kv_negated_if((code & 8u) != 0, kv_minifloat_decode(code & 7u, 1, 0));
}

// ---- e4m3: bias 7, largest 448, no infinity, 0x7f and 0xff are NaN -------------------------

KV_HD kv_u8 kv_e4m3_encode(float x) {
    const float magnitude = kv_min(kv_float(kv_abs_bits(x)), kKvE4m3Max);
    return (kv_u8)(kv_minifloat_encode(magnitude, 3, -6) | ((kv_bits(x) >> 24) & 0x80u));
}

KV_HD float kv_e4m3_decode(kv_u8 code) {
    if ((code & 0x7fu) == kKvE4m3Nan) return kv_float(kKvNan);
    return kv_negated_if((code & 0x80u) != 0, kv_minifloat_decode(code & 0x7fu, 3, -6));
}

// ---- ue8m0: 2^(byte - 127), 0xff is NaN ----------------------------------------------------

// The exponent of the smallest power of two >= q; q normal, at most 2^127.
KV_HD kv_u8 kv_ue8m0_ceil(float q) {
    return (kv_u8)((kv_bits(q) + ((1u << kKvMantissaBits) - 1u)) >> kKvMantissaBits);
}

KV_HD float kv_ue8m0_decode(kv_u8 byte) {
    if (byte == kKvUe8m0Nan) return kv_float(kKvNan);
    if (byte == 0) return kv_float(1u << (kKvMantissaBits - 1));
    return kv_float((kv_u32)byte << kKvMantissaBits);
}

// All bits of a code under a scale that is a number, none under NaN.
KV_HD kv_u8 kv_keep(float scale) { return scale == scale ? (kv_u8)0xff : (kv_u8)0; }

// max(|x|, floor) / largest_code, with infinity taken as the largest finite float.
KV_HD float kv_scale_quotient(kv_u32 amax_bits, float floor, float largest_code) {
    if (amax_bits > kKvLargestFinite) amax_bits = kKvLargestFinite;
    return kv_div(kv_max(kv_float(amax_bits), floor), largest_code);
}

// ---- the three kinds -----------------------------------------------------------------------

struct KvNvfp4 {
    static constexpr int kGroup = 16;
    static constexpr int kCodeBits = 4;
    static constexpr float kAmaxFloor = 6.0f * 0x1p-9f;

    KV_HD static kv_u8 scale(kv_u32 amax_bits) {
        if (kv_is_nan_bits(amax_bits)) return kKvE4m3Nan;
        return kv_e4m3_encode(kv_scale_quotient(amax_bits, kAmaxFloor, kKvE2m1Max));
    }
    KV_HD static float scale_value(kv_u8 byte) { return kv_e4m3_decode(byte); }
    KV_HD static kv_u8 encode(float x, float scale) {
        return kv_e2m1_encode(kv_div(x, scale)) & kv_keep(scale);
    }
    KV_HD static float decode(kv_u8 code) { return kv_e2m1_decode(code); }
};

struct KvMxfp4 {
    static constexpr int kGroup = 32;
    static constexpr int kCodeBits = 4;
    static constexpr float kAmaxFloor = 6.0f * 0x1p-126f;

    KV_HD static kv_u8 scale(kv_u32 amax_bits) {
        if (kv_is_nan_bits(amax_bits)) return kKvUe8m0Nan;
        return kv_ue8m0_ceil(kv_scale_quotient(amax_bits, kAmaxFloor, kKvE2m1Max));
    }
    KV_HD static float scale_value(kv_u8 byte) { return kv_ue8m0_decode(byte); }
    KV_HD static kv_u8 encode(float x, float scale) {
        return kv_e2m1_encode(kv_div(x, scale)) & kv_keep(scale);
    }
    KV_HD static float decode(kv_u8 code) { return kv_e2m1_decode(code); }
};

// The model's own rows have one scale per 32 channels; other engines keep fewer.
template <int Group>
struct KvFp8Group {
    static constexpr int kGroup = Group;
    static constexpr int kCodeBits = 8;
    static constexpr float kAmaxFloor = 1e-4f;

    KV_HD static kv_u8 scale(kv_u32 amax_bits) {
        if (kv_is_nan_bits(amax_bits)) return kKvUe8m0Nan;
        return kv_ue8m0_ceil(kv_scale_quotient(amax_bits, kAmaxFloor, kKvE4m3Max));
    }
    KV_HD static float scale_value(kv_u8 byte) { return kv_ue8m0_decode(byte); }
    KV_HD static kv_u8 encode(float x, float scale) {
        return kv_e4m3_encode(kv_div(x, scale)) & kv_keep(scale);
    }
    KV_HD static float decode(kv_u8 code) { return kv_e4m3_decode(code); }
};

using KvFp8 = KvFp8Group<32>;

// One channel read back: the code's value times the scale, rounded once to single precision.
template <class Kind>
KV_HD float kv_dequantize(kv_u8 code, float scale) {
    return kv_mul(Kind::decode(code), scale);
}
