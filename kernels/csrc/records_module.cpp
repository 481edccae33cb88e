// kernels._records: the record codecs for Python, over the buffer protocol.
//
// The arguments are checked again here although `kernels` has checked them, so that no call can
// write outside a buffer. The interpreter lock is released while rows are converted.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "records_avx2.h"
#include "records_portable.h"

namespace {

using records::Avx2Span;
using records::BFloat16;
using records::Float32;
using records::PortableSpan;

using Convert = void (*)(const kv_u8* from, kv_u8* to, size_t rows, size_t channels);

struct Functions {
    Convert quantize[2];    // from float32, from bfloat16
    Convert dequantize[2];  // to float32, to bfloat16
};

struct Kind {
    const char* name;
    Py_ssize_t group;
    size_t (*record_bytes)(size_t channels);
    Functions portable;
    Functions avx2;
};

template <template <class, class> class Span, class K>
constexpr Functions functions() {
    return {{records::quantize_rows<Span, K, Float32>, records::quantize_rows<Span, K, BFloat16>},
            {records::dequantize_rows<Span, K, Float32>,
             records::dequantize_rows<Span, K, BFloat16>}};
}

template <class K>
constexpr Kind kind(const char* name) {
#if defined(RECORDS_HAVE_AVX2)
    return {name, K::kGroup, records::record_bytes<K>, functions<PortableSpan, K>(),
            functions<Avx2Span, K>()};
#else
    return {name, K::kGroup, records::record_bytes<K>, functions<PortableSpan, K>(), {}};
#endif
}

const Kind kKinds[] = {kind<KvNvfp4>("nvfp4"), kind<KvMxfp4>("mxfp4"), kind<KvFp8>("fp8")};

// So that a row's bytes can't overflow.
constexpr Py_ssize_t kChannelsMax = PY_SSIZE_T_MAX / 16;

bool has_avx2() {
#if defined(RECORDS_HAVE_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

// The caller's thread may flush subnormals or round another way; records may not depend on it.
class DefaultArithmetic {
#if defined(__x86_64__)
  public:
    DefaultArithmetic() : callers_(__builtin_ia32_stmxcsr()) {
        __builtin_ia32_ldmxcsr(kDefaultControl);
    }
    ~DefaultArithmetic() { __builtin_ia32_ldmxcsr(callers_); }

  private:
    static constexpr unsigned kDefaultControl = 0x1f80;
    unsigned callers_;
#endif
};

const Kind* find_kind(const char* name) {
    for (const Kind& kind : kKinds)
        if (std::strcmp(kind.name, name) == 0) return &kind;
    PyErr_Format(PyExc_ValueError, "record kind '%s' is unknown; use nvfp4, mxfp4 or fp8", name);
    return nullptr;
}

const Functions* find_functions(const Kind& kind, const char* backend) {
    if (std::strcmp(backend, "portable") == 0) return &kind.portable;
    if (std::strcmp(backend, "avx2") == 0) {
        if (has_avx2()) return &kind.avx2;
        PyErr_SetString(PyExc_RuntimeError,
                        "backend 'avx2' can't run on this processor; use portable");
        return nullptr;
    }
    PyErr_Format(PyExc_ValueError, "backend '%s' is unknown; use portable or avx2", backend);
    return nullptr;
}

class Buffer {
  public:
    Buffer() { view_.obj = nullptr; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }

    bool acquire(PyObject* object, bool writable) {
        const int flags = PyBUF_ND | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
        return PyObject_GetBuffer(object, &view_, flags) == 0;
    }
    kv_u8* data() const { return static_cast<kv_u8*>(view_.buf); }
    Py_ssize_t bytes() const { return view_.len; }
    Py_ssize_t itemsize() const { return view_.itemsize; }

  private:
    Py_buffer view_;
};

bool overlap(const Buffer& a, const Buffer& b) {
    return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
}

// The number of rows, or -1 with an exception.
Py_ssize_t count_rows(const Kind& kind, const Buffer& values, const Buffer& records,
                      Py_ssize_t channels) {
    if (channels <= 0 || channels % kind.group != 0 || channels > kChannelsMax) {
        PyErr_Format(PyExc_ValueError,
                     "%zd channels; %s needs a positive multiple of %zd, at most %zd", channels,
                     kind.name, kind.group, kChannelsMax);
        return -1;
    }
    if (values.itemsize() != 4 && values.itemsize() != 2) {
        PyErr_Format(PyExc_TypeError,
                     "values of %zd bytes each; pass float32, or bfloat16 as uint16",
                     values.itemsize());
        return -1;
    }
    if (records.itemsize() != 1) {
        PyErr_Format(PyExc_TypeError, "record items of %zd bytes each; pass uint8",
                     records.itemsize());
        return -1;
    }
    const Py_ssize_t record_bytes =
        static_cast<Py_ssize_t>(kind.record_bytes(static_cast<size_t>(channels)));
    const Py_ssize_t row_bytes = channels * values.itemsize();
    const Py_ssize_t rows = values.bytes() / row_bytes;
    if (values.bytes() % row_bytes != 0 || records.bytes() % record_bytes != 0 ||
        records.bytes() / record_bytes != rows) {
        PyErr_Format(PyExc_ValueError,
                     "%zd bytes of values and %zd bytes of records are not the same number of rows "
                     "of %zd and %zd bytes",
                     values.bytes(), records.bytes(), row_bytes, record_bytes);
        return -1;
    }
    if (rows > 0 && overlap(values, records)) {
        PyErr_SetString(PyExc_ValueError, "values and records overlap in memory");
        return -1;
    }
    return rows;
}

PyObject* convert(PyObject* args, bool quantizing) {
    const char *kind_name, *backend;
    PyObject *from_object, *to_object;
    Py_ssize_t channels;
    if (!PyArg_ParseTuple(args, "ssOOn", &kind_name, &backend, &from_object, &to_object, &channels))
        return nullptr;
    const Kind* kind = find_kind(kind_name);
    if (kind == nullptr) return nullptr;
    const Functions* functions = find_functions(*kind, backend);
    if (functions == nullptr) return nullptr;

    Buffer from, to;
    if (!from.acquire(from_object, false) || !to.acquire(to_object, true)) return nullptr;
    const Buffer& values = quantizing ? from : to;
    const Py_ssize_t rows = count_rows(*kind, values, quantizing ? to : from, channels);
    if (rows < 0) return nullptr;

    const int value_type = values.itemsize() == 4 ? 0 : 1;
    const Convert run =
        quantizing ? functions->quantize[value_type] : functions->dequantize[value_type];
    Py_BEGIN_ALLOW_THREADS;
    {
        const DefaultArithmetic arithmetic;
        run(from.data(), to.data(), static_cast<size_t>(rows), static_cast<size_t>(channels));
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* quantize(PyObject*, PyObject* args) { return convert(args, true); }

PyObject* dequantize(PyObject*, PyObject* args) { return convert(args, false); }

PyObject* backends(PyObject*, PyObject*) {
    return has_avx2() ? Py_BuildValue("(ss)", "avx2", "portable") : Py_BuildValue("(s)", "portable");
}

PyMethodDef kMethods[] = {
    {"quantize", quantize, METH_VARARGS,
     "quantize(kind, backend, values, records, channels): fill records from values"},
    {"dequantize", dequantize, METH_VARARGS,
     "dequantize(kind, backend, records, values, channels): fill values from records"},
    {"backends", backends, METH_NOARGS, "backends(): what this processor can run, fastest first"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_records",
                       "Cache record codecs (see kernels).",
                       0,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__records() { return PyModuleDef_Init(&kModule); }
