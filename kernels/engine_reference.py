"""The engines' records and pages in NumPy: the oracle of the device's gather and scatter.

Re-encoding is reading a record's values in float32 and quantising those, with one exception. An
engine may hold in e4m3 what the model had rounded to nvfp4 before. A group's largest value is then
6 times its nvfp4 scale, and four bits of it are left: 13·2^n and 14·2^n become one, for which
quantising takes 13·2^n. So where that scale does not give back the group's e4m3 codes and 14·2^n
does, it is taken. Arrays are uint8; values are float32.
"""

import numpy as np
import numpy.typing as npt

from kernels import reference
from kernels.engine_records import (
    INDEX_FP8,
    INDEX_FP8_FLOAT,
    MAIN_FP8,
    MAIN_FP8_ROTARY,
    EngineRecord,
    PageLayout,
)
from kernels.layout import FP8, NVFP4, RecordKind

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_ROTARY_CODED = 448
_ROTARY_KIND = RecordKind("fp8", group=64, code_bits=8)
_FLOAT_KIND = RecordKind("fp8", group=128, code_bits=8)


def values(record: EngineRecord, rows: _Bytes) -> _Floats:
    """Values [..., channels] of an engine's records [..., row_bytes]."""
    if record == MAIN_FP8_ROTARY:
        return _rotary_values(rows)
    if record == INDEX_FP8_FLOAT:
        return _float_scale_values(rows)
    kind = FP8 if record in (MAIN_FP8, INDEX_FP8) else record.section_kind
    return _dequantized(kind, rows)


def rows(record: EngineRecord, x: _Floats) -> _Bytes:
    """An engine's records [..., row_bytes] of values [..., channels]."""
    if record == MAIN_FP8_ROTARY:
        return _rotary_rows(x)
    if record == INDEX_FP8_FLOAT:
        return _float_scale_rows(x)
    kind = FP8 if record in (MAIN_FP8, INDEX_FP8) else record.section_kind
    return _quantized(kind, x)


def section_rows(record: EngineRecord, engine_rows: _Bytes) -> _Bytes:
    """The store's records of an engine's."""
    if not record.reencodes:
        return engine_rows.copy()
    x = values(record, engine_rows)
    plain = _quantized(record.section_kind, x)
    if record.section_kind != NVFP4:
        return plain
    return _with_recovered_scales(record, engine_rows, x, plain)


def engine_rows(record: EngineRecord, section_rows: _Bytes) -> _Bytes:
    """An engine's records of the store's."""
    if not record.reencodes:
        return section_rows.copy()
    return rows(record, _dequantized(record.section_kind, section_rows))


def read_pages(layout: PageLayout, pages: _Bytes) -> _Bytes:
    """Records [pages, rows, row_bytes] out of a pool [pages, page_bytes]."""
    record, count = layout.record, layout.rows
    if not layout.split:
        used = pages[:, : count * record.row_bytes]
        return used.reshape(len(pages), count, record.row_bytes)
    data_end = count * record.data_bytes
    data = pages[:, :data_end].reshape(len(pages), count, record.data_bytes)
    scales = pages[:, data_end : data_end + count * record.scale_bytes]
    return np.concatenate([data, scales.reshape(len(pages), count, record.scale_bytes)], axis=-1)


def write_pages(layout: PageLayout, records: _Bytes, pages: _Bytes) -> None:
    """The inverse of `read_pages`, into a pool; bytes behind the rows stay as they are."""
    record, count = layout.record, layout.rows
    if not layout.split:
        pages[:, : count * record.row_bytes] = records.reshape(len(pages), -1)
        return
    data_end = count * record.data_bytes
    pages[:, :data_end] = records[..., : record.data_bytes].reshape(len(pages), -1)
    scales = records[..., record.data_bytes :].reshape(len(pages), -1)
    pages[:, data_end : data_end + scales.shape[1]] = scales


def _quantized(kind: RecordKind, x: _Floats) -> _Bytes:
    out = np.empty((*x.shape[:-1], kind.record_bytes(x.shape[-1])), np.uint8)
    reference.quantize_into(kind, x, out)
    return out


def _dequantized(kind: RecordKind, records: _Bytes) -> _Floats:
    out = np.empty((*records.shape[:-1], kind.channels(records.shape[-1])), np.float32)
    reference.dequantize_into(kind, records, out)
    return out


def _rotary_values(rows: _Bytes) -> _Floats:
    groups = _ROTARY_CODED // _ROTARY_KIND.group
    coded = np.concatenate([rows[..., :_ROTARY_CODED], rows[..., 576 : 576 + groups]], axis=-1)
    rotated = np.ascontiguousarray(rows[..., _ROTARY_CODED:576]).view(np.uint16)
    widened: _Floats = (rotated.astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([_dequantized(_ROTARY_KIND, coded), widened], axis=-1)


def _rotary_rows(x: _Floats) -> _Bytes:
    coded = _quantized(_ROTARY_KIND, np.ascontiguousarray(x[..., :_ROTARY_CODED]))
    rotated = reference.to_bfloat16(np.ascontiguousarray(x[..., _ROTARY_CODED:]))
    padding = np.zeros((*x.shape[:-1], 1), np.uint8)
    parts = [
        coded[..., :_ROTARY_CODED],
        rotated.view(np.uint8),
        coded[..., _ROTARY_CODED:],
        padding,
    ]
    return np.concatenate(parts, axis=-1)


def _float_scale_values(rows: _Bytes) -> _Floats:
    scales = np.ascontiguousarray(rows[..., 128:]).view(np.float32)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        scaled: _Floats = reference.e4m3_values(rows[..., :128]) * scales
    return scaled


def _float_scale_rows(x: _Floats) -> _Bytes:
    coded = _quantized(_FLOAT_KIND, x)
    scales = reference.ue8m0_values(coded[..., 128:])
    return np.concatenate([coded[..., :128], scales.view(np.uint8)], axis=-1)


def _with_recovered_scales(
    record: EngineRecord, engine_rows: _Bytes, x: _Floats, plain: _Bytes
) -> _Bytes:
    coded = _ROTARY_CODED if record == MAIN_FP8_ROTARY else record.channels
    groups = coded // NVFP4.group
    scales = plain[..., NVFP4.code_bytes(record.channels) :][..., :groups]
    candidates = (scales & 7) == 13 - 8
    lower = np.where(candidates, scales, 0).astype(np.uint8)
    upper = lower + candidates
    old = engine_rows[..., :coded].reshape(*scales.shape, NVFP4.group)
    engine_scales = _engine_scales(record, engine_rows, groups)
    grouped = x[..., :coded].reshape(*scales.shape, NVFP4.group)
    gives_back = [_under_scale(grouped, s, engine_scales) for s in (lower, upper)]
    matches = [(made == old).all(axis=-1) for _, made in gives_back]
    better = candidates & ~matches[0] & matches[1]
    out = plain.copy()
    scales_at = NVFP4.code_bytes(record.channels)
    out[..., scales_at : scales_at + groups][better] = upper[better]
    codes = out[..., : coded // 2].reshape(*scales.shape, NVFP4.group // 2)
    codes[better] = gives_back[1][0][better]
    out[..., : coded // 2] = codes.reshape(*x.shape[:-1], -1)
    return out


def _engine_scales(record: EngineRecord, engine_rows: _Bytes, groups: int) -> _Floats:
    """The e4m3 codes' scale of every nvfp4 group."""
    width = _ROTARY_KIND.group if record == MAIN_FP8_ROTARY else FP8.group
    repeats = width // NVFP4.group
    stored = engine_rows[..., record.data_bytes :][..., : groups // repeats]
    return np.repeat(reference.ue8m0_values(stored), repeats, axis=-1)


def _under_scale(x: _Floats, scales: _Bytes, engine_scales: _Floats) -> tuple[_Bytes, _Bytes]:
    """Groups [..., 16] as packed nvfp4 codes under given scales, and what e4m3 makes of those."""
    with np.errstate(all="ignore"):
        nibbles = reference.e2m1_codes(x / reference.e4m3_values(scales)[..., None])
        values = reference.e2m1_values(nibbles) * reference.e4m3_values(scales)[..., None]
        engine = reference.e4m3_codes(values / engine_scales[..., None])
    packed: _Bytes = nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)
    return packed, engine
