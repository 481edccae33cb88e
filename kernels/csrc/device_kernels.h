// Every device kernel by name, once, for the device build and for a host build that runs the same
// bodies.
#pragma once

#include "device_checksum.h"
#include "device_convert.h"
#include "device_move.h"

using KvMain = KvPlainRow<KvNvfp4, 512>;
using KvIndex = KvPlainRow<KvMxfp4, 128>;
using KvMainFp8 = KvPlainRow<KvFp8, 512>;
using KvIndexFp8 = KvPlainRow<KvFp8, 128>;

// X(name, body)
#define KV_CONVERT_KERNELS(X)                                   \
    X(quantize_nvfp4_float32, KvQuantize<KvNvfp4, KvFloat32>)   \
    X(quantize_nvfp4_bfloat16, KvQuantize<KvNvfp4, KvBFloat16>) \
    X(quantize_mxfp4_float32, KvQuantize<KvMxfp4, KvFloat32>)   \
    X(quantize_mxfp4_bfloat16, KvQuantize<KvMxfp4, KvBFloat16>) \
    X(quantize_fp8_float32, KvQuantize<KvFp8, KvFloat32>)       \
    X(quantize_fp8_bfloat16, KvQuantize<KvFp8, KvBFloat16>)     \
    X(dequantize_nvfp4_float32, KvDequantize<KvNvfp4, KvFloat32>)   \
    X(dequantize_nvfp4_bfloat16, KvDequantize<KvNvfp4, KvBFloat16>) \
    X(dequantize_mxfp4_float32, KvDequantize<KvMxfp4, KvFloat32>)   \
    X(dequantize_mxfp4_bfloat16, KvDequantize<KvMxfp4, KvBFloat16>) \
    X(dequantize_fp8_float32, KvDequantize<KvFp8, KvFloat32>)       \
    X(dequantize_fp8_bfloat16, KvDequantize<KvFp8, KvBFloat16>)

// X(name, page row, section row), for gather_<name> and scatter_<name>
#define KV_MOVE_KERNELS(X)                     \
    X(main_nvfp4, KvMain, KvMain)              \
    X(main_fp8, KvMainFp8, KvMain)             \
    X(main_fp8_rotary, KvRotaryRow, KvMain)    \
    X(index_mxfp4, KvIndex, KvIndex)           \
    X(index_fp8, KvIndexFp8, KvIndex)          \
    X(index_fp8_float, KvFloatScaleRow, KvIndex)
