"""What the functions accept, what they refuse and how they say so."""

import sys
import threading

import numpy as np
import pytest
import records_model as model

import kernels
from kernels import codec
from kernels.layout import record_kind

F32 = np.float32


def filled(shape, dtype=F32):
    return np.ones(shape, dtype)


READ_ONLY = filled((2, 9), np.uint8)
READ_ONLY.flags.writeable = False
SHARED = np.zeros(256, np.uint8)

REFUSED_QUANTISE = {
    "list": (lambda: ([1.0] * 16,), TypeError, "x is a list"),
    "dtype": (lambda: (filled((2, 16), np.float64),), TypeError, "x is float64; pass float32"),
    "byte order": (lambda: (filled((2, 16), ">f4"),), TypeError, "x is >f4"),
    "scalar": (lambda: (np.array(1, F32),), ValueError, "x has no dimension"),
    "group": (lambda: (filled((2, 24)),), ValueError, "24 channels: nvfp4 .* multiple of 16"),
    "no channel": (lambda: (filled((2, 0)),), ValueError, "0 channels"),
    "strides": (lambda: (filled((2, 32))[:, ::2],), ValueError, "x is not C-contiguous"),
    "fortran": (lambda: (np.asfortranarray(filled((2, 16))),), ValueError, "not C-contiguous"),
    "out list": (lambda: (filled((2, 16)), [0] * 18), TypeError, "out is a list"),
    "out dtype": (lambda: (filled((2, 16)), filled((2, 9))), TypeError, "out is float32; .* uint8"),
    "out shape": (
        lambda: (filled((2, 16)), filled((3, 9), np.uint8)),
        ValueError,
        r"out has shape \(3, 9\); this result has \(2, 9\)",
    ),
    "out strides": (
        lambda: (filled((2, 16)), filled((2, 18), np.uint8)[:, ::2]),
        ValueError,
        "out is not C-contiguous",
    ),
    "out read-only": (lambda: (filled((2, 16)), READ_ONLY), ValueError, "out is read-only"),
    "overlap": (
        lambda: (SHARED[:128].view(F32).reshape(2, 16), SHARED[110:128].reshape(2, 9)),
        ValueError,
        "out overlaps",
    ),
}

REFUSED_DEQUANTISE = {
    "bytes": (lambda: (b"123456789",), TypeError, "rec is a bytes"),
    "dtype": (lambda: (filled((2, 9), np.int8),), TypeError, "rec is int8; pass uint8"),
    "size": (lambda: (filled((2, 10), np.uint8),), ValueError, "10 bytes: nvfp4 .* multiple of 9"),
    "empty row": (lambda: (filled((2, 0), np.uint8),), ValueError, "0 bytes"),
    "strides": (lambda: (filled((4, 9), np.uint8)[::2],), ValueError, "rec is not C-contiguous"),
    "out_dtype": (
        lambda: (filled((2, 9), np.uint8), "float16"),
        ValueError,
        "out_dtype 'float16' is unknown",
    ),
    "out dtype": (
        lambda: (filled((2, 9), np.uint8), "bfloat16", filled((2, 16))),
        TypeError,
        "out is float32; this result is uint16",
    ),
    "out shape": (
        lambda: (filled((2, 9), np.uint8), "float32", filled((2, 32))),
        ValueError,
        r"\(2, 32\); this result has \(2, 16\)",
    ),
}


@pytest.mark.parametrize("module", [kernels, kernels.reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("case", REFUSED_QUANTISE)
def test_refused_quantise(module, case):
    arguments, error, message = REFUSED_QUANTISE[case]
    with pytest.raises(error, match=message):
        module.nvfp4_quantize(*arguments())


@pytest.mark.parametrize("module", [kernels, kernels.reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("case", REFUSED_DEQUANTISE)
def test_refused_dequantise(module, case):
    arguments, error, message = REFUSED_DEQUANTISE[case]
    with pytest.raises(error, match=message):
        module.nvfp4_dequantize(*arguments())


def test_unknown_kind():
    for call in (
        lambda: kernels.record_bytes("nvfp8", 512),
        lambda: codec.quantize("nvfp8", filled((1, 32))),
        lambda: codec.dequantize("nvfp8", filled((1, 9), np.uint8)),
    ):
        with pytest.raises(ValueError, match="'nvfp8' is unknown; use one of nvfp4, mxfp4, fp8"):
            call()


def test_sizes_are_inverse(kind):
    layout = record_kind(kind)
    for groups in range(1, 40):
        channels = groups * layout.group
        assert layout.channels(layout.record_bytes(channels)) == channels


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0, 3), (2, 3, 4)])
def test_leading_dimensions_are_free(kind, backend, lead):
    channels = 2 * model.GROUP[kind]
    x = np.random.default_rng(1).standard_normal((*lead, channels)).astype(F32)
    record = codec.quantize(kind, x, backend=backend)
    assert record.shape == (*lead, kernels.record_bytes(kind, channels))
    flat = codec.quantize(kind, x.reshape(-1, channels), backend=backend)
    np.testing.assert_array_equal(record.reshape(flat.shape), flat)
    assert codec.dequantize(kind, record, backend=backend).shape == x.shape


def test_result_goes_to_out_and_nowhere_else(kind, backend):
    """Bytes on both sides of `out` stay, for every number of groups up to two vectors' worth."""
    group, margin = model.GROUP[kind], 64
    for groups in range(1, 18):
        x = np.random.default_rng(groups).standard_normal((1, groups * group)).astype(F32)
        expected = codec.quantize(kind, x, backend="numpy")
        arena = np.full(expected.size + 2 * margin, 0xA5, np.uint8)
        out = arena[margin:-margin].reshape(expected.shape)
        assert codec.quantize(kind, x, out, backend=backend) is out
        np.testing.assert_array_equal(out, expected)
        assert (arena[:margin] == 0xA5).all()
        assert (arena[-margin:] == 0xA5).all()
        for out_dtype, dtype in (("float32", F32), ("bfloat16", np.uint16)):
            values = codec.dequantize(kind, expected, out_dtype, backend="numpy")
            arena = np.full(values.nbytes + 2 * margin, 0xA5, np.uint8)
            target = arena[margin:-margin].view(dtype).reshape(values.shape)
            assert codec.dequantize(kind, expected, out_dtype, target, backend=backend) is target
            np.testing.assert_array_equal(model.bits(target), model.bits(values))
            assert (arena[:margin] == 0xA5).all()
            assert (arena[-margin:] == 0xA5).all()


def test_unaligned_arrays(kind, backend):
    channels = 3 * model.GROUP[kind]
    x = np.random.default_rng(2).standard_normal((2, channels)).astype(F32)
    shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(F32).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    record = codec.quantize(kind, x, backend=backend)
    np.testing.assert_array_equal(codec.quantize(kind, shifted, backend=backend), record)
    values = codec.dequantize(kind, record, backend=backend)
    codec.dequantize(kind, record, "float32", shifted, backend=backend)
    np.testing.assert_array_equal(shifted, values)


class TestExtension:
    """The compiled functions refuse by themselves what would write outside a buffer."""

    @pytest.fixture
    def records(self):
        return pytest.importorskip("kernels._records")

    @pytest.mark.parametrize(
        ("kind", "backend", "x", "out", "channels", "error", "message"),
        [
            ("fp9", "portable", (2, 32), (2, 18), 32, ValueError, "'fp9' is unknown"),
            ("nvfp4", "sse", (2, 32), (2, 18), 32, ValueError, "'sse' is unknown"),
            ("nvfp4", "portable", (2, 32), (2, 18), 24, ValueError, "24 channels"),
            ("nvfp4", "portable", (2, 32), (2, 18), 0, ValueError, "0 channels"),
            ("nvfp4", "portable", (2, 32), (2, 18), -16, ValueError, "-16 channels"),
            ("nvfp4", "portable", (0, 32), (0, 18), 2**62, ValueError, "4611686018427387904 chan"),
            ("nvfp4", "portable", (2, 32), (1, 18), 32, ValueError, "not the same number of rows"),
            ("nvfp4", "portable", (1, 32), (2, 18), 32, ValueError, "not the same number of rows"),
            ("nvfp4", "portable", (2, 32), (2, 19), 32, ValueError, "not the same number of rows"),
            ("nvfp4", "portable", (2, 32), (2, 18), 48, ValueError, "not the same number of rows"),
        ],
    )
    def test_refuses(self, records, kind, backend, x, out, channels, error, message):
        with pytest.raises(error, match=message):
            records.quantize(kind, backend, filled(x), filled(out, np.uint8), channels)

    def test_refuses_item_sizes(self, records):
        with pytest.raises(TypeError, match="values of 8 bytes each"):
            records.quantize("nvfp4", "portable", filled((1, 16), "f8"), filled(9, "u1"), 16)
        with pytest.raises(TypeError, match="record items of 2 bytes each"):
            records.quantize("nvfp4", "portable", filled((1, 16)), filled(9, "u2"), 16)

    def test_refuses_memory_it_may_not_use(self, records):
        with pytest.raises(ValueError, match="overlap"):
            records.quantize("nvfp4", "portable", SHARED[:64].view(F32), SHARED[60:69], 16)
        with pytest.raises((BufferError, ValueError)):
            records.quantize("nvfp4", "portable", filled((2, 16)), READ_ONLY, 16)
        with pytest.raises((BufferError, ValueError)):
            records.quantize("nvfp4", "portable", filled(32)[::2], filled(9, "u1"), 16)
        with pytest.raises(TypeError):
            records.quantize("nvfp4", "portable", [1.0] * 16, filled(9, "u1"), 16)

    def test_releases_the_interpreter_lock(self, records):
        """With thread switches all but forbidden, another thread runs during a conversion only if
        the conversion lets it."""
        x, out = filled((2048, 512)), np.empty((2048, 288), np.uint8)
        started, other_ran = threading.Event(), threading.Event()
        seen = []

        def convert():
            started.set()
            for _ in range(500):
                records.quantize("nvfp4", "portable", x, out, 512)
                if other_ran.is_set():
                    break
            seen.append(other_ran.is_set())

        interval = set_switch_interval(1000.0)
        try:
            thread = threading.Thread(target=convert)
            thread.start()
            started.wait()
            other_ran.set()
            thread.join()
        finally:
            set_switch_interval(interval)
        assert seen == [True]


def set_switch_interval(seconds):
    """Set the interpreter's switch interval and return the one before."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    return before
