// Rows between an engine's pages and a block's sections, re-encoded on the way where they differ.
//
// One launch serves many moves: a grid of (tiles of the longest move) x (moves). A section is
// always interleaved.
#pragma once

#include "device_records.h"

// A run of neighbouring rows of one page and of one section; `rows` is a multiple of the tile, 0
// for nothing to do. `scales` is used in split pages only.
struct alignas(16) KvMove {
    kv_u64 data;
    kv_u64 scales;
    kv_u64 section;
    kv_u64 rows;
};

struct KvMoveArgs {
    const KvMove* moves;
    kv_u32 split;
};

template <class Row>
constexpr kv_u32 kv_row_bytes = Row::kData + Row::kScales;

// Rows of a tile: few enough that many blocks share a multiprocessor, a multiple of 4 so that
// every piece of a page is whole vectors.
template <class Row>
constexpr kv_u32 kv_tile_rows = Row::kChannels >= 512 ? 16 : 32;

template <class Row>
KV_HD void kv_page_in(kv_u8* tile, const KvMove& move, kv_u32 first, kv_u32 split, kv_u32 thread) {
    constexpr kv_u32 rows = kv_tile_rows<Row>, record = kv_row_bytes<Row>;
    const kv_u8* data = kv_global(move.data);
    if (!split) return kv_copy(tile, data + first * record, rows * record, thread);
    kv_piece_in<record, Row::kData>(tile, data + first * Row::kData, rows, 0, thread);
    const kv_u8* scales = kv_global(move.scales) + first * Row::kScales;
    kv_piece_in<record, Row::kScales>(tile, scales, rows, Row::kData, thread);
}

template <class Row>
KV_HD void kv_page_out(const kv_u8* tile, const KvMove& move, kv_u32 first, kv_u32 split,
                       kv_u32 thread) {
    constexpr kv_u32 rows = kv_tile_rows<Row>, record = kv_row_bytes<Row>;
    kv_u8* data = kv_global(move.data);
    if (!split) return kv_copy(data + first * record, tile, rows * record, thread);
    kv_piece_out<record, Row::kData>(data + first * Row::kData, tile, rows, 0, thread);
    kv_u8* scales = kv_global(move.scales) + first * Row::kScales;
    kv_piece_out<record, Row::kScales>(scales, tile, rows, Row::kData, thread);
}

template <class Row>
KV_HD kv_u8* kv_section_at(const KvMove& move, kv_u32 first) {
    return kv_global(move.section) + first * kv_row_bytes<Row>;
}

template <class A, class B>
constexpr bool kv_same = false;
template <class A>
constexpr bool kv_same<A, A> = true;

// Every row of a tile from one encoding to another.
template <class From, class To>
KV_HD void kv_reencode(const kv_u8* from, kv_u8* to, kv_u32 thread) {
    static_assert(From::kChannels == To::kChannels, "the same rows");
    for (kv_u32 u = thread; u < kv_tile_rows<To> * To::kUnits; u += kKvThreads) {
        const kv_u8* old = from + u / To::kUnits * kv_row_bytes<From>;
        kv_u8* made = to + u / To::kUnits * kv_row_bytes<To>;
        To::fill(made, u % To::kUnits, KvRowValues<From>{old});
        if constexpr (kv_same<typename To::Kind, KvNvfp4>)
            kv_recover_scale<From>(old, made, u % To::kUnits);
    }
}

template <bool First, class A, class B>
struct KvSelect {
    using Type = A;
};
template <class A, class B>
struct KvSelect<false, A, B> {
    using Type = B;
};

// Shared memory: the tile as it came; where the encodings differ, the tile as it goes.
template <class Page, class Section, bool Gather>
struct KvMoveRows {
    using Args = KvMoveArgs;
    using From = typename KvSelect<Gather, Page, Section>::Type;
    using To = typename KvSelect<Gather, Section, Page>::Type;
    static constexpr bool kCopies = kv_same<Page, Section>;
    static constexpr int kPhases = kCopies ? 2 : 3;
    static constexpr kv_u32 kRows = kv_tile_rows<Page>;
    static constexpr kv_u32 kFromBytes = (kRows * kv_row_bytes<From> + 15) / 16 * 16;
    static constexpr kv_u32 kSharedBytes = kFromBytes + (kCopies ? 0 : kRows * kv_row_bytes<To>);

    KV_HD static void phase(int phase, const Args& args, kv_u32 tile, kv_u32 index, kv_u32 thread,
                            kv_u8* shared) {
        const KvMove move = args.moves[index];
        const kv_u32 first = tile * kRows;
        if (first >= move.rows) return;
        kv_u8* going = kCopies ? shared : shared + kFromBytes;
        if (phase == 0) {
            if constexpr (Gather)
                kv_page_in<Page>(shared, move, first, args.split, thread);
            else
                kv_copy(shared, kv_section_at<Section>(move, first), kRows * kv_row_bytes<Section>,
                        thread);
        } else if (phase < kPhases - 1) {
            if constexpr (!kCopies) kv_reencode<From, To>(shared, going, thread);
        } else {
            if constexpr (Gather)
                kv_copy(kv_section_at<Section>(move, first), going, kRows * kv_row_bytes<Section>,
                        thread);
            else
                kv_page_out<Page>(going, move, first, args.split, thread);
        }
    }
};
