// The device kernels' bodies on a host, thread by thread: all threads of a phase run before any
// thread of the next, in an order that the caller chooses. Shared memory begins as rubbish and ends
// in a guard; addresses that would fault on a device, or lie outside the buffers, are counted.
#define KV_EMULATE_DEVICE
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "device_kernels.h"

namespace {

constexpr size_t kGuardBytes = 64;
unsigned long faults = 0;

struct Range {
    uintptr_t start, end;
};
std::vector<Range> allowed;  // besides shared memory; all of memory where it is empty
Range shared_range;

struct Order {
    int which;
    kv_u32 thread(kv_u32 turn) const {
        if (which == 1) return kKvThreads - 1 - turn;
        if (which == 2) return (turn * 37 + 11) % kKvThreads;
        return turn;
    }
    kv_u8 rubbish() const { return which == 0 ? 0x5a : which == 1 ? 0xff : 0x00; }
};

template <class Phase>
void run_block(size_t shared_bytes, int phases, Order order, Phase phase) {
    std::vector<KvVector> memory((shared_bytes + kGuardBytes) / sizeof(KvVector) + 1);
    kv_u8* shared = reinterpret_cast<kv_u8*>(memory.data());
    const uintptr_t start = reinterpret_cast<uintptr_t>(shared);
    shared_range = {start, start + shared_bytes};
    std::memset(shared, order.rubbish(), shared_bytes);
    std::memset(shared + shared_bytes, 0xc3, kGuardBytes);
    for (int p = 0; p < phases; ++p)
        for (kv_u32 turn = 0; turn < kKvThreads; ++turn) phase(p, order.thread(turn), shared);
    for (size_t i = 0; i < kGuardBytes; ++i) faults += shared[shared_bytes + i] != 0xc3;
}

}  // namespace

void kv_note_address(const void* at, unsigned bytes) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(at);
    faults += start % bytes != 0;
    const auto inside = [&](const Range& r) { return r.start <= start && start + bytes <= r.end; };
    if (allowed.empty() || inside(shared_range)) return;
    for (size_t i = 0; i < allowed.size(); ++i)
        if (inside(allowed[i])) {
            std::swap(allowed[0], allowed[i]);
            return;
        }
    ++faults;
}

extern "C" {

// The memory that the next runs may touch: pairs of start and end; with none, all of it.
void allow(const kv_u64* ranges, kv_u32 count) {
    allowed.clear();
    for (kv_u32 i = 0; i < count; ++i)
        allowed.push_back({static_cast<uintptr_t>(ranges[2 * i]),
                           static_cast<uintptr_t>(ranges[2 * i + 1])});
}

// Faults since the last call.
unsigned long take_faults() {
    const unsigned long seen = faults;
    faults = 0;
    return seen;
}

#define KV_ENTRY(name, ...)                                                                    \
    void name(const kv_u8* from, kv_u8* to, kv_u64 rows, kv_u32 channels, kv_u32 tile_rows,    \
              kv_u32 blocks, kv_u32 shared_bytes, int order) {                                 \
        using Body = __VA_ARGS__;                                                              \
        const Body::Args args{from, to, rows, channels, tile_rows};                            \
        for (kv_u32 block = 0; block < blocks; ++block)                                        \
            run_block(shared_bytes, Body::kPhases, Order{order},                               \
                      [&](int p, kv_u32 thread, kv_u8* shared) {                               \
                          Body::phase(p, args, block, thread, shared);                         \
                      });                                                                      \
    }
KV_CONVERT_KERNELS(KV_ENTRY)
#undef KV_ENTRY

#define KV_RUN_MOVE(name, ...)                                                                 \
    void name(const KvMove* moves, kv_u32 split, kv_u32 tiles, kv_u32 count, int order) {      \
        using Body = __VA_ARGS__;                                                              \
        const Body::Args args{moves, split};                                                   \
        for (kv_u32 index = 0; index < count; ++index)                                         \
            for (kv_u32 tile = 0; tile < tiles; ++tile)                                        \
                run_block(Body::kSharedBytes, Body::kPhases, Order{order},                     \
                          [&](int p, kv_u32 thread, kv_u8* shared) {                           \
                              Body::phase(p, args, tile, index, thread, shared);               \
                          });                                                                  \
    }
#define KV_ENTRY(name, Page, Section)                            \
    KV_RUN_MOVE(gather_##name, KvMoveRows<Page, Section, true>)  \
    KV_RUN_MOVE(scatter_##name, KvMoveRows<Page, Section, false>)
KV_MOVE_KERNELS(KV_ENTRY)
#undef KV_ENTRY

void checksum(const KvSpan* spans, kv_u8* digests, kv_u32 count, int order) {
    const KvChecksumArgs args{spans, digests};
    for (kv_u32 index = 0; index < count; ++index)
        run_block(KvChecksum::kSharedBytes, KvChecksum::phases(args, index), Order{order},
                  [&](int p, kv_u32 thread, kv_u8* shared) {
                      KvChecksum::phase(p, args, index, thread, shared);
                  });
}

// Codes of float32 values under one scale byte: as records.h encodes, and as the device does.
void codes_both_ways(int kind, kv_u8 scale, const float* x, size_t count, kv_u8* plain,
                     kv_u8* device) {
    const auto fill = [&](auto k) {
        using Kind = decltype(k);
        const float value = Kind::scale_value(scale);
        const KvScale<Kind> divisor(scale);
        for (size_t i = 0; i < count; ++i) {
            plain[i] = Kind::encode(x[i], value);
            device[i] = divisor.four({x[i], x[i], x[i], x[i]}) & divisor.kept() &
                        ((1u << Kind::kCodeBits) - 1);
        }
    };
    if (kind == 0) fill(KvNvfp4{});
    if (kind == 1) fill(KvMxfp4{});
    if (kind == 2) fill(KvFp8{});
}

}
