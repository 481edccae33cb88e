// A device's instructions on packed bytes and pairs of bfloat16, and what a host does for them.
//
// The meaning is the PTX ISA's for prmt.b32, max.NaN.bf16x2 and fma.rn.bf16x2 (sm_80 and later,
// subnormals kept, every NaN result 0x7fff).
#pragma once

#include "records.h"

// Byte i of the result is byte (nibble i of the selector, its low three bits) of a and b, a's four
// first; where the nibble's top bit is set, eight copies of that byte's own top bit.
KV_HD kv_u32 kv_permute(kv_u32 a, kv_u32 b, kv_u32 selector) {
#if defined(__CUDA_ARCH__)
    kv_u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
#else
    kv_u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const kv_u32 nibble = selector >> 4 * i & 15u, byte = nibble & 7u;
        const kv_u32 value = (byte < 4 ? a >> 8 * byte : b >> 8 * (byte - 4)) & 0xffu;
        const kv_u32 made = nibble < 8 ? value : value & 0x80u ? 0xffu : 0u;
        result |= made << 8 * i;
    }
    return result;
#endif
}

KV_HD float kv_low_bf16(kv_u32 pair) { return kv_float(pair << 16); }

KV_HD float kv_high_bf16(kv_u32 pair) { return kv_float(pair & 0xffff0000u); }

// Both halves rounded half to even.
KV_HD kv_u32 kv_pair_to_bf16(float low, float high) {
    return (kv_u32)kv_float_to_bf16(low) | ((kv_u32)kv_float_to_bf16(high) << 16);
}

#if !defined(__CUDA_ARCH__)
inline kv_u32 kv_host_bf16(float value) {
    return value == value ? kv_float_to_bf16(value) : 0x7fffu;
}

inline float kv_host_max(float a, float b) {
    if (a != a || b != b) return kv_float(kKvNan);
    return a > b ? a : b;
}
#endif

// The larger of each half; NaN where either is.
KV_HD kv_u32 kv_pair_max(kv_u32 a, kv_u32 b) {
#if defined(__CUDA_ARCH__)
    kv_u32 result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return kv_host_bf16(kv_host_max(kv_low_bf16(a), kv_low_bf16(b))) |
           kv_host_bf16(kv_host_max(kv_high_bf16(a), kv_high_bf16(b))) << 16;
#endif
}

// The product of each half, rounded once. A host's is right where the product fits a float, as
// that of a code and a scale does.
KV_HD kv_u32 kv_pair_mul(kv_u32 a, kv_u32 b) {
#if defined(__CUDA_ARCH__)
    kv_u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
    return result;
#else
    return kv_host_bf16(kv_low_bf16(a) * kv_low_bf16(b)) |
           kv_host_bf16(kv_high_bf16(a) * kv_high_bf16(b)) << 16;
#endif
}
