"""The bytes of a snapshot: a header, a table of parts, their rows (docs/snapshot.md).

Knows the form alone; whether the parts are those of a model is `read`'s to say.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import xxhash

from model_adapter.errors import SnapshotError
from model_adapter.records import HostRecords
from model_adapter.replay import Mode

MAGIC = b"DS41FWIN"
VERSION = 1
_HEAD = struct.Struct("<8sIIQIIIIQ")
_CHECKSUM_AT = _HEAD.size
_CHECKSUM_BYTES = 16
HEAD_BYTES = _CHECKSUM_AT + _CHECKSUM_BYTES
_PART = struct.Struct("<IIQII8x")
PART_BYTES = _PART.size
_PARTS_MAX = 1 << 16
_DTYPES = {torch.float32: 1, torch.bfloat16: 2}
_MODES: dict[Mode, int] = {"bounded": 1, "exact": 2}

Buffer = bytes | bytearray | memoryview


class PartKind(IntEnum):
    """What a part's rows are."""

    WINDOW = 1
    """Window records of the backbone's layer `number`, of the last positions."""
    DRAFT_WINDOW = 2
    """Window records of draft layer `number`, counted from 0."""
    SECTION = 3
    """Rows of section `number` of a block, of the positions behind the last full block."""
    PENDING = 4
    """float32 values and scores of layer `number`'s open compression group."""


@dataclass(frozen=True, slots=True)
class Computed:
    """How a state came to be: a run of another kind would have left other bytes."""

    dtype: torch.dtype
    mode: Mode


@dataclass(frozen=True, slots=True)
class Part:
    """Rows uint8 [n, row bytes]. `start`: of windows, the first position that was ever computed
    there; of sections, the number of the first row; of open groups, the first row's position."""

    kind: PartKind
    number: int
    start: int
    rows: HostRecords


@dataclass(frozen=True, slots=True)
class Content:
    """What `unpack` found, in the order in which it lies there."""

    position: int
    block_tokens: int
    computed: Computed
    parts: list[Part]


def pack(position: int, block_tokens: int, computed: Computed, parts: Sequence[Part]) -> bytearray:
    """The payload. Rows are copied once."""
    table = HEAD_BYTES + PART_BYTES * len(parts)
    size = table + sum(part.rows.nbytes for part in parts)
    out = bytearray(size)
    _HEAD.pack_into(
        *(out, 0, MAGIC, VERSION, table, position, block_tokens, len(parts)),
        *(_DTYPES[computed.dtype], _MODES[computed.mode], size),
    )
    at = table
    view = np.frombuffer(out, np.uint8)
    for i, part in enumerate(parts):
        count, row_bytes = part.rows.shape
        place = HEAD_BYTES + PART_BYTES * i
        _PART.pack_into(out, place, part.kind, part.number, part.start, count, row_bytes)
        view[at : at + part.rows.nbytes] = np.ascontiguousarray(part.rows).reshape(-1)
        at += part.rows.nbytes
    out[_CHECKSUM_AT:HEAD_BYTES] = _checksum(memoryview(out))
    return out


def unpack(payload: Buffer) -> Content:
    """Read a payload; rows are views of it.

    Raises `SnapshotError` for whatever `pack` did not make: another version, a byte more or less, a
    changed one.
    """
    view = memoryview(payload).cast("B")
    if len(view) < HEAD_BYTES or bytes(view[: len(MAGIC)]) != MAGIC:
        raise SnapshotError(f"{len(view)} bytes are no snapshot: they don't begin like one")
    head = _HEAD.unpack_from(view)
    _, version, table, position, block_tokens, count, dtype, mode, size = head
    if version != VERSION:
        raise SnapshotError(
            f"a snapshot of format {version}; this program reads format {VERSION}: compute anew"
        )
    if size != len(view) or count > _PARTS_MAX or table != HEAD_BYTES + PART_BYTES * count:
        raise SnapshotError(
            f"a snapshot of {size} bytes and {count} parts in {len(view)} bytes: truncated or torn"
        )
    if table > size or bytes(view[_CHECKSUM_AT:HEAD_BYTES]) != _checksum(view):
        raise SnapshotError(f"a snapshot of {size} bytes does not match its checksum: damaged")
    return Content(position, block_tokens, _computed(dtype, mode), _parts(view, count, table))


def _parts(view: memoryview, count: int, at: int) -> list[Part]:
    flat = np.frombuffer(view, np.uint8)
    parts = []
    for i in range(count):
        kind, number, start, rows, row_bytes = _PART.unpack_from(view, HEAD_BYTES + PART_BYTES * i)
        stop = at + rows * row_bytes
        if stop > len(flat) or kind not in PartKind.__members__.values():
            raise SnapshotError(f"part {i} of a snapshot (kind {kind}) can't be there")
        parts.append(Part(PartKind(kind), number, start, flat[at:stop].reshape(rows, row_bytes)))
        at = stop
    if at != len(flat):
        raise SnapshotError(f"{len(flat) - at} bytes lie behind the parts of a snapshot")
    return parts


def _computed(dtype: int, mode: int) -> Computed:
    dtypes = {number: name for name, number in _DTYPES.items()}
    modes = {number: name for name, number in _MODES.items()}
    if dtype not in dtypes or mode not in modes:
        raise SnapshotError(f"a snapshot of dtype {dtype} and mode {mode}, which are unknown")
    return Computed(dtypes[dtype], modes[mode])


def _checksum(view: memoryview) -> bytes:
    """xxh3-128 over everything but the checksum's own place."""
    digest = xxhash.xxh3_128(view[:_CHECKSUM_AT])
    digest.update(view[HEAD_BYTES:])
    return digest.digest()
