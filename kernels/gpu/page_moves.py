"""Gather and scatter: rows between an engine's paged pools and blocks' sections."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.engine_records import EngineRecord, PageLayout
from kernels.gpu import device_arrays, runtime
from kernels.gpu.device_table import DeviceTable
from kernels.gpu.plan import GRID_MOVES_MAX, MOVE_DTYPE, MoveTable, move_table, overlapping


@dataclass(frozen=True, slots=True)
class PoolMoves:
    """Moves between one pool and some sections, and the arrays they touch; see `pool_moves`."""

    layout: PageLayout
    device: int
    table: MoveTable
    arrays: tuple[Any, ...]


def pool_moves(
    layout: PageLayout,
    pool: Any,
    slots: npt.ArrayLike,
    sections: Sequence[Any],
    section_rows: int,
) -> PoolMoves:
    """Moves between a pool's pages and sections, to be loaded into a `PageMoves`.

    `pool`: uint8 [pages, page_bytes]. `sections`: uint8 arrays of `section_rows` records each,
    views of blocks' bytes. `slots`: on the host, [sections, chunks], where each chunk of
    min(rows per page, section_rows) rows begins: page x rows per page + row. TypeError and
    ValueError as in `plan.move_table`; ValueError for arrays of the wrong size, in memory of the
    pool or on another device.
    """
    pool = device_arrays.on_device("pool", pool, [np.uint8])
    if pool.ndim != 2 or pool.shape[1] != layout.page_bytes:
        raise ValueError(f"pool has shape {pool.shape}; its pages have {layout.page_bytes} bytes")
    section_bytes = section_rows * layout.record.section_row_bytes
    checked = [device_arrays.on_device("section", s, [np.uint8]) for s in sections]
    for section in checked:
        device_arrays.same_device("section", section, pool)
        if section.nbytes != section_bytes:
            raise ValueError(f"a section has {section.nbytes} bytes; its rows need {section_bytes}")
        if device_arrays.overlap(section, pool):
            raise ValueError("a section lies in the pool; give it memory of its own")
    table = move_table(
        layout,
        pool.data.ptr,
        pool.shape[0],
        slots,
        [int(section.data.ptr) for section in checked],
        section_rows,
    )
    return PoolMoves(layout, pool.device.id, table, (pool, *checked))


class PageMoves:
    """Launches of up to `capacity` moves of one engine record, in pages of one form.

    `split`: the pages' form. `rows_max`: the longest move, a multiple of the record's tile. One
    launch may serve many blocks, layers and pools. Load, then gather or scatter, all on one stream;
    to capture the launch in a graph, call `warm_up` first and load again between replays.
    """

    def __init__(
        self,
        record: EngineRecord,
        capacity: int,
        *,
        split: bool,
        rows_max: int = 256,
        device: int = 0,
    ) -> None:
        if capacity > GRID_MOVES_MAX:
            raise ValueError(f"capacity {capacity}: one launch takes {GRID_MOVES_MAX} moves")
        if rows_max <= 0 or rows_max % record.tile_rows:
            raise ValueError(f"rows_max {rows_max}: pass a multiple of {record.tile_rows}")
        self.record = record
        self.split = split
        self._tiles = rows_max // record.tile_rows
        self._rows_max = rows_max
        self._device = device
        self._table = DeviceTable(MOVE_DTYPE, capacity, device)
        self._arrays: tuple[Any, ...] = ()

    def warm_up(self) -> None:
        """Compile and load both kernels."""
        names = [f"{direction}_{self.record.name}" for direction in ("gather", "scatter")]
        runtime.warm_up(names, self._device)

    def load(self, moves: Sequence[PoolMoves]) -> None:
        """What the next launches move; their arrays are kept alive until the next load.

        ValueError: moves of other records, pages or devices, longer ones than `rows_max`, more
        than the capacity, or two that share rows of a pool or of a section.
        """
        for each in moves:
            self._check(each)
        table = np.concatenate([each.table for each in moves] or [np.zeros(0, MOVE_DTYPE)])
        record = self.record
        data_bytes = record.data_bytes if self.split else record.row_bytes
        if overlapping(table["section"], table["rows"] * record.section_row_bytes):
            raise ValueError("two moves have the same section; give each its own")
        if overlapping(table["data"], table["rows"] * data_bytes):
            raise ValueError("two moves have the same rows of a pool; give each its own")
        self._table.load(table)
        self._arrays = tuple(array for each in moves for array in each.arrays)

    def gather(self) -> None:
        """Queue: the pools' rows into the sections, as the store's records."""
        self._launch("gather")

    def scatter(self) -> None:
        """Queue: the sections' rows into the pools, as the engine's records."""
        self._launch("scatter")

    def _check(self, moves: PoolMoves) -> None:
        if moves.layout.record != self.record or moves.layout.split != self.split:
            raise ValueError(
                f"moves of {moves.layout.record.name} pages (split: {moves.layout.split}); these "
                f"launches are for {self.record.name} (split: {self.split})"
            )
        if moves.device != self._device:
            raise ValueError(f"moves on device {moves.device}; these are on {self._device}")
        if len(moves.table) and moves.table["rows"].max() > self._rows_max:
            raise ValueError(
                f"moves of {moves.table['rows'].max()} rows; rows_max is {self._rows_max}"
            )

    def _launch(self, direction: str) -> None:
        count = self._table.launch_entries()
        if count:
            runtime.launch(
                self._device,
                f"{direction}_{self.record.name}",
                (self._tiles, count),
                (self._table.array, np.uint32(self.split)),
            )
