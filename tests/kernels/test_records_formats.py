"""Every code, every scale, every midpoint and every bfloat16 number, against the definitions."""

import numpy as np
import pytest
import records_model as model

from kernels import codec, record_bytes

F32 = np.float32


def test_record_sizes_of_the_released_model():
    assert record_bytes("nvfp4", 512) == 288
    assert record_bytes("mxfp4", 128) == 68
    assert record_bytes("fp8", 512) == 528
    per_token = 3 * (288 + 68) / 2 + (288 + 68)
    assert per_token == 890


def every_code_under_every_scale(kind):
    """Records [256, …] with all codes of the kind, row s under scale byte s; and the codes."""
    codes = np.arange(256 if kind == "fp8" else 16).astype(np.uint8)
    codes = np.resize(codes, max(len(codes), model.GROUP[kind]))
    rows = np.tile(model.pack(kind, codes), (256, 1))
    scales = np.repeat(
        np.arange(256, dtype=np.uint8)[:, None], len(codes) // model.GROUP[kind], axis=1
    )
    return np.concatenate([rows, scales], axis=1), codes


def signed_values(kind):
    """The value of every code, by definition."""
    magnitudes = model.CODE_VALUES[kind]
    if kind == "fp8":
        magnitudes = np.append(magnitudes, np.nan)
    return np.concatenate([magnitudes, -magnitudes])


def scale_values(kind):
    """The value of every scale byte; e4m3 scales have a sign bit that no quantiser sets."""
    if kind == "nvfp4":
        return np.concatenate([np.append(model.E4M3, np.nan), -np.append(model.E4M3, np.nan)])
    return np.append(model.UE8M0, np.nan)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_every_code_under_every_scale(kind, backend, out_dtype):
    records, codes = every_code_under_every_scale(kind)
    with np.errstate(over="ignore"):
        expected = (signed_values(kind)[codes] * scale_values(kind)[:, None]).astype(F32)
    expected[np.isnan(expected)] = F32(np.nan)
    if out_dtype == "bfloat16":
        expected = model.to_bfloat16(expected)
    got = codec.dequantize(kind, records, out_dtype, backend=backend)
    np.testing.assert_array_equal(model.bits(got), model.bits(expected))


def reachable_scales(kind):
    """Scale bytes that a quantiser can choose and whose largest product is finite."""
    with np.errstate(over="ignore"):
        largest = (model.CODE_VALUES[kind][-1] * model.SCALE_VALUES[kind]).astype(F32)
    reachable = np.isfinite(largest) & (largest >= model.AMAX_FLOOR[kind])
    return np.flatnonzero(reachable)


def rows_around_midpoints(kind):
    """For each reachable scale: groups of [the largest, then midpoints × scale and the float32
    numbers next to them, of both signs]."""
    values = model.CODE_VALUES[kind]
    midpoints = (values[1:] + values[:-1]) / 2
    slots = model.GROUP[kind] - 1
    rows = []
    for byte in reachable_scales(kind):
        scale = model.SCALE_VALUES[kind][byte]
        at = (midpoints * scale).astype(F32)
        points = np.concatenate([at, np.nextafter(at, F32(0)), np.nextafter(at, F32(np.inf))])
        points = np.concatenate([points, -points])
        points = np.resize(points, -(-len(points) // slots) * slots).reshape(-1, slots)
        largest = np.full((len(points), 1), values[-1] * scale, F32)
        rows.append(np.concatenate([largest, points], axis=1).ravel())
    return np.stack(rows)


def test_midpoints_of_codes_round_half_to_even(kind, backend):
    x = rows_around_midpoints(kind)
    bytes_ = reachable_scales(kind)
    scale = model.SCALE_VALUES[kind][bytes_].astype(F32)
    expected = model.nearest_codes(model.CODE_VALUES[kind], x / scale[:, None])
    expected |= np.where(np.signbit(x), model.sign_bit(kind), 0)
    codes, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), x.shape[1])
    np.testing.assert_array_equal(scales, np.broadcast_to(bytes_[:, None], scales.shape))
    np.testing.assert_array_equal(codes, expected)


def scale_edges(kind):
    """Largest magnitudes at which the scale changes, with their float32 neighbours."""
    values = model.SCALE_VALUES[kind]
    edges = (values[1:] + values[:-1]) / 2 if kind == "nvfp4" else values
    with np.errstate(over="ignore"):
        at = (edges * model.CODE_VALUES[kind][-1]).astype(F32)
    at = at[np.isfinite(at)]
    below, above = np.nextafter(at, F32(0)), np.nextafter(at, F32(np.inf))
    return np.concatenate([at, below, above, np.nextafter(below, F32(0))])


def test_edges_of_scales(kind, backend):
    amax = scale_edges(kind)
    x = np.zeros((len(amax), model.GROUP[kind]), F32)
    x[:, 3] = -amax
    _, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), x.shape[1])
    np.testing.assert_array_equal(scales[:, 0], model.scale_bytes(kind, amax))


def test_every_bfloat16_number_leads_a_group(kind, backend):
    finite = np.arange(0x7F80, dtype=np.uint16)
    x = np.zeros((len(finite), model.GROUP[kind]), np.uint16)
    x[:, 5] = finite | 0x8000
    amax = (finite.astype(np.uint32) << 16).view(F32)
    bytes_ = model.scale_bytes(kind, amax)
    scale = model.SCALE_VALUES[kind][bytes_].astype(F32)
    lead = model.nearest_codes(model.CODE_VALUES[kind], amax / scale) | model.sign_bit(kind)
    codes, scales = model.unpack(kind, codec.quantize(kind, x, backend=backend), x.shape[1])
    np.testing.assert_array_equal(scales[:, 0], bytes_)
    np.testing.assert_array_equal(codes[:, 5], lead)
    assert not np.delete(codes, 5, axis=1).any()


def test_zeros_keep_their_sign_and_take_the_least_scale(kind, backend):
    group = model.GROUP[kind]
    x = np.zeros((2, group), F32)
    x[1, ::2] = -0.0
    records = codec.quantize(kind, x, backend=backend)
    codes, scales = model.unpack(kind, records, group)
    assert (scales == {"nvfp4": 1, "mxfp4": 1, "fp8": 105}[kind]).all()
    assert not codes[0].any()
    np.testing.assert_array_equal(codes[1], np.tile([model.sign_bit(kind), 0], group // 2))
    restored = codec.dequantize(kind, records, backend=backend)
    np.testing.assert_array_equal(model.bits(restored), model.bits(x))


def test_subnormals(kind, backend):
    tiny = np.array([1, 2, 0x1FFFFF, 0x200001, 0x400000, 0x7FFFFF], np.uint32).view(F32)
    x = np.resize(np.concatenate([tiny, -tiny]), (1, 96)).astype(F32)
    records = codec.quantize(kind, x, backend=backend)
    codes, scales = model.unpack(kind, records, 96)
    assert (scales == {"nvfp4": 1, "mxfp4": 1, "fp8": 105}[kind]).all()
    scale = F32(model.SCALE_VALUES[kind][scales[0, 0]])
    expected = model.nearest_codes(model.CODE_VALUES[kind], x / scale)
    expected |= np.where(np.signbit(x), model.sign_bit(kind), 0)
    np.testing.assert_array_equal(codes, expected)


def test_huge_values_saturate(backend):
    x = np.array([[3e38, -3e38, 2688, 2689, 2687, -1, 0, 448] * 2], F32)
    codes, scales = model.unpack("nvfp4", codec.quantize("nvfp4", x, backend=backend), 16)
    assert scales.tolist() == [[0x7E]]
    assert codes[0, :8].tolist() == [7, 15, 7, 7, 7, 8, 0, 2]
