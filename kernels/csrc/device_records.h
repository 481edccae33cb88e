// The rows that the device kernels read and write, and how a group of channels becomes codes.
//
// A row type says how a record lies (kData bytes of codes, then kScales bytes) and has
//   four(row, quad)            the values of channels 4·quad … 4·quad+3
//   kUnits, fill(row, u, from) the record's u-th part, from a source of values
//   kCoded                     how many channels, the first ones, are codes
// A source has four(quad). Rows lie in shared memory, at multiples of 4 bytes.
#pragma once

#include "device_memory.h"

// The largest |x| of `quads` quads, as an integer.
template <class Source>
KV_HD kv_u32 kv_amax(const Source& from, kv_u32 first_quad, kv_u32 quads) {
    kv_u32 amax = 0;
#pragma unroll 4
    for (kv_u32 q = 0; q < quads; ++q) amax = kv_max_bits(amax, kv_abs_bits(from.four(first_quad + q)));
    return amax;
}

// Codes of `Quads` quads under one scale, in whole words.
template <class Kind, kv_u32 Quads, class Source>
KV_HD void kv_put_codes(const Source& from, kv_u32 first_quad, KvScale<Kind> scale, kv_u8* codes) {
    constexpr kv_u32 quads_per_word = 8 / Kind::kCodeBits;
    static_assert(Quads % quads_per_word == 0, "codes fill words");
#pragma unroll
    for (kv_u32 q = 0; q < Quads; q += quads_per_word) {
        kv_u32 word = scale.four(from.four(first_quad + q));
        if constexpr (quads_per_word == 2)
            word = kv_permute(word, scale.four(from.four(first_quad + q + 1)), 0x5410u);
        kv_store(codes + q / quads_per_word * 4, word & scale.kept());
    }
}

// One group: its scale byte and its codes.
template <class Kind, class Source>
KV_HD void kv_put_group(const Source& from, kv_u32 group, kv_u8* codes, kv_u8* scale) {
    constexpr kv_u32 quads = Kind::kGroup / 4;
    const kv_u8 byte = Kind::scale(kv_amax(from, group * quads, quads));
    *scale = byte;
    kv_put_codes<Kind, quads>(from, group * quads, KvScale<Kind>(byte), codes);
}

// The codes of a quad, in a record's codes.
template <int Bits>
KV_HD kv_u32 kv_codes_at(const kv_u8* codes, kv_u32 quad) {
    if constexpr (Bits == 8) return kv_load<kv_u32>(codes + quad * 4);
    return kv_load<kv_u16>(codes + quad * 2);
}

// nvfp4, mxfp4 and fp8 records as in ds41f §4.
template <class K, kv_u32 Channels>
struct KvPlainRow {
    using Kind = K;
    static constexpr kv_u32 kChannels = Channels;
    static constexpr kv_u32 kCoded = Channels;
    static constexpr kv_u32 kUnits = Channels / Kind::kGroup;
    static constexpr kv_u32 kData = Channels * Kind::kCodeBits / 8;
    static constexpr kv_u32 kScales = kUnits;
    static constexpr kv_u32 kUnitBytes = kData / kUnits;

    KV_HD static KvFour four(const kv_u8* row, kv_u32 quad) {
        const float scale = Kind::scale_value(row[kData + quad * 4 / Kind::kGroup]);
        return kv_times(kv_code_values<Kind::kCodeBits>(kv_codes_at<Kind::kCodeBits>(row, quad)),
                        scale);
    }

    template <class Source>
    KV_HD static void fill(kv_u8* row, kv_u32 unit, const Source& from) {
        kv_put_group<Kind>(from, unit, row + unit * kUnitBytes, row + kData + unit);
    }
};

// 448 channels as e4m3 with one ue8m0 scale per 64, the 64 rotated ones as bfloat16: 584 bytes.
// The scales stand behind both, with a byte of padding.
struct KvRotaryRow {
    using Kind = KvFp8Group<64>;
    static constexpr kv_u32 kChannels = 512;
    static constexpr kv_u32 kCoded = 448;
    static constexpr kv_u32 kUnits = kChannels / Kind::kGroup;
    static constexpr kv_u32 kData = kCoded + 2 * (kChannels - kCoded);
    static constexpr kv_u32 kScales = 8;

    KV_HD static KvFour four(const kv_u8* row, kv_u32 quad) {
        if (quad < kCoded / 4) {
            const float scale = Kind::scale_value(row[kData + quad * 4 / Kind::kGroup]);
            return kv_times(kv_code_values<8>(kv_load<kv_u32>(row + quad * 4)), scale);
        }
        const kv_u8* at = row + kCoded + (quad * 4 - kCoded) * 2;
        return KvPairs{kv_load<kv_u32>(at), kv_load<kv_u32>(at + 4)}.four();
    }

    template <class Source>
    KV_HD static void fill(kv_u8* row, kv_u32 unit, const Source& from) {
        if (unit < kUnits - 1) {
            kv_put_group<Kind>(from, unit, row + unit * Kind::kGroup, row + kData + unit);
            return;
        }
#pragma unroll 4
        for (kv_u32 q = 0; q < Kind::kGroup / 4; ++q) {
            const KvFour x = from.four(kCoded / 4 + q);
            kv_store(row + kCoded + q * 8, kv_pair_to_bf16(x.a, x.b));
            kv_store(row + kCoded + q * 8 + 4, kv_pair_to_bf16(x.c, x.d));
        }
        row[kData + unit] = 0;
    }
};

// An index key as e4m3 under one float32 scale, a power of two when it is written here.
struct KvFloatScaleRow {
    using Kind = KvFp8Group<128>;
    static constexpr kv_u32 kChannels = 128;
    static constexpr kv_u32 kCoded = 128;
    static constexpr kv_u32 kUnits = 4;
    static constexpr kv_u32 kData = kChannels;
    static constexpr kv_u32 kScales = 4;

    KV_HD static KvFour four(const kv_u8* row, kv_u32 quad) {
        return kv_times(kv_code_values<8>(kv_load<kv_u32>(row + quad * 4)),
                        kv_load<float>(row + kData));
    }

    template <class Source>
    KV_HD static void fill(kv_u8* row, kv_u32 unit, const Source& from) {
        constexpr kv_u32 quads = kChannels / kUnits / 4;
        const kv_u8 byte = Kind::scale(kv_amax(from, 0, kChannels / 4));
        if (unit == 0) kv_store(row + kData, Kind::scale_value(byte));
        kv_put_codes<Kind, quads>(from, unit * quads, KvScale<Kind>(byte),
                                  row + unit * quads * 4);
    }
};

// A record in shared memory as a source of values.
template <class Row>
struct KvRowValues {
    const kv_u8* row;
    KV_HD KvFour four(kv_u32 quad) const { return Row::four(row, quad); }
};

// ---- values that were nvfp4 before they were fp8 -------------------------------------------
//
// A group's largest value is 6 times its nvfp4 scale, and fp8 keeps four bits of it: the scales
// 13·2^n and 14·2^n leave the same largest code behind, and quantising takes the lower one. The
// group's other codes tell which it was.

// Whether the group's fp8 codes are what its nvfp4 codes under this scale become.
template <class From>
KV_HD bool kv_gives_back(const kv_u8* from, kv_u32 group, kv_u8 scale_byte) {
    constexpr kv_u32 quads = KvNvfp4::kGroup / 4;
    const KvScale<KvNvfp4> scale(scale_byte);
    const KvScale<typename From::Kind> engine_scale(
        from[From::kData + group * KvNvfp4::kGroup / From::Kind::kGroup]);
    bool same = true;
#pragma unroll 1
    for (kv_u32 q = group * quads; same && q < (group + 1) * quads; ++q) {
        const kv_u32 codes = scale.four(From::four(from, q));
        const KvFour values = kv_times(kv_code_values<4>(codes), scale.scale);
        same = engine_scale.four(values) == kv_load<kv_u32>(from + q * 4);
    }
    return same;
}

// Put the next scale, and the codes under it, where it gives back the fp8 codes and the one that
// quantising took does not.
template <class From>
KV_HD void kv_recover_scale(const kv_u8* from, kv_u8* to, kv_u32 group) {
    using To = KvPlainRow<KvNvfp4, From::kChannels>;
    kv_u8* at = to + To::kData + group;
    const kv_u8 lower = *at, upper = (kv_u8)(lower + 1);
    if ((lower & 7u) != 13 - 8 || group * KvNvfp4::kGroup >= From::kCoded) return;
    if (kv_gives_back<From>(from, group, lower) || !kv_gives_back<From>(from, group, upper)) return;
    *at = upper;
    constexpr kv_u32 quads = KvNvfp4::kGroup / 4;
    kv_put_codes<KvNvfp4, quads>(KvRowValues<From>{from}, group * quads, KvScale<KvNvfp4>(upper),
                                 to + group * To::kUnitBytes);
}
