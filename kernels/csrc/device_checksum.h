// xxh3-128 with seed 0 of byte runs longer than 240 bytes, as xxHash's specification defines it.
//
// The hash adds up 1024 bytes at a time and stirs after each. So the sums of all 1024-byte parts
// can be made at once, and only the stirring is one after the other: a block of threads hashes one
// run, sums 32 parts at a time, and then eight threads stir them in.
#pragma once

#include "device_memory.h"

#if defined(__CUDACC__)
#define KV_CONSTANT __constant__
#else
#define KV_CONSTANT static const
#endif

constexpr kv_u64 kKvPrime32First = 0x9e3779b1ull;
constexpr kv_u64 kKvPrime64First = 0x9e3779b185ebca87ull;
constexpr kv_u64 kKvPrime64Second = 0xc2b2ae3d27d4eb4full;

// The default secret, in little-endian words.
KV_CONSTANT kv_u64 kv_xxh3_secret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull,
    0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull,
    0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull,
    0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull,
    0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull, 0xfca1477d58be162bull,
    0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// What the eight sums begin with.
KV_CONSTANT kv_u64 kv_xxh3_start[8] = {
    0xc2b2ae3dull,         kKvPrime64First, kKvPrime64Second,      0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x85ebca77ull,   0x27d4eb2f165667c5ull, kKvPrime32First,
};

constexpr kv_u32 kKvLanes = 8;
constexpr kv_u32 kKvStripeBytes = 64;
constexpr kv_u32 kKvPartBytes = 1024;
constexpr kv_u32 kKvPartStripes = kKvPartBytes / kKvStripeBytes;
constexpr kv_u32 kKvPartsAtOnce = kKvThreads / 4;
constexpr kv_u32 kKvDigestBytes = 16;

// Bytes to hash: a multiple of 16, more than 240.
struct alignas(16) KvSpan {
    kv_u64 at;
    kv_u64 bytes;

    // Parts that are stirred in; the last byte is never in one.
    KV_HD kv_u32 parts() const { return bytes == 0 ? 0 : (kv_u32)((bytes - 1) / kKvPartBytes); }
    KV_HD kv_u32 rounds() const { return parts() / kKvPartsAtOnce + 1; }
    KV_HD const kv_u8* data() const { return kv_global(at); }
};

// Eight bytes of the secret, from any byte on.
KV_HD kv_u64 kv_secret(kv_u32 byte) {
    const kv_u32 shift = byte % 8 * 8;
    const kv_u64 low = kv_xxh3_secret[byte / 8] >> shift;
    return shift == 0 ? low : low | (kv_xxh3_secret[byte / 8 + 1] << (64 - shift));
}

// The product's halves, one over the other.
KV_HD kv_u64 kv_folded_product(kv_u64 a, kv_u64 b) {
#if defined(__CUDA_ARCH__)
    return (a * b) ^ __umul64hi(a, b);
#else
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (kv_u64)product ^ (kv_u64)(product >> 64);
#endif
}

// What stripes add to two neighbouring sums.
struct KvSums {
    kv_u64 even, odd;

    KV_HD void add(const kv_u8* at, kv_u32 secret) {
        const KvVector v = kv_load<KvVector>(at);
        const kv_u64 first = v.x | (kv_u64)v.y << 32, second = v.z | (kv_u64)v.w << 32;
        const kv_u64 a = first ^ kv_secret(secret), b = second ^ kv_secret(secret + 8);
        even += second + (a & 0xffffffffu) * (a >> 32);
        odd += first + (b & 0xffffffffu) * (b >> 32);
    }
};

// Half of the digest, from the eight sums.
KV_HD kv_u64 kv_merged(const kv_u8* sums, kv_u32 secret, kv_u64 start) {
    kv_u64 result = start;
    for (kv_u32 i = 0; i < kKvLanes; i += 2)
        result += kv_folded_product(kv_load<kv_u64>(sums + i * 8) ^ kv_secret(secret + i * 8),
                                    kv_load<kv_u64>(sums + i * 8 + 8) ^ kv_secret(secret + i * 8 + 8));
    result ^= result >> 37;
    result *= 0x165667919e3779f9ull;
    return result ^ (result >> 32);
}

KV_HD void kv_store_big_endian(kv_u8* at, kv_u64 value) {
    for (int i = 0; i < 8; ++i) at[i] = (kv_u8)(value >> (56 - 8 * i));
}

struct KvChecksumArgs {
    const KvSpan* spans;
    kv_u8* digests;
};

// Shared memory: the eight running sums; then eight sums of each part at hand.
struct KvChecksum {
    using Args = KvChecksumArgs;
    static constexpr kv_u32 kSharedBytes = (1 + kKvPartsAtOnce) * kKvLanes * 8;

    // Two per round, and one to finish.
    KV_HD static int phases(const Args& args, kv_u32 index) {
        return 2 * (int)args.spans[index].rounds() + 1;
    }

    KV_HD static void phase(int phase, const Args& args, kv_u32 index, kv_u32 thread,
                            kv_u8* shared) {
        const KvSpan span = args.spans[index];
        if (span.bytes == 0) return;
        const kv_u32 round = (kv_u32)phase / 2, first = round * kKvPartsAtOnce;
        const bool last = round + 1 == span.rounds();
        if (round == span.rounds()) {
            if (thread < 2) finish(span, args.digests + index * kKvDigestBytes, thread, shared);
        } else if (phase % 2 == 0) {
            sum(span, first, thread, shared + (1 + thread / 4) * kKvLanes * 8);
        } else if (thread < kKvLanes) {
            stir(first, span.parts(), last, thread, shared);
        }
    }

  private:
    // Two sums of one part by each thread. Behind the stirred parts comes what is left of the run,
    // with its last stripe, which may overlap the stripe before it.
    KV_HD static void sum(const KvSpan& span, kv_u32 first, kv_u32 thread, kv_u8* sums) {
        const kv_u32 part = first + thread / 4, pair = thread % 4 * 16;
        if (part > span.parts()) return;
        const kv_u8* data = span.data() + (kv_u64)part * kKvPartBytes;
        kv_u32 stripes = kKvPartStripes;
        KvSums own{0, 0};
        if (part == span.parts()) {
            stripes = (kv_u32)((span.bytes - 1) % kKvPartBytes) / kKvStripeBytes;
            own.add(span.data() + span.bytes - kKvStripeBytes + pair, 121 + pair);
        }
        for (kv_u32 s = 0; s < stripes; ++s) own.add(data + s * kKvStripeBytes + pair, s * 8 + pair);
        kv_store(sums + pair, own.even);
        kv_store(sums + pair + 8, own.odd);
    }

    KV_HD static void stir(kv_u32 first, kv_u32 parts, bool last, kv_u32 lane, kv_u8* shared) {
        kv_u64 running = first == 0 ? kv_xxh3_start[lane] : kv_load<kv_u64>(shared + lane * 8);
        const kv_u32 end = last ? parts : first + kKvPartsAtOnce;
        for (kv_u32 part = first; part < end; ++part) {
            running += kv_load<kv_u64>(shared + ((1 + part - first) * kKvLanes + lane) * 8);
            running = (running ^ (running >> 47) ^ kv_secret(128 + lane * 8)) * kKvPrime32First;
        }
        if (last) running += kv_load<kv_u64>(shared + ((1 + parts - first) * kKvLanes + lane) * 8);
        kv_store(shared + lane * 8, running);
    }

    // The canonical form: the high half first, most significant byte first.
    KV_HD static void finish(const KvSpan& span, kv_u8* digest, kv_u32 half, const kv_u8* sums) {
        if (half == 0)
            kv_store_big_endian(digest, kv_merged(sums, 117, ~(span.bytes * kKvPrime64Second)));
        else
            kv_store_big_endian(digest + 8, kv_merged(sums, 11, span.bytes * kKvPrime64First));
    }
};
