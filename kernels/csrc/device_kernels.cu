// The entry points of the device kernels; the bodies are in the headers. Compiled by NVRTC at run
// time, so that only the compiler's own names are used.
#include "device_kernels.h"

#define KV_KERNEL extern "C" __global__ void __launch_bounds__(kKvThreads)

template <class Body>
__device__ __forceinline__ void kv_run_convert(const KvConvertArgs& args) {
    extern __shared__ __align__(16) kv_u8 shared[];
#pragma unroll
    for (int phase = 0; phase < Body::kPhases; ++phase) {
        if (phase > 0) __syncthreads();
        Body::phase(phase, args, blockIdx.x, threadIdx.x, shared);
    }
}

template <class Body>
__device__ __forceinline__ void kv_run_move(const KvMoveArgs& args) {
    __shared__ __align__(16) kv_u8 shared[Body::kSharedBytes];
#pragma unroll
    for (int phase = 0; phase < Body::kPhases; ++phase) {
        if (phase > 0) __syncthreads();
        Body::phase(phase, args, blockIdx.x, blockIdx.y, threadIdx.x, shared);
    }
}

#define KV_ENTRY(name, ...)                                                                       \
    KV_KERNEL name(const kv_u8* from, kv_u8* to, kv_u64 rows, kv_u32 channels, kv_u32 tile_rows) { \
        kv_run_convert<__VA_ARGS__>(KvConvertArgs{from, to, rows, channels, tile_rows});          \
    }
KV_CONVERT_KERNELS(KV_ENTRY)
#undef KV_ENTRY

#define KV_ENTRY(name, Page, Section)                               \
    KV_KERNEL gather_##name(const KvMove* moves, kv_u32 split) {    \
        kv_run_move<KvMoveRows<Page, Section, true>>(KvMoveArgs{moves, split});  \
    }                                                               \
    KV_KERNEL scatter_##name(const KvMove* moves, kv_u32 split) {   \
        kv_run_move<KvMoveRows<Page, Section, false>>(KvMoveArgs{moves, split}); \
    }
KV_MOVE_KERNELS(KV_ENTRY)
#undef KV_ENTRY

KV_KERNEL checksum(const KvSpan* spans, kv_u8* digests) {
    __shared__ __align__(16) kv_u8 shared[KvChecksum::kSharedBytes];
    const KvChecksumArgs args{spans, digests};
    const int phases = KvChecksum::phases(args, blockIdx.x);
    for (int phase = 0; phase < phases; ++phase) {
        if (phase > 0) __syncthreads();
        KvChecksum::phase(phase, args, blockIdx.x, threadIdx.x, shared);
    }
}
