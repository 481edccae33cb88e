"""Random bits: every backend equals the oracle, and the properties of the encoding."""

import numpy as np
import pytest
import records_model as model
from hypothesis import given
from hypothesis import strategies as st

from kernels import codec, record_bytes, reference

BACKENDS = [name for name in codec.available_backends() if name != "numpy"]
ORACLE = {
    kind: (getattr(reference, f"{kind}_quantize"), getattr(reference, f"{kind}_dequantize"))
    for kind in model.GROUP
}
KINDS = st.sampled_from(list(model.GROUP))
# Runs of groups shorter and longer than a vector's lanes and than a pass of the AVX2 loops.
GROUP_COUNTS = st.one_of(st.integers(1, 20), st.integers(60, 140))
MAGNITUDES = st.sampled_from(["ordinary", "any bits", "one exponent", "near ties"])


@st.composite
def rows(draw, kinds=KINDS):
    """A kind and float32 rows for it, of one of several distributions."""
    kind = draw(kinds)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(0, 3)), draw(GROUP_COUNTS) * model.GROUP[kind])
    how = draw(MAGNITUDES)
    if how == "any bits":
        return kind, rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    x = rng.standard_normal(shape).astype(np.float32)
    if how == "one exponent":
        return kind, np.ldexp(x, draw(st.integers(-140, 120))).astype(np.float32)
    if how == "near ties":
        ties = np.round(x * 4) / np.float32(4)
        return kind, (ties.view(np.int32) + rng.integers(-1, 2, shape, np.int32)).view(np.float32)
    return kind, x


@pytest.mark.skipif(not BACKENDS, reason="the extension is not built")
@given(rows())
def test_quantise_equals_the_oracle(case):
    kind, x = case
    narrow = (x.view(np.uint32) >> 16).astype(np.uint16)
    for values in (x, narrow):
        expected = ORACLE[kind][0](values)
        for backend in BACKENDS:
            got = codec.quantize(kind, values, backend=backend)
            np.testing.assert_array_equal(got, expected, err_msg=backend)


@pytest.mark.skipif(not BACKENDS, reason="the extension is not built")
@given(
    KINDS,
    st.integers(0, 3),
    GROUP_COUNTS,
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_dequantise_equals_the_oracle(kind, count, groups, seed, out_dtype):
    shape = (count, record_bytes(kind, groups * model.GROUP[kind]))
    records = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    expected = ORACLE[kind][1](records, out_dtype)
    for backend in BACKENDS:
        got = codec.dequantize(kind, records, out_dtype, backend=backend)
        np.testing.assert_array_equal(model.bits(got), model.bits(expected), err_msg=backend)


@given(rows())
def test_bfloat16_quantises_as_the_same_numbers_in_float32(case):
    kind, x = case
    narrow = (x.view(np.uint32) >> 16).astype(np.uint16)
    widened = (narrow.astype(np.uint32) << 16).view(np.float32)
    for backend in codec.available_backends():
        np.testing.assert_array_equal(
            codec.quantize(kind, narrow, backend=backend),
            codec.quantize(kind, widened, backend=backend),
        )


@given(rows())
def test_what_was_rounded_once_is_kept(case):
    """A value that went through the rounding re-encodes without loss (ds41f §4)."""
    kind, x = case
    with np.errstate(invalid="ignore"):
        x = np.where(np.abs(x) < 1e30, x, np.float32(1))
    for backend in codec.available_backends():
        once = codec.dequantize(kind, codec.quantize(kind, x, backend=backend), backend=backend)
        again = codec.dequantize(kind, codec.quantize(kind, once, backend=backend), backend=backend)
        np.testing.assert_array_equal(model.bits(once), model.bits(again))


@given(rows())
def test_quantised_values_are_exact_in_bfloat16(case):
    kind, x = case
    records = codec.quantize(kind, x)
    wide = codec.dequantize(kind, records)
    assert not (model.bits(wide) & 0xFFFF).any()
    narrow = codec.dequantize(kind, records, "bfloat16")
    np.testing.assert_array_equal(narrow, model.bits(wide) >> 16)
