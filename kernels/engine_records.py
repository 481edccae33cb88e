"""What inference engines hold in their paged KV pools, beside the store's own records (ds41f §4).

An engine's record of a row is `data_bytes` of codes followed by `scale_bytes` of scales::

    name             bytes  data                                     scales
    main_nvfp4         288  512 e2m1                                 32 e4m3, one per 16
    main_fp8           528  512 e4m3                                 16 ue8m0, one per 32
    main_fp8_rotary    584  448 e4m3, 64 rotated channels bfloat16   7 ue8m0, one per 64; 1 zero
    index_mxfp4         68  128 e2m1                                 4 ue8m0, one per 32
    index_fp8          132  128 e4m3                                 4 ue8m0, one per 32
    index_fp8_float    132  128 e4m3                                 1 float32, a power of two

A page holds its rows' records side by side (interleaved), or first all rows' data and then all
rows' scales (split). Where a pool begins, and how far apart its pages are, is up to the engine.
"""

from dataclasses import dataclass
from typing import Final, Literal

from kernels.layout import MXFP4, NVFP4, RecordKind

EngineRecordName = Literal[
    "main_nvfp4",
    "main_fp8",
    "main_fp8_rotary",
    "index_mxfp4",
    "index_fp8",
    "index_fp8_float",
]

VECTOR_BYTES: Final = 16
"""What a device reads or writes at once; pages, sections and pools begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """How an engine encodes one row, and what the store keeps of it."""

    name: EngineRecordName
    channels: int
    data_bytes: int
    scale_bytes: int
    section_kind: RecordKind
    """The store's encoding of these rows."""
    tile_rows: int
    """Rows that a device converts at a time; runs of rows are multiples of it."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the engine's record."""
        return self.data_bytes + self.scale_bytes

    @property
    def section_row_bytes(self) -> int:
        """Bytes of the store's record."""
        return self.section_kind.record_bytes(self.channels)

    @property
    def reencodes(self) -> bool:
        """Whether the store's bytes are others than the engine's."""
        return self.row_bytes != self.section_row_bytes


MAIN_NVFP4: Final = EngineRecord("main_nvfp4", 512, 256, 32, NVFP4, 16)
MAIN_FP8: Final = EngineRecord("main_fp8", 512, 512, 16, NVFP4, 16)
MAIN_FP8_ROTARY: Final = EngineRecord("main_fp8_rotary", 512, 576, 8, NVFP4, 16)
INDEX_MXFP4: Final = EngineRecord("index_mxfp4", 128, 64, 4, MXFP4, 32)
INDEX_FP8: Final = EngineRecord("index_fp8", 128, 128, 4, MXFP4, 32)
INDEX_FP8_FLOAT: Final = EngineRecord("index_fp8_float", 128, 128, 4, MXFP4, 32)
ENGINE_RECORDS: Final = {
    record.name: record
    for record in (
        MAIN_NVFP4,
        MAIN_FP8,
        MAIN_FP8_ROTARY,
        INDEX_MXFP4,
        INDEX_FP8,
        INDEX_FP8_FLOAT,
    )
}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One engine pool's pages.

    `rows`: per page, a multiple of the record's `tile_rows` (engines use 64, 128 and 256).
    `split`: all data before all scales; otherwise record after record. `page_bytes`: from one page
    to the next, at least the rows' own bytes (the default) and a multiple of 16.
    """

    record: EngineRecord
    rows: int
    split: bool
    page_bytes: int = 0

    def __post_init__(self) -> None:
        tile = self.record.tile_rows
        if self.rows <= 0 or self.rows % tile:
            raise ValueError(
                f"{self.rows} rows per page: {self.record.name} pages need a positive multiple of "
                f"{tile}"
            )
        needed = self.rows * self.record.row_bytes
        if self.page_bytes == 0:
            object.__setattr__(self, "page_bytes", needed)
        if self.page_bytes < needed or self.page_bytes % VECTOR_BYTES:
            raise ValueError(
                f"{self.page_bytes} bytes per page: {self.rows} rows of {self.record.row_bytes} "
                f"bytes need at least {needed}, and a multiple of {VECTOR_BYTES}"
            )

    def data_offset(self, row: int) -> int:
        """Where the data of a page's row begins, in bytes from the page."""
        return row * (self.record.data_bytes if self.split else self.record.row_bytes)

    def scale_offset(self, row: int) -> int:
        """Where the scales of a page's row begin, in bytes from the page."""
        if not self.split:
            return row * self.record.row_bytes + self.record.data_bytes
        return self.rows * self.record.data_bytes + row * self.record.scale_bytes
