// Loops over rows in plain C++: the backend for any processor, and the rare cases of the others.
#pragma once

#include <cstddef>
#include <cstring>

#include "records.h"

namespace records {

// How one value lies in memory; unaligned addresses are allowed.
struct Float32 {
    static constexpr size_t kBytes = 4;
    static float load(const kv_u8* at) {
        float value;
        std::memcpy(&value, at, kBytes);
        return value;
    }
    static void store(kv_u8* at, float value) { std::memcpy(at, &value, kBytes); }
};

struct BFloat16 {
    static constexpr size_t kBytes = 2;
    static float load(const kv_u8* at) {
        kv_u16 bits;
        std::memcpy(&bits, at, kBytes);
        return kv_bf16_to_float(bits);
    }
    static void store(kv_u8* at, float value) {
        const kv_u16 bits = kv_float_to_bf16(value);
        std::memcpy(at, &bits, kBytes);
    }
};

template <class Kind>
constexpr size_t code_bytes(size_t channels) {
    return channels * Kind::kCodeBits / 8;
}

template <class Kind>
constexpr size_t record_bytes(size_t channels) {
    return code_bytes<Kind>(channels) + channels / Kind::kGroup;
}

// The value of every code, looked up where a processor has no faster way.
template <class Kind>
struct CodeValues {
    float of[1 << Kind::kCodeBits];

    CodeValues() {
        for (int code = 0; code < 1 << Kind::kCodeBits; ++code)
            of[code] = Kind::decode(static_cast<kv_u8>(code));
    }

    static const CodeValues& get() {
        static const CodeValues values;
        return values;
    }
};

// A span is a run of whole groups inside one row. Every backend is such a pair of functions.
template <class Kind, class Value>
struct PortableSpan {
    static constexpr int kGroup = Kind::kGroup;

    static void quantize(const kv_u8* values, kv_u8* codes, kv_u8* scales, size_t groups) {
        for (size_t g = 0; g < groups; ++g) {
            float x[kGroup];
            kv_u32 amax = 0;
            for (int i = 0; i < kGroup; ++i) {
                x[i] = Value::load(values + i * Value::kBytes);
                const kv_u32 magnitude = kv_abs_bits(x[i]);
                amax = magnitude > amax ? magnitude : amax;
            }
            scales[g] = Kind::scale(amax);
            const float scale = Kind::scale_value(scales[g]);
            kv_u8 code[kGroup];
            for (int i = 0; i < kGroup; ++i) code[i] = Kind::encode(x[i], scale);
            pack(code, codes);
            values += kGroup * Value::kBytes;
            codes += code_bytes<Kind>(kGroup);
        }
    }

    static void dequantize(const kv_u8* codes, const kv_u8* scales, kv_u8* values,
                           size_t groups) {
        const CodeValues<Kind>& value = CodeValues<Kind>::get();
        for (size_t g = 0; g < groups; ++g) {
            const float scale = Kind::scale_value(scales[g]);
            for (int i = 0; i < kGroup; ++i)
                Value::store(values + i * Value::kBytes,
                             kv_mul(value.of[code_at(codes, i)], scale));
            values += kGroup * Value::kBytes;
            codes += code_bytes<Kind>(kGroup);
        }
    }

  private:
    static void pack(const kv_u8* code, kv_u8* packed) {
        if constexpr (Kind::kCodeBits == 8) {
            std::memcpy(packed, code, kGroup);
        } else {
            for (int i = 0; i < kGroup / 2; ++i)
                packed[i] = static_cast<kv_u8>(code[2 * i] | (code[2 * i + 1] << 4));
        }
    }

    static kv_u8 code_at(const kv_u8* packed, int channel) {
        if constexpr (Kind::kCodeBits == 8) return packed[channel];
        return static_cast<kv_u8>((packed[channel / 2] >> (channel % 2 * 4)) & 0x0f);
    }
};

template <template <class, class> class Span, class Kind, class Value>
void quantize_rows(const kv_u8* values, kv_u8* records, size_t rows, size_t channels) {
    for (size_t row = 0; row < rows; ++row) {
        Span<Kind, Value>::quantize(values, records, records + code_bytes<Kind>(channels),
                                    channels / Kind::kGroup);
        values += channels * Value::kBytes;
        records += record_bytes<Kind>(channels);
    }
}

template <template <class, class> class Span, class Kind, class Value>
void dequantize_rows(const kv_u8* records, kv_u8* values, size_t rows, size_t channels) {
    for (size_t row = 0; row < rows; ++row) {
        Span<Kind, Value>::dequantize(records, records + code_bytes<Kind>(channels), values,
                                      channels / Kind::kGroup);
        values += channels * Value::kBytes;
        records += record_bytes<Kind>(channels);
    }
}

}  // namespace records
