"""NaN and infinity: defined, the same everywhere, and no group harms another."""

import numpy as np
import pytest
import records_model as model

from kernels import codec

F32 = np.float32
NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF], np.uint32).view(F32)


@pytest.mark.parametrize("groups", [1, 2, 3, 9, 70])
def test_nan_makes_its_group_nan_and_no_other(kind, backend, groups):
    group = model.GROUP[kind]
    rng = np.random.default_rng(groups)
    x = rng.standard_normal((len(NANS), groups * group)).astype(F32)
    clean = codec.quantize(kind, x, backend=backend)
    hit = np.arange(len(NANS)) % groups
    poisoned = x.copy()
    poisoned[np.arange(len(NANS)), hit * group + group // 2] = NANS

    codes, scales = model.unpack(kind, clean, groups * group)
    expected_codes, expected_scales = codes.copy(), scales.copy()
    for row, g in enumerate(hit):
        expected_codes[row, g * group : (g + 1) * group] = 0
        expected_scales[row, g] = model.NAN_SCALE[kind]
    expected = np.concatenate([model.pack(kind, expected_codes), expected_scales], axis=1)
    got = codec.quantize(kind, poisoned, backend=backend)
    np.testing.assert_array_equal(got, expected)

    restored = codec.dequantize(kind, got, backend=backend).reshape(len(NANS), groups, group)
    for row, g in enumerate(hit):
        assert (model.bits(restored[row, g]) == model.NAN_BITS).all()
    assert np.isnan(restored).sum() == len(NANS) * group


@pytest.mark.parametrize("pattern", [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF])
def test_nan_in_bfloat16(kind, backend, pattern):
    x = np.full((1, 2 * model.GROUP[kind]), 0x40C0, np.uint16)
    x[0, 1] = pattern
    codes, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), x.shape[1])
    assert scales[0, 0] == model.NAN_SCALE[kind]
    assert scales[0, 1] != model.NAN_SCALE[kind]
    assert not codes[0, : model.GROUP[kind]].any()
    restored = codec.dequantize(
        kind, codec.quantize(kind, x, backend=backend), "bfloat16", backend=backend
    )
    assert (restored[0, : model.GROUP[kind]] == 0x7FC0).all()
    assert (restored[0, model.GROUP[kind] :] == 0x40C0).all()


def test_infinity_takes_the_largest_code_under_the_largest_finite_scale(kind, backend):
    group = model.GROUP[kind]
    x = np.zeros((2, group), F32)
    x[0, :3] = np.inf, -np.inf, 1
    x[1, 0] = np.finfo(F32).max
    codes, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), group)
    assert scales[0] == scales[1]
    largest = len(model.CODE_VALUES[kind]) - 1
    assert codes[0, :2].tolist() == [largest, largest | model.sign_bit(kind)]
    bfloat16 = (x[:1].view(np.uint32) >> 16).astype(np.uint16)
    again, _ = model.unpack(kind, codec.quantize(kind, bfloat16, backend=backend), group)
    np.testing.assert_array_equal(again, codes[:1])


def test_nan_beside_infinity_is_nan(kind, backend):
    x = np.full((1, model.GROUP[kind]), np.inf, F32)
    x[0, 7] = np.nan
    codes, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), x.shape[1])
    assert scales[0, 0] == model.NAN_SCALE[kind]
    assert not codes.any()
