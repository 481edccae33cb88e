// The same rows with AVX2 and F16C, for x86 processors that have both.
//
// The arithmetic is that of records.h, eight or sixteen channels at a time. What would need a
// branch per value (a NaN in a group, a scale near the ends of the exponent range) sends its span
// or group to the portable loops instead. Every function carries the target attribute, so that
// the rest of the extension still runs on processors without AVX2.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define RECORDS_HAVE_AVX2 1

#include <immintrin.h>

#include "records_portable.h"

#define RECORDS_AVX2 __attribute__((target("avx2,f16c")))
#define RECORDS_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) static inline

namespace records {
namespace avx2 {

// Channels per step: two vectors of single precision.
constexpr int kStep = 16;
// Groups whose scales are computed at once, one per lane.
constexpr size_t kLanes = 8;
// Groups per pass over a span, so that the passes' notes stay in registers and L1.
constexpr size_t kPassGroups = 64;

// ---- loading --------------------------------------------------------------------------------

RECORDS_AVX2_INLINE __m256 load8(const kv_u8* at, Float32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}

RECORDS_AVX2_INLINE __m256 load8(const kv_u8* at, BFloat16) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// The largest |x| of sixteen channels, as bits.
RECORDS_AVX2_INLINE kv_u32 abs_max16(const kv_u8* at, Float32) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(kKvMagnitudeMask));
    const __m256i* vectors = reinterpret_cast<const __m256i*>(at);
    const __m256i both =
        _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(vectors), mask),
                         _mm256_and_si256(_mm256_loadu_si256(vectors + 1), mask));
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(1, 0, 3, 2)));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<kv_u32>(_mm_cvtsi128_si32(most));
}

// phminposuw finds the least of eight words, so it is asked for the least complement.
RECORDS_AVX2_INLINE kv_u32 abs_max16(const kv_u8* at, BFloat16) {
    const __m128i mask = _mm_set1_epi16(0x7fff);
    const __m128i* vectors = reinterpret_cast<const __m128i*>(at);
    const __m128i most = _mm_max_epu16(_mm_and_si128(_mm_loadu_si128(vectors), mask),
                                       _mm_and_si128(_mm_loadu_si128(vectors + 1), mask));
    const __m128i least = _mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(-1)));
    return (~static_cast<kv_u32>(_mm_cvtsi128_si32(least)) & 0xffffu) << 16;
}

// ---- encoding -------------------------------------------------------------------------------

// kv_minifloat_encode, and the magnitude that the code stands for.
struct Encoded {
    __m256i code;
    __m256 value;
};

template <int kMantissaBits, int kExponentMin>
RECORDS_AVX2_INLINE Encoded encode8(__m256 magnitude) {
    constexpr int kShift = kKvMantissaBits - kMantissaBits;
    const __m256i floor = _mm256_set1_epi32((kExponentMin + kKvExponentBias) << kKvMantissaBits);
    const __m256i exponent_mask = _mm256_set1_epi32(static_cast<int>(kKvExponentMask));
    const __m256i exponent = _mm256_max_epu32(
        _mm256_and_si256(_mm256_castps_si256(magnitude), exponent_mask), floor);
    const __m256i magic =
        _mm256_add_epi32(exponent, _mm256_set1_epi32(kShift << kKvMantissaBits));
    const __m256 sum = _mm256_add_ps(magnitude, _mm256_castsi256_ps(magic));
    const __m256i steps = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
    const __m256i base = _mm256_srli_epi32(_mm256_sub_epi32(exponent, floor), kShift);
    return {_mm256_add_epi32(steps, base), _mm256_sub_ps(sum, _mm256_castsi256_ps(magic))};
}

// Eight scale bytes, and what encoding divides or multiplies by.
struct Scales {
    __m256i byte;
    __m256 factor;
};

RECORDS_AVX2_INLINE __m256 scale_quotient8(__m256i amax_bits, float floor, float largest_code) {
    const __m256i finite = _mm256_min_epu32(
        amax_bits, _mm256_set1_epi32(static_cast<int>(kKvLargestFinite)));
    const __m256 amax = _mm256_max_ps(_mm256_castsi256_ps(finite), _mm256_set1_ps(floor));
    return _mm256_div_ps(amax, _mm256_set1_ps(largest_code));
}

// A power of two is divided by exactly when its reciprocal is multiplied by.
RECORDS_AVX2_INLINE Scales power_of_two_scales(__m256 quotient) {
    const __m256i round_up = _mm256_set1_epi32((1 << kKvMantissaBits) - 1);
    const __m256i byte = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_castps_si256(quotient), round_up), kKvMantissaBits);
    const __m256i reciprocal = _mm256_slli_epi32(
        _mm256_sub_epi32(_mm256_set1_epi32(2 * kKvExponentBias), byte), kKvMantissaBits);
    return {byte, _mm256_castsi256_ps(reciprocal)};
}

RECORDS_AVX2_INLINE Scales scales8(__m256i amax_bits, KvNvfp4) {
    const __m256 quotient = scale_quotient8(amax_bits, KvNvfp4::kAmaxFloor, kKvE2m1Max);
    const Encoded scale = encode8<3, -6>(_mm256_min_ps(quotient, _mm256_set1_ps(kKvE4m3Max)));
    return {scale.code, scale.value};
}

RECORDS_AVX2_INLINE Scales scales8(__m256i amax_bits, KvMxfp4) {
    return power_of_two_scales(scale_quotient8(amax_bits, KvMxfp4::kAmaxFloor, kKvE2m1Max));
}

RECORDS_AVX2_INLINE Scales scales8(__m256i amax_bits, KvFp8) {
    return power_of_two_scales(scale_quotient8(amax_bits, KvFp8::kAmaxFloor, kKvE4m3Max));
}

RECORDS_AVX2_INLINE __m256 scaled8(__m256 x, __m256 factor, KvNvfp4) {
    return _mm256_div_ps(x, factor);
}
RECORDS_AVX2_INLINE __m256 scaled8(__m256 x, __m256 factor, KvMxfp4) {
    return _mm256_mul_ps(x, factor);
}
RECORDS_AVX2_INLINE __m256 scaled8(__m256 x, __m256 factor, KvFp8) {
    return _mm256_mul_ps(x, factor);
}

template <class Kind>
RECORDS_AVX2_INLINE __m256i codes8(__m256 x, __m256 factor) {
    constexpr bool kFp4 = Kind::kCodeBits == 4;
    const __m256 magnitude_mask = _mm256_castsi256_ps(
        _mm256_set1_epi32(static_cast<int>(kKvMagnitudeMask)));
    const __m256 largest = _mm256_set1_ps(kFp4 ? kKvE2m1Max : kKvE4m3Max);
    const __m256 magnitude =
        _mm256_min_ps(_mm256_and_ps(scaled8(x, factor, Kind()), magnitude_mask), largest);
    const __m256i code = encode8<(kFp4 ? 1 : 3), (kFp4 ? 0 : -6)>(magnitude).code;
    const __m256i sign = _mm256_and_si256(
        _mm256_srli_epi32(_mm256_castps_si256(x), kFp4 ? 28 : 24),
        _mm256_set1_epi32(kFp4 ? 0x08 : 0x80));
    return _mm256_or_si256(code, sign);
}

// Sixteen codes of 32 bits to 8 or 16 bytes. Packing works within halves of a register, hence
// the interleaving of the two halves at the end.
template <class Kind>
RECORDS_AVX2_INLINE void store_codes16(kv_u8* at, __m256i first, __m256i second) {
    const __m256i words = _mm256_packus_epi32(first, second);
    __m256i bytes = _mm256_packus_epi16(words, words);
    __m128i* target = reinterpret_cast<__m128i*>(at);
    if constexpr (Kind::kCodeBits == 8) {
        _mm_storeu_si128(target, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes),
                                                    _mm256_extracti128_si256(bytes, 1)));
    } else {
        bytes = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
        bytes = _mm256_packus_epi16(bytes, bytes);
        _mm_storel_epi64(target, _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes),
                                                    _mm256_extracti128_si256(bytes, 1)));
    }
}

// ---- decoding -------------------------------------------------------------------------------

// A 4-bit code times a scale byte has few significant bits: it is exact in bfloat16, so each
// scale byte has a table of its sixteen products, split into the low and the high bytes that a
// byte shuffle can look up.
template <class Kind>
struct ProductTable {
    alignas(32) kv_u8 bytes[256][2][16];

    ProductTable() {
        for (int scale = 0; scale < 256; ++scale) {
            const float factor = Kind::scale_value(static_cast<kv_u8>(scale));
            for (int code = 0; code < 16; ++code) {
                const float product = kv_dequantize<Kind>(static_cast<kv_u8>(code), factor);
                const kv_u16 bf16 = kv_float_to_bf16(product);
                bytes[scale][0][code] = static_cast<kv_u8>(bf16 & 0xff);
                bytes[scale][1][code] = static_cast<kv_u8>(bf16 >> 8);
            }
        }
    }

    static const ProductTable& get() {
        static const ProductTable table;
        return table;
    }
};

RECORDS_AVX2_INLINE void store_bf16(kv_u8* at, __m128i first, __m128i second, BFloat16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at) + 1, second);
}

RECORDS_AVX2_INLINE void store_bf16(kv_u8* at, __m128i first, __m128i second, Float32) {
    __m256i* target = reinterpret_cast<__m256i*>(at);
    _mm256_storeu_si256(target, _mm256_slli_epi32(_mm256_cvtepu16_epi32(first), 16));
    _mm256_storeu_si256(target + 1, _mm256_slli_epi32(_mm256_cvtepu16_epi32(second), 16));
}

template <class Kind, class Value>
RECORDS_AVX2_INLINE void decode_fp4(const kv_u8* codes, const kv_u8* scales, kv_u8* values,
                                    size_t steps, const ProductTable<Kind>& table) {
    const __m128i nibble = _mm_set1_epi8(0x0f);
    for (size_t step = 0; step < steps; ++step) {
        const __m128i* product = reinterpret_cast<const __m128i*>(
            table.bytes[scales[step * kStep / Kind::kGroup]]);
        const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        const __m128i code = _mm_unpacklo_epi8(
            _mm_and_si128(packed, nibble), _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
        const __m128i low = _mm_shuffle_epi8(_mm_load_si128(product), code);
        const __m128i high = _mm_shuffle_epi8(_mm_load_si128(product + 1), code);
        store_bf16(values, _mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high), Value());
        codes += code_bytes<Kind>(kStep);
        values += kStep * Value::kBytes;
    }
}

// Scale bytes for which every product of a finite e4m3 value is normal, exact in bfloat16 and
// finite, and 2^8 times the scale too.
constexpr kv_u8 kFp8PlainScaleMin = 127 - 100;
constexpr kv_u8 kFp8PlainScaleMax = 127 + 100;

RECORDS_AVX2_INLINE void store16(kv_u8* at, __m256 first, __m256 second, Float32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(at), first);
    _mm256_storeu_ps(reinterpret_cast<float*>(at) + 8, second);
}

// For values that are exact in bfloat16.
RECORDS_AVX2_INLINE void store16(kv_u8* at, __m256 first, __m256 second, BFloat16) {
    const __m256i words =
        _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(first), 16),
                            _mm256_srli_epi32(_mm256_castps_si256(second), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                        _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
}

// An e4m3 byte's exponent and fraction, moved to their places in half precision, read 2^-8 times
// its value; the conversion takes half precision's subnormals as quickly as the rest. Widening
// with sign leaves copies of the sign bit above the byte: one of them stays, in the sign's place.
template <class Value>
RECORDS_AVX2_INLINE void decode_e4m3(__m128i codes, __m256 scale_256, kv_u8* values) {
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                            _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    const __m256 second = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    store16(values, _mm256_mul_ps(first, scale_256), _mm256_mul_ps(second, scale_256), Value());
}

RECORDS_AVX2_INLINE bool plain_fp8_group(__m256i codes, kv_u8 scale) {
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    const __m256i nan = _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(kKvE4m3Nan));
    return _mm256_testz_si256(nan, nan) && scale >= kFp8PlainScaleMin &&
           scale <= kFp8PlainScaleMax;
}

template <class Value>
RECORDS_AVX2_INLINE void decode_fp8(const kv_u8* codes, const kv_u8* scales, kv_u8* values,
                                    size_t groups) {
    for (size_t g = 0; g < groups; ++g) {
        const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        if (plain_fp8_group(code, scales[g])) {
            const __m256 scale = _mm256_castsi256_ps(
                _mm256_set1_epi32((scales[g] + 8) << kKvMantissaBits));
            decode_e4m3<Value>(_mm256_castsi256_si128(code), scale, values);
            decode_e4m3<Value>(_mm256_extracti128_si256(code, 1), scale,
                               values + kStep * Value::kBytes);
        } else {
            PortableSpan<KvFp8, Value>::dequantize(codes, scales + g, values, 1);
        }
        codes += KvFp8::kGroup;
        values += KvFp8::kGroup * Value::kBytes;
    }
}

}  // namespace avx2

// ---- spans ----------------------------------------------------------------------------------

template <class Kind, class Value>
struct Avx2Span {
    static constexpr size_t kGroupBytes = Kind::kGroup * Value::kBytes;
    static constexpr size_t kGroupCodeBytes = code_bytes<Kind>(Kind::kGroup);

    RECORDS_AVX2 static void quantize(const kv_u8* values, kv_u8* codes, kv_u8* scales,
                                      size_t groups) {
        while (groups > 0) {
            const size_t now = groups < avx2::kPassGroups ? groups : avx2::kPassGroups;
            quantize_pass(values, codes, scales, now);
            values += now * kGroupBytes;
            codes += now * kGroupCodeBytes;
            scales += now;
            groups -= now;
        }
    }

    RECORDS_AVX2 static void dequantize(const kv_u8* codes, const kv_u8* scales, kv_u8* values,
                                        size_t groups) {
        if constexpr (Kind::kCodeBits == 4) {
            const size_t steps = groups * (Kind::kGroup / avx2::kStep);
            avx2::decode_fp4<Kind, Value>(codes, scales, values, steps,
                                          avx2::ProductTable<Kind>::get());
        } else {
            avx2::decode_fp8<Value>(codes, scales, values, groups);
        }
    }

  private:
    // Three passes, so that scales are computed a register at a time although groups are small.
    RECORDS_AVX2_INLINE void quantize_pass(const kv_u8* values, kv_u8* codes, kv_u8* scales,
                                           size_t groups) {
        alignas(32) kv_u32 amax[avx2::kPassGroups];
        alignas(32) float factor[avx2::kPassGroups];
        kv_u32 most = 0;
        for (size_t g = 0; g < groups; ++g) {
            amax[g] = group_amax(values + g * kGroupBytes);
            most = amax[g] > most ? amax[g] : most;
        }
        if (kv_is_nan_bits(most)) {
            PortableSpan<Kind, Value>::quantize(values, codes, scales, groups);
            return;
        }
        // The last lanes may belong to no group; nothing uses what comes of them.
        for (size_t g = groups; g % avx2::kLanes != 0; ++g) amax[g] = 0;
        for (size_t g = 0; g < groups; g += avx2::kLanes)
            group_scales(amax + g, factor + g, scales + g,
                         groups - g < avx2::kLanes ? groups - g : avx2::kLanes);
        for (size_t g = 0; g < groups; ++g)
            group_codes(values + g * kGroupBytes, factor[g], codes + g * kGroupCodeBytes);
    }

    RECORDS_AVX2_INLINE kv_u32 group_amax(const kv_u8* values) {
        kv_u32 amax = avx2::abs_max16(values, Value());
        if constexpr (Kind::kGroup == 2 * avx2::kStep) {
            const kv_u32 rest = avx2::abs_max16(values + avx2::kStep * Value::kBytes, Value());
            amax = rest > amax ? rest : amax;
        }
        return amax;
    }

    RECORDS_AVX2_INLINE void group_scales(const kv_u32* amax, float* factor, kv_u8* scales,
                                          size_t count) {
        const avx2::Scales scale = avx2::scales8(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(amax)), Kind());
        _mm256_store_ps(factor, scale.factor);
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(scale.byte),
                                               _mm256_extracti128_si256(scale.byte, 1));
        const __m128i bytes = _mm_packus_epi16(words, words);
        if (count == avx2::kLanes) {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(scales), bytes);
        } else {
            alignas(16) kv_u8 all[16];
            _mm_store_si128(reinterpret_cast<__m128i*>(all), bytes);
            std::memcpy(scales, all, count);
        }
    }

    RECORDS_AVX2_INLINE void group_codes(const kv_u8* values, float factor, kv_u8* codes) {
        const __m256 factors = _mm256_set1_ps(factor);
        for (int i = 0; i < Kind::kGroup; i += avx2::kStep) {
            const kv_u8* at = values + i * Value::kBytes;
            const __m256 first = avx2::load8(at, Value());
            const __m256 second = avx2::load8(at + 8 * Value::kBytes, Value());
            avx2::store_codes16<Kind>(codes + code_bytes<Kind>(i),
                                      avx2::codes8<Kind>(first, factors),
                                      avx2::codes8<Kind>(second, factors));
        }
    }
};

}  // namespace records

#endif
