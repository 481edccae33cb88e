// How the device kernels move bytes: 16 at a time between global and shared memory.
//
// A kernel is a body with phases. Between two phases stands a barrier of the block, and nothing
// but shared memory survives it, so that a host can run the same code: all threads of a phase, one
// after the other, then the next phase.
//
// Global addresses are multiples of 16; sizes are multiples of 4.
#pragma once

#include "device_math.h"

constexpr kv_u32 kKvThreads = 128;
constexpr kv_u32 kKvVectorBytes = 16;

struct alignas(16) KvVector {
    kv_u32 x, y, z, w;
};

#if defined(KV_EMULATE_DEVICE)
// Counts what would be a fault on a device.
void kv_note_address(const void* at, unsigned bytes);
#else
KV_HD void kv_note_address(const void*, unsigned) {}
#endif

template <class T>
KV_HD T kv_load(const kv_u8* at) {
#if defined(__CUDA_ARCH__)
    return *reinterpret_cast<const T*>(at);
#else
    kv_note_address(at, sizeof(T));
    T value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
#endif
}

template <class T>
KV_HD void kv_store(kv_u8* at, T value) {
#if defined(__CUDA_ARCH__)
    *reinterpret_cast<T*>(at) = value;
#else
    kv_note_address(at, sizeof(T));
    __builtin_memcpy(at, &value, sizeof value);
#endif
}

// An address out of a table. A device compiler can't see that it is one of global memory.
KV_HD kv_u8* kv_global(kv_u64 address) {
#if defined(__CUDA_ARCH__)
    return static_cast<kv_u8*>(__cvta_global_to_generic(address));
#else
    return reinterpret_cast<kv_u8*>(address);
#endif
}

KV_HD kv_u32 kv_round_up(kv_u32 bytes, kv_u32 step) { return (bytes + step - 1) / step * step; }

// Straight copy by all threads of a block. `bytes` need not fill the last vector.
KV_HD void kv_copy(kv_u8* to, const kv_u8* from, kv_u32 bytes, kv_u32 thread) {
    const kv_u32 whole = bytes & ~(kKvVectorBytes - 1);
    for (kv_u32 at = thread * kKvVectorBytes; at < whole; at += kKvThreads * kKvVectorBytes)
        kv_store(to + at, kv_load<KvVector>(from + at));
#pragma unroll 1
    for (kv_u32 at = whole + thread * 4; at < bytes; at += kKvThreads * 4)
        kv_store(to + at, kv_load<kv_u32>(from + at));
}

// Where vector `index` of a staged run of values lies. Threads that read whole groups, 32 to 128
// bytes apart, then meet in no bank.
KV_HD kv_u32 kv_swizzled(kv_u32 index) { return index ^ ((index >> 3) & 7u); }

// ---- rows between a page and a tile --------------------------------------------------------
//
// A page holds a row's data and its scales side by side (interleaved), or all rows' data and then
// all rows' scales (split). A tile in shared memory is always interleaved.

// One vector of a split page's data or scales, `index` counted over the tile's rows, to or from
// its words in the tile. `PieceBytes`: of one row in that part; `at`: where it lies in the record.
template <kv_u32 RecordBytes, kv_u32 PieceBytes>
KV_HD kv_u32 kv_tile_word(kv_u32 word, kv_u32 at) {
    return word * 4 / PieceBytes * RecordBytes + at + word * 4 % PieceBytes;
}

template <kv_u32 RecordBytes, kv_u32 PieceBytes>
KV_HD void kv_piece_in(kv_u8* tile, const kv_u8* piece, kv_u32 rows, kv_u32 at, kv_u32 thread) {
    for (kv_u32 v = thread; v < rows * PieceBytes / kKvVectorBytes; v += kKvThreads) {
        const KvVector vector = kv_load<KvVector>(piece + v * kKvVectorBytes);
        const kv_u32 word = v * 4;
        if constexpr (RecordBytes % 16 == 0 && PieceBytes % 16 == 0) {
            kv_store(tile + kv_tile_word<RecordBytes, PieceBytes>(word, at), vector);
        } else {
            kv_store(tile + kv_tile_word<RecordBytes, PieceBytes>(word, at), vector.x);
            kv_store(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 1, at), vector.y);
            kv_store(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 2, at), vector.z);
            kv_store(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 3, at), vector.w);
        }
    }
}

template <kv_u32 RecordBytes, kv_u32 PieceBytes>
KV_HD void kv_piece_out(kv_u8* piece, const kv_u8* tile, kv_u32 rows, kv_u32 at, kv_u32 thread) {
    for (kv_u32 v = thread; v < rows * PieceBytes / kKvVectorBytes; v += kKvThreads) {
        const kv_u32 word = v * 4;
        KvVector vector;
        if constexpr (RecordBytes % 16 == 0 && PieceBytes % 16 == 0) {
            vector = kv_load<KvVector>(tile + kv_tile_word<RecordBytes, PieceBytes>(word, at));
        } else {
            vector.x = kv_load<kv_u32>(tile + kv_tile_word<RecordBytes, PieceBytes>(word, at));
            vector.y = kv_load<kv_u32>(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 1, at));
            vector.z = kv_load<kv_u32>(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 2, at));
            vector.w = kv_load<kv_u32>(tile + kv_tile_word<RecordBytes, PieceBytes>(word + 3, at));
        }
        kv_store(piece + v * kKvVectorBytes, vector);
    }
}
