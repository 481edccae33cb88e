"""Gather and scatter kernels, run on the host, against the NumPy oracle of records and pages."""

import numpy as np
import pytest
from device_host import ORDERS, Guarded
from hypothesis import given
from hypothesis import strategies as st

from kernels import codec
from kernels import engine_reference as oracle
from kernels.engine_records import ENGINE_RECORDS, INDEX_FP8, MAIN_NVFP4, PageLayout
from kernels.gpu.plan import MOVE_DTYPE, chunk_rows, move_table

NAMES = sorted(ENGINE_RECORDS)
PAGE_ROWS = (64, 128, 256)


def random_slots(rng, layout, pages, sections, section_rows):
    """Distinct places in the pool for every chunk of every section."""
    chunk = chunk_rows(layout, section_rows)
    places = rng.permutation(pages * layout.rows // chunk)[: sections * (section_rows // chunk)]
    return (places * chunk).reshape(sections, -1)


def rows_of_slots(slots, chunk):
    """Every row's slot, [sections, rows]."""
    return (slots[..., None] + np.arange(chunk)).reshape(len(slots), -1)


def random_records(rng, record, shape):
    """Rows of any bytes, of usual values, and of usual values that were the store's before."""
    rows = rng.integers(0, 256, (*shape, record.row_bytes), np.uint8)
    sizes = np.exp2(rng.integers(-12, 12, (*shape, record.channels // 16))).repeat(16, axis=-1)
    usual = (rng.standard_normal((*shape, record.channels)) * sizes).astype(np.float32)
    kind = record.section_kind.name
    rounded = codec.dequantize(kind, codec.quantize(kind, usual))
    pick = rng.integers(0, 3, (*shape, 1))
    values = oracle.rows(record, np.where(pick == 1, usual, rounded))
    return np.where(pick == 0, rows, values)


class Setup:
    """A pool of random pages and sections of random records."""

    def __init__(self, rng, layout, section_rows, sections=3):
        record = layout.record
        chunk = chunk_rows(layout, section_rows)
        pages = -(-sections * section_rows // layout.rows) + 2
        self.layout, self.section_rows, self.tiles = layout, section_rows, chunk // record.tile_rows
        self.pool = Guarded((pages, layout.page_bytes), np.uint8)
        self.pool.array[...] = rng.integers(0, 256, self.pool.array.shape, np.uint8)
        self.records = random_records(rng, record, (pages, layout.rows))
        oracle.write_pages(layout, self.records, self.pool.array)
        shape = (sections, section_rows, record.section_row_bytes)
        self.sections = Guarded(shape, np.uint8)
        self.slots = random_slots(rng, layout, pages, sections, section_rows)
        self.rows = rows_of_slots(self.slots, chunk)
        step = section_rows * record.section_row_bytes
        addresses = [self.sections.address + i * step for i in range(sections)]
        self.table = move_table(
            layout, self.pool.address, pages, self.slots, addresses, section_rows
        )

    def run(self, kernels, direction, order=0):
        name = f"{direction}_{self.layout.record.name}"
        kernels.move(name, self.table, self.layout.split, self.tiles, order)
        self.pool.check()
        self.sections.check()

    def check_gather(self, kernels, order=0):
        before = self.pool.array.copy()
        self.run(kernels, "gather", order)
        flat = self.records.reshape(-1, self.layout.record.row_bytes)
        expected = oracle.section_rows(self.layout.record, flat[self.rows])
        np.testing.assert_array_equal(self.sections.array, expected)
        np.testing.assert_array_equal(self.pool.array, before)

    def check_scatter(self, kernels, order=0):
        """The rows named change, and nothing else in the pool."""
        record = self.layout.record
        sections = self.sections.array.copy()
        expected = self.pool.array.copy()
        records = self.records.reshape(-1, record.row_bytes).copy()
        records[self.rows] = oracle.engine_rows(record, sections)
        oracle.write_pages(self.layout, records.reshape(self.records.shape), expected)
        self.run(kernels, "scatter", order)
        np.testing.assert_array_equal(self.pool.array, expected)
        np.testing.assert_array_equal(self.sections.array, sections)


@pytest.mark.parametrize("split", [False, True], ids=["interleaved", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_in_both_directions(name, split, host_kernels, seed):
    rng = np.random.default_rng(seed)
    for order, page_rows in zip(ORDERS, PAGE_ROWS, strict=True):
        for section_rows in (128, 256):
            layout = PageLayout(ENGINE_RECORDS[name], page_rows, split)
            setup = Setup(rng, layout, section_rows, sections=2)
            setup.check_gather(host_kernels, order)
            shape = setup.sections.array.shape
            random = rng.integers(0, 256, shape, np.uint8)
            setup.sections.array[0] = random[0]
            setup.check_scatter(host_kernels, order)


@given(
    name=st.sampled_from(NAMES),
    split=st.booleans(),
    page_tiles=st.integers(1, 4),
    more=st.integers(1, 2),
    pad=st.integers(0, 40),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_page_size(host_kernels, name, split, page_tiles, more, pad, order, seed):
    record = ENGINE_RECORDS[name]
    rows = page_tiles * record.tile_rows
    layout = PageLayout(record, rows, split, rows * record.row_bytes + 16 * pad)
    setup = Setup(np.random.default_rng(seed), layout, rows * more, sections=2)
    setup.check_gather(host_kernels, order)
    setup.check_scatter(host_kernels, order)


@pytest.mark.parametrize("name", ["main_nvfp4", "index_mxfp4", "index_fp8"])
def test_what_goes_to_the_engine_comes_back(name, host_kernels, seed):
    """The same bytes where the encoding is the same; the same values where it holds them all."""
    record = ENGINE_RECORDS[name]
    setup = Setup(np.random.default_rng(seed), PageLayout(record, 64, True), 128)
    x = np.random.default_rng(seed).standard_normal((3, 128, record.channels)).astype(np.float32)
    sections = codec.quantize(record.section_kind.name, x)
    setup.sections.array[...] = sections
    setup.run(host_kernels, "scatter")
    setup.sections.array[...] = 0
    setup.run(host_kernels, "gather")
    if not record.reencodes:
        np.testing.assert_array_equal(setup.sections.array, sections)
    kind = record.section_kind.name
    np.testing.assert_array_equal(
        codec.dequantize(kind, setup.sections.array.copy()), codec.dequantize(kind, sections)
    )


@pytest.mark.parametrize("name", ["main_fp8", "main_fp8_rotary"])
def test_what_was_nvfp4_before_it_was_fp8_comes_back_to_the_byte(name, host_kernels, seed):
    """Every scale in turn, codes at random; each group holds its largest code, as quantising
    leaves it. The other groups of an fp8 group are of like size."""
    record = ENGINE_RECORDS[name]
    rng = np.random.default_rng(seed)
    setup = Setup(rng, PageLayout(record, 128, True), 128, sections=1)
    codes = rng.integers(0, 16, (128, 512), np.uint8)
    codes[:, ::16] |= 7
    sections = setup.sections.array
    sections[0, :, :256] = codes[:, 0::2] | codes[:, 1::2] << 4
    sections[0, :, 256:] = np.arange(128, dtype=np.uint8)[:, None].clip(1, 0x7E)
    before = sections.copy()
    setup.run(host_kernels, "scatter")
    sections[...] = 0
    setup.run(host_kernels, "gather")
    np.testing.assert_array_equal(sections, before)


def test_all_codes_of_e4m3_under_all_scales_reencode(host_kernels):
    """Every pair of a code and a scale byte, in groups of equal codes, in 132-byte index keys."""
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    pairs = np.stack([codes.reshape(-1, 4), scales.reshape(-1, 4)], axis=1)
    records = np.concatenate([np.repeat(pairs[:, 0], 32, axis=1), pairs[:, 1]], axis=1)
    layout = PageLayout(INDEX_FP8, len(records), False)
    pool = Guarded.of(records.reshape(1, -1))
    out = Guarded((1, len(records), 68), np.uint8)
    table = move_table(layout, pool.address, 1, [[0]], [out.address], len(records))
    host_kernels.move("gather_index_fp8", table, False, len(records) // INDEX_FP8.tile_rows)
    np.testing.assert_array_equal(out.array[0], oracle.section_rows(INDEX_FP8, records))


def test_empty_moves_and_tiles_beyond_a_move_do_nothing(host_kernels, seed):
    setup = Setup(np.random.default_rng(seed), PageLayout(MAIN_NVFP4, 64, True), 64)
    setup.sections.array[...] = 7
    live = setup.table.copy()
    setup.table = np.zeros(5, MOVE_DTYPE)
    setup.table[2] = live[1]
    setup.tiles += 3
    setup.run(host_kernels, "gather")
    assert (setup.sections.array[[0, 2]] == 7).all()
    flat = setup.records.reshape(-1, MAIN_NVFP4.row_bytes)
    np.testing.assert_array_equal(setup.sections.array[1], flat[setup.rows[1]])
