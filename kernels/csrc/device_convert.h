// Values to records and back: contiguous rows of any number of channels.
//
// A block of threads converts `tile_rows` rows. Rows, tiles and records are multiples of 4 bytes,
// tiles of 16: the host chooses the sizes (kernels.device.convert).
#pragma once

#include "device_records.h"

struct KvConvertArgs {
    const kv_u8* from;
    kv_u8* to;
    kv_u64 rows;
    kv_u32 channels;
    kv_u32 tile_rows;

    KV_HD kv_u64 first_row(kv_u32 block) const { return (kv_u64)block * tile_rows; }
    KV_HD kv_u32 rows_of(kv_u32 block) const {
        const kv_u64 left = rows - first_row(block);
        return left < tile_rows ? (kv_u32)left : tile_rows;
    }
};

// The values staged in shared memory, as a source; and a vector of values out of a source that has
// four(quad) and pairs(quad).
struct KvFloat32 {
    static constexpr kv_u32 kBytes = 4;

    struct Staged {
        const kv_u8* values;

        KV_HD KvFour four(kv_u32 quad) const {
            const KvVector v = kv_load<KvVector>(values + kv_swizzled(quad) * kKvVectorBytes);
            return {kv_float(v.x), kv_float(v.y), kv_float(v.z), kv_float(v.w)};
        }
    };

    template <class Source>
    KV_HD static KvVector vector(const Source& from, kv_u32 index) {
        const KvFour x = from.four(index);
        return {kv_bits(x.a), kv_bits(x.b), kv_bits(x.c), kv_bits(x.d)};
    }
};

struct KvBFloat16 {
    static constexpr kv_u32 kBytes = 2;

    struct Staged {
        const kv_u8* values;

        KV_HD KvPairs pairs(kv_u32 quad) const {
            const kv_u8* at = values + kv_swizzled(quad / 2) * kKvVectorBytes + quad % 2 * 8;
            const kv_u64 both = kv_load<kv_u64>(at);
            return {(kv_u32)both, (kv_u32)(both >> 32)};
        }
        KV_HD KvFour four(kv_u32 quad) const { return pairs(quad).four(); }
    };

    template <class Source>
    KV_HD static KvVector vector(const Source& from, kv_u32 index) {
        const KvPairs first = from.pairs(index * 2), second = from.pairs(index * 2 + 1);
        return {first.low, first.high, second.low, second.high};
    }
};

// Two channels at a time.
KV_HD kv_u32 kv_amax(const KvBFloat16::Staged& from, kv_u32 first_quad, kv_u32 quads) {
    constexpr kv_u32 magnitudes = 0x7fff7fffu;
    kv_u32 amax = 0;
#pragma unroll
    for (kv_u32 q = 0; q < quads; ++q) {
        const KvPairs x = from.pairs(first_quad + q);
        amax = kv_pair_max(amax, kv_pair_max(x.low & magnitudes, x.high & magnitudes));
    }
    return kv_max_bits(amax << 16, amax & 0xffff0000u);
}

// Where a thread's item lies when rows have `width` items; one division for all of them.
struct KvPlace {
    kv_u32 row, in_row, row_step, step;

    KV_HD KvPlace(kv_u32 thread, kv_u32 width)
        : row(thread / width),
          in_row(thread % width),
          row_step(kKvThreads / width),
          step(kKvThreads % width) {}

    KV_HD void next(kv_u32 width) {
        row += row_step;
        in_row += step;
        if (in_row < width) return;
        in_row -= width;
        ++row;
    }
};

template <class Kind>
KV_HD kv_u32 kv_record_bytes(kv_u32 channels) {
    return channels * Kind::kCodeBits / 8 + channels / Kind::kGroup;
}

// Shared memory: the tile's values, swizzled, up to a multiple of 128 bytes; then its records.
template <class Kind, class Value>
struct KvQuantize {
    using Args = KvConvertArgs;
    static constexpr int kPhases = 3;

    KV_HD static void phase(int phase, const Args& args, kv_u32 block, kv_u32 thread,
                            kv_u8* shared) {
        const kv_u32 rows = args.rows_of(block);
        const kv_u32 record = kv_record_bytes<Kind>(args.channels);
        kv_u8* tile = shared + kv_round_up(args.tile_rows * args.channels * Value::kBytes, 128);
        if (phase == 0) stage(args, args.first_row(block), rows, thread, shared);
        if (phase == 1) convert(args.channels, rows, record, thread, shared, tile);
        if (phase == 2) kv_copy(args.to + args.first_row(block) * record, tile, rows * record, thread);
    }

  private:
    KV_HD static void stage(const Args& args, kv_u64 first, kv_u32 rows, kv_u32 thread,
                            kv_u8* shared) {
        const kv_u32 row_bytes = args.channels * Value::kBytes;
        const kv_u8* values = args.from + first * row_bytes;
        for (kv_u32 v = thread; v < rows * row_bytes / kKvVectorBytes; v += kKvThreads)
            kv_store(shared + kv_swizzled(v) * kKvVectorBytes,
                     kv_load<KvVector>(values + v * kKvVectorBytes));
    }

    KV_HD static void convert(kv_u32 channels, kv_u32 rows, kv_u32 record, kv_u32 thread,
                              const kv_u8* staged, kv_u8* tile) {
        constexpr kv_u32 code_bytes = Kind::kGroup * Kind::kCodeBits / 8;
        const kv_u32 groups = channels / Kind::kGroup;
        KvPlace place(thread, groups);
        for (kv_u32 g = thread; g < rows * groups; g += kKvThreads, place.next(groups)) {
            kv_u8* row = tile + place.row * record;
            kv_put_group<Kind>(typename Value::Staged{staged}, g, row + place.in_row * code_bytes,
                               row + groups * code_bytes + place.in_row);
        }
    }
};

// One record of `channels` channels as a source of values, every NaN the one that is defined.
template <class Kind>
struct KvRecordValues {
    const kv_u8* row;
    kv_u32 code_bytes;

    KV_HD float scale(kv_u32 quad) const {
        return Kind::scale_value(row[code_bytes + quad * 4 / Kind::kGroup]);
    }
    KV_HD KvFour four(kv_u32 quad) const {
        constexpr int bits = Kind::kCodeBits;
        const KvFour values = kv_code_values<bits>(kv_codes_at<bits>(row, quad));
        return kv_one_nan(kv_times(values, scale(quad)));
    }
    KV_HD KvPairs pairs(kv_u32 quad) const {
        constexpr int bits = Kind::kCodeBits;
        return kv_scaled_pairs<bits>(kv_codes_at<bits>(row, quad), scale(quad));
    }
};

// Shared memory: the tile's records.
template <class Kind, class Value>
struct KvDequantize {
    using Args = KvConvertArgs;
    static constexpr int kPhases = 2;

    KV_HD static void phase(int phase, const Args& args, kv_u32 block, kv_u32 thread,
                            kv_u8* shared) {
        const kv_u32 rows = args.rows_of(block);
        const kv_u32 record = kv_record_bytes<Kind>(args.channels);
        if (phase == 0)
            kv_copy(shared, args.from + args.first_row(block) * record, rows * record, thread);
        if (phase == 1) convert(args, args.first_row(block), rows, record, thread, shared);
    }

  private:
    KV_HD static void convert(const Args& args, kv_u64 first, kv_u32 rows, kv_u32 record,
                              kv_u32 thread, const kv_u8* tile) {
        const kv_u32 row_bytes = args.channels * Value::kBytes;
        const kv_u32 vectors = row_bytes / kKvVectorBytes;
        const kv_u32 code_bytes = args.channels * Kind::kCodeBits / 8;
        kv_u8* values = args.to + first * row_bytes;
        KvPlace place(thread, vectors);
        for (kv_u32 v = thread; v < rows * vectors; v += kKvThreads, place.next(vectors)) {
            const KvRecordValues<Kind> from{tile + place.row * record, code_bytes};
            kv_store(values + v * kKvVectorBytes, Value::vector(from, place.in_row));
        }
    }
};
