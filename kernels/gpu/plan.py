"""How a launch is cut up, as numbers only: grids, tiles, shared memory and tables of moves.

Pure, so that it is the same on a device and in the tests' host run of the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.engine_records import VECTOR_BYTES, PageLayout
from kernels.layout import RecordKind

THREADS: Final = 128
"""Per block, in every kernel."""

TILE_VALUE_BYTES: Final = 16 << 10
"""What a block of threads converts at once, about: small enough that a dozen share an SM."""

SHARED_BYTES_MAX: Final = 48 << 10
"""What every device gives a block without being asked."""

GRID_BLOCKS_MAX: Final = (1 << 31) - 1
GRID_MOVES_MAX: Final = (1 << 16) - 1

MOVE_DTYPE: Final = np.dtype(
    [("data", "<u8"), ("scales", "<u8"), ("section", "<u8"), ("rows", "<u8")]
)
"""One move as the kernels read it: three addresses and a number of rows."""

SPAN_DTYPE: Final = np.dtype([("at", "<u8"), ("bytes", "<u8")])
"""Bytes to hash as the kernel reads them: address and size."""

SPAN_BYTES_MIN: Final = 256
SPAN_BYTES_MAX: Final = 1 << 30

MoveTable = npt.NDArray[np.void]
SpanTable = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Launch of a quantisation or a dequantisation; see `convert_plan`."""

    kernel: str
    rows: int
    channels: int
    tile_rows: int
    blocks: int
    shared_bytes: int


def convert_plan(
    kind: RecordKind, values: str, rows: int, channels: int, *, quantizing: bool
) -> ConvertPlan:
    """The launch for `rows` rows; `values` is "float32" or "bfloat16".

    ValueError: channels that a device does not take, or too many rows.
    """
    record_bytes = kind.record_bytes(channels)
    if record_bytes % 4:
        raise ValueError(
            f"{channels} channels: on a device {kind.name} records need a multiple of "
            f"{4 * kind.group}"
        )
    row_bytes = channels * (4 if values == "float32" else 2)
    tile_rows = max(4, TILE_VALUE_BYTES // row_bytes // 4 * 4)
    shared = -(-tile_rows * record_bytes // VECTOR_BYTES) * VECTOR_BYTES
    if quantizing:
        shared += -(-tile_rows * row_bytes // 128) * 128
    if shared > SHARED_BYTES_MAX:
        raise ValueError(
            f"{channels} channels: {tile_rows} rows of {values} need {shared} bytes of a device's "
            f"shared memory, which has {SHARED_BYTES_MAX}; convert them on the host"
        )
    blocks = -(-rows // tile_rows)
    if blocks > GRID_BLOCKS_MAX:
        raise ValueError(f"{rows} rows: at most {GRID_BLOCKS_MAX * tile_rows} in one launch")
    name = f"{'quantize' if quantizing else 'dequantize'}_{kind.name}_{values}"
    return ConvertPlan(name, rows, channels, tile_rows, blocks, shared)


def chunk_rows(layout: PageLayout, section_rows: int) -> int:
    """Rows that a page and a section have in common: one move's.

    ValueError: the two don't divide each other.
    """
    rows = min(layout.rows, section_rows)
    if section_rows <= 0 or section_rows % rows or rows % layout.record.tile_rows:
        raise ValueError(
            f"sections of {section_rows} rows don't fit pages of {layout.rows}: one must be a "
            f"multiple of the other, and both of {layout.record.tile_rows}"
        )
    return rows


def move_table(
    layout: PageLayout,
    pool_address: int,
    pool_pages: int,
    slots: npt.ArrayLike,
    section_addresses: Sequence[int] | npt.NDArray[np.integer],
    section_rows: int,
) -> MoveTable:
    """Moves between sections and the places of their rows in one pool.

    `slots` [sections, chunks]: for every section, where its chunks of `chunk_rows` rows begin, as
    page x rows per page + row in the page. Nothing else than what is named here is read or written
    by the moves, in either direction.

    TypeError: slots that are no integers. ValueError: a shape, a slot outside the pool, across two
    pages or used twice, an unaligned address, sections that overlap.
    """
    chunk = chunk_rows(layout, section_rows)
    shape = len(section_addresses), section_rows // chunk
    first = _checked_slots(layout, pool_pages, slots, shape, chunk)
    sections = _checked_sections(layout, section_addresses, section_rows)
    if pool_address % VECTOR_BYTES:
        raise ValueError(f"the pool begins at {pool_address:#x}, no multiple of {VECTOR_BYTES}")
    page, row = np.divmod(first, layout.rows)
    at = np.uint64(pool_address) + page.astype(np.uint64) * np.uint64(layout.page_bytes)
    record = layout.record
    data_step = record.data_bytes if layout.split else record.row_bytes
    scale_step = record.scale_bytes if layout.split else record.row_bytes
    chunk_bytes = chunk * record.section_row_bytes
    table = np.zeros(first.shape, MOVE_DTYPE)
    table["data"] = at + (row * data_step).astype(np.uint64)
    table["scales"] = at + (row * scale_step + layout.scale_offset(0)).astype(np.uint64)
    table["section"] = sections[:, None] + np.arange(first.shape[1], dtype=np.uint64) * np.uint64(
        chunk_bytes
    )
    table["rows"] = chunk
    flat: MoveTable = table.reshape(-1)
    return flat


def overlapping(
    starts: npt.NDArray[np.unsignedinteger], lengths: npt.NDArray[np.unsignedinteger]
) -> bool:
    """Whether two of the runs [start, start + length) share anything."""
    order = np.argsort(starts)
    ends = (starts + lengths)[order]
    return bool((ends[:-1] > starts[order][1:]).any())


def span_table(addresses: Sequence[int], sizes: Sequence[int]) -> SpanTable:
    """Byte runs to hash. ValueError: a size or an address that the kernel does not take."""
    for address, size in zip(addresses, sizes, strict=True):
        if not SPAN_BYTES_MIN <= size <= SPAN_BYTES_MAX or size % VECTOR_BYTES:
            raise ValueError(
                f"{size} bytes to hash: a device takes {SPAN_BYTES_MIN} … {SPAN_BYTES_MAX}, a "
                f"multiple of {VECTOR_BYTES}; hash others on the host"
            )
        if address % VECTOR_BYTES:
            raise ValueError(f"bytes to hash at {address:#x}, no multiple of {VECTOR_BYTES}")
    table: SpanTable = np.zeros(len(addresses), SPAN_DTYPE)
    table["at"], table["bytes"] = addresses, sizes
    return table


def _checked_slots(
    layout: PageLayout, pool_pages: int, slots: npt.ArrayLike, shape: tuple[int, int], chunk: int
) -> npt.NDArray[np.int64]:
    given = np.asarray(slots)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"slots are {given.dtype}; pass integers")
    if given.shape != shape:
        raise ValueError(f"slots have shape {given.shape}; these sections need {shape}")
    end = pool_pages * layout.rows
    outside = (given < 0) | (given >= end)
    if outside.any():
        raise ValueError(f"slot {given[outside][0]} is outside the pool, which has 0 … {end - 1}")
    first = given.astype(np.int64)
    row = first % layout.rows
    misplaced = (row % layout.record.tile_rows != 0) | (row + chunk > layout.rows)
    if misplaced.any():
        raise ValueError(
            f"slot {first[misplaced][0]}: {chunk} rows from there on must lie in one page of "
            f"{layout.rows} and begin at a multiple of {layout.record.tile_rows}"
        )
    starts = first.reshape(-1).astype(np.uint64)
    if overlapping(starts, np.full(starts.shape, chunk, np.uint64)):
        raise ValueError("slots overlap; a row of the pool can belong to one section only")
    return first


def _checked_sections(
    layout: PageLayout, addresses: Sequence[int] | npt.NDArray[np.integer], rows: int
) -> npt.NDArray[np.uint64]:
    at = np.asarray(addresses, np.uint64)
    unaligned = at % np.uint64(VECTOR_BYTES) != 0
    if unaligned.any():
        raise ValueError(f"a section at {at[unaligned][0]:#x}, no multiple of {VECTOR_BYTES}")
    if overlapping(at, np.full(at.shape, rows * layout.record.section_row_bytes, np.uint64)):
        raise ValueError("sections overlap in memory; give each its own")
    return at
