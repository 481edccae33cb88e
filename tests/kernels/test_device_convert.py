"""The device's quantise and dequantise kernels, run on the host, against the NumPy oracle."""

import numpy as np
import pytest
import records_model as model
from device_host import ORDERS, Guarded
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernels import reference
from kernels.gpu.plan import TILE_VALUE_BYTES, convert_plan
from kernels.layout import KINDS

F32 = np.float32
CHANNELS = {"nvfp4": (64, 192, 512), "mxfp4": (128, 256, 512), "fp8": (128, 512, 640)}
VALUES = ("float32", "bfloat16")


def as_values(x, values):
    return np.ascontiguousarray(x, F32) if values == "float32" else reference.to_bfloat16(x)


def device_quantize(kernels, kind, x, order=0):
    values = "float32" if x.dtype == F32 else "bfloat16"
    plan = convert_plan(KINDS[kind], values, len(x), x.shape[1], quantizing=True)
    source = Guarded.of(x)
    out = Guarded((len(x), KINDS[kind].record_bytes(x.shape[1])), np.uint8)
    kernels.convert(plan, source.address, out.address, order)
    out.check()
    return out.array


def device_dequantize(kernels, kind, records, values, order=0):
    channels = KINDS[kind].channels(records.shape[1])
    plan = convert_plan(KINDS[kind], values, len(records), channels, quantizing=False)
    source = Guarded.of(records)
    out = Guarded((len(records), channels), F32 if values == "float32" else np.uint16)
    kernels.convert(plan, source.address, out.address, order)
    out.check()
    return out.array


def check_quantize(kernels, kind, x, order=0):
    expected = np.empty((len(x), KINDS[kind].record_bytes(x.shape[1])), np.uint8)
    reference.quantize_into(KINDS[kind], x, expected)
    np.testing.assert_array_equal(device_quantize(kernels, kind, x, order), expected)


def check_dequantize(kernels, kind, records, values, order=0):
    expected = np.empty(
        (len(records), KINDS[kind].channels(records.shape[1])),
        F32 if values == "float32" else np.uint16,
    )
    reference.dequantize_into(KINDS[kind], records, expected)
    got = device_dequantize(kernels, kind, records, values, order)
    np.testing.assert_array_equal(model.bits(got), model.bits(expected))


def wild(rng, shape):
    """Half normal numbers of many sizes, half any bits: subnormals, infinities, NaN."""
    bits = rng.integers(0, 1 << 32, shape, np.uint32).view(F32)
    usual = (rng.standard_normal(shape) * np.exp2(rng.integers(-30, 12, shape))).astype(F32)
    sizes = rng.random((*shape[:-1], 1)) < 0.5
    return np.where(sizes, usual, bits)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("order", ORDERS)
def test_random_rows_of_every_width(kind, values, order, host_kernels, seed):
    rng = np.random.default_rng(seed + order)
    for channels in CHANNELS[kind]:
        tile = TILE_VALUE_BYTES // channels // (4 if values == "float32" else 2) // 4 * 4
        for rows in (1, 5, tile, tile + 3):
            x = as_values(wild(rng, (rows, channels)), values)
            check_quantize(host_kernels, kind, x, order)
            records = rng.integers(0, 256, (rows, KINDS[kind].record_bytes(channels)), np.uint8)
            check_dequantize(host_kernels, kind, records, values, order)


def test_every_code_under_every_scale(kind, host_kernels):
    group, codes = KINDS[kind].group, 1 << KINDS[kind].code_bits
    all_codes = np.resize(np.arange(codes, dtype=np.uint8), max(codes, group))
    row_codes = np.resize(all_codes, 512)
    record = np.empty((256, KINDS[kind].record_bytes(512)), np.uint8)
    record[:, : KINDS[kind].code_bytes(512)] = model.pack(kind, row_codes)
    record[:, KINDS[kind].code_bytes(512) :] = np.arange(256, dtype=np.uint8)[:, None]
    for values in VALUES:
        check_dequantize(host_kernels, kind, record, values)


def test_ties_and_their_neighbours_under_every_scale(kind, host_kernels):
    """Every midpoint of two codes times every scale, and the floats beside it."""
    codes = model.CODE_VALUES[kind]
    midpoints = (codes[:-1] + codes[1:]) / 2
    group = model.GROUP[kind]
    for scale in model.SCALE_VALUES[kind]:
        with np.errstate(over="ignore", under="ignore"):
            exact = (midpoints * scale).astype(F32)
            largest = F32(codes[-1] * scale)
        around = [np.nextafter(exact, F32(0)), exact, np.nextafter(exact, F32(np.inf))]
        x = np.concatenate([*around, *(-a for a in around)])
        x = np.append(x, np.zeros(-len(x) % (group - 1), F32)).reshape(-1, group - 1)
        # One channel of each group holds the largest code, so that the scale is this one.
        x = np.concatenate([np.full((len(x), 1), largest), x], axis=1).reshape(-1)
        x = np.append(x, np.zeros(-len(x) % 512, F32)).reshape(-1, 512)
        check_quantize(host_kernels, kind, x)


@pytest.mark.parametrize("values", VALUES)
def test_every_bfloat16_alone_and_in_company(kind, values, host_kernels, seed):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(seed).permutation(patterns).reshape(-1, 512)
    alone = np.zeros((1 << 16, model.GROUP[kind]), np.uint16)
    alone[:, 3] = patterns
    step = 8 if values == "float32" else 1
    for x in (shuffled, alone.reshape(-1, 512)[::step]):
        if values == "float32":
            x = (x.astype(np.uint32) << 16).view(F32)
        check_quantize(host_kernels, kind, x)


def test_division_by_the_inverse_gives_the_codes_of_division(kind, host_kernels, seed):
    """Around every threshold between two codes, 400 floats to each side, and random ones."""
    codes = model.CODE_VALUES[kind]
    thresholds = (codes[:-1] + codes[1:]) / 2
    rng = np.random.default_rng(seed)
    scales = range(1, 127) if kind == "nvfp4" else range(1, 254, 9)
    for scale in scales:
        value = model.SCALE_VALUES[kind][scale]
        with np.errstate(over="ignore", under="ignore"):
            bits = (thresholds * value).astype(F32).view(np.uint32).astype(np.int64)
        near = (bits[:, None] + np.arange(-400, 401)).clip(0, 0x7F800000).astype(np.uint32)
        any_bits = rng.integers(0, 1 << 32, 4000, np.uint32)
        x = np.concatenate([near.reshape(-1), any_bits]).view(F32)
        plain, device = host_kernels.codes_both_ways(kind, scale, x[~np.isnan(x)])
        np.testing.assert_array_equal(plain, device)


@pytest.mark.long
@pytest.mark.parametrize("scale", [*range(0x38, 0x40), 1, 3, 5, 7])
def test_division_is_right_for_every_float(scale, host_kernels):
    """Every float between half the first threshold and beyond the largest code, under one scale of
    each mantissa: the others differ from them by powers of two."""
    value = model.SCALE_VALUES["nvfp4"][scale]
    first, end = np.array([0.12 * value, 6.2 * value], F32).view(np.uint32).tolist()
    step = 1 << 22
    for start in range(first, end, step):
        x = np.arange(start, min(start + step, end), dtype=np.uint32).view(F32)
        plain, device = host_kernels.codes_both_ways("nvfp4", scale, x)
        assert np.array_equal(plain, device)


def test_a_scale_that_is_nan_leaves_no_code(kind, host_kernels):
    x = np.array([0, 1, -1, np.inf, 3e38], F32)
    plain, device = host_kernels.codes_both_ways(kind, model.NAN_SCALE[kind], x)
    assert not plain.any()
    assert not device.any()


special = st.sampled_from(
    [0x0, 0x80000000, 0x1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF7FFFFF, 0x40C00000]
)


@given(
    kind=st.sampled_from(["nvfp4", "mxfp4", "fp8"]),
    bits=hnp.arrays(np.uint32, (2, 512), elements=special | st.integers(0, 2**32 - 1)),
    values=st.sampled_from(VALUES),
    order=st.sampled_from(ORDERS),
)
def test_any_rows(host_kernels, kind, bits, values, order):
    x = as_values(bits.view(F32), values)
    check_quantize(host_kernels, kind, x, order)
    check_dequantize(host_kernels, kind, device_quantize(host_kernels, kind, x), values, order)


def test_no_rows_are_no_launch(kind, host_kernels):
    assert convert_plan(KINDS[kind], "float32", 0, 512, quantizing=True).blocks == 0
    assert device_quantize(host_kernels, kind, np.zeros((0, 512), F32)).shape[0] == 0


def test_widths_that_a_device_does_not_take_are_named(kind):
    width = KINDS[kind].group * 2
    with pytest.raises(ValueError, match=rf"{width} channels.*multiple of {4 * width // 2}"):
        convert_plan(KINDS[kind], "float32", 4, width, quantizing=True)
    with pytest.raises(ValueError, match="shared memory"):
        convert_plan(KINDS[kind], "float32", 4, 1 << 16, quantizing=True)
    with pytest.raises(ValueError, match="rows: at most"):
        convert_plan(KINDS[kind], "float32", 1 << 60, 512, quantizing=True)
