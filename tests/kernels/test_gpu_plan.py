"""Tables and layouts that would reach elsewhere are refused on the host, before a launch."""

import numpy as np
import pytest

from kernels.engine_records import ENGINE_RECORDS, MAIN_NVFP4, PageLayout
from kernels.gpu.plan import chunk_rows, move_table

LAYOUT = PageLayout(MAIN_NVFP4, 128, True)
SECTION = 256 * MAIN_NVFP4.section_row_bytes


@pytest.mark.parametrize(
    ("slots", "sections", "error", "words"),
    [
        ([[0, -1]], [0], ValueError, "slot -1 is outside the pool, which has 0 … 1279"),
        ([[0, 1280]], [0], ValueError, "slot 1280 is outside"),
        (np.array([[0, 2**63]], np.uint64), [0], ValueError, "slot 9223372036854775808 is outside"),
        ([[0, 192]], [0], ValueError, "slot 192: 128 rows from there on must lie in one page"),
        ([[0, 8]], [0], ValueError, "slot 8"),
        ([[128, 128]], [0], ValueError, "slots overlap"),
        ([[0, 128], [256, 0]], [0, SECTION], ValueError, "slots overlap"),
        ([[0.0, 128.0]], [0], TypeError, "slots are float64"),
        ([[0]], [0], ValueError, r"slots have shape \(1, 1\); these sections need \(1, 2\)"),
        ([[0, 128]], [8], ValueError, "a section at 0x8"),
        ([[0, 128], [256, 384]], [0, SECTION - 16], ValueError, "sections overlap"),
        ([[0, 128], [256, 384]], [0, 0], ValueError, "sections overlap"),
    ],
)
def test_tables_that_would_reach_elsewhere_are_refused(slots, sections, error, words):
    with pytest.raises(error, match=words):
        move_table(LAYOUT, 1 << 20, 10, slots, sections, 256)


def test_the_last_slot_and_an_empty_table_are_taken():
    assert move_table(LAYOUT, 1 << 20, 10, [[1152, 0]], [0], 256)["data"][0] == (
        (1 << 20) + 9 * LAYOUT.page_bytes
    )
    assert len(move_table(LAYOUT, 0, 10, np.zeros((0, 2)), [], 256)) == 0


def test_a_pool_off_its_alignment_is_refused():
    with pytest.raises(ValueError, match="the pool begins at 0x4"):
        move_table(LAYOUT, 4, 10, [[0, 128]], [0], 256)


@pytest.mark.parametrize("rows", [0, -64, 24, 65])
def test_pages_of_odd_rows_are_refused(rows):
    with pytest.raises(ValueError, match=f"{rows} rows per page"):
        PageLayout(MAIN_NVFP4, rows, False)


@pytest.mark.parametrize("page_bytes", [16, 64 * 288 - 16, 64 * 288 + 8])
def test_pages_of_wrong_bytes_are_refused(page_bytes):
    with pytest.raises(ValueError, match=f"{page_bytes} bytes per page"):
        PageLayout(MAIN_NVFP4, 64, False, page_bytes)


@pytest.mark.parametrize("rows", [0, 96, 130, 24])
def test_sections_that_pages_do_not_divide_are_refused(rows):
    with pytest.raises(ValueError, match=f"sections of {rows} rows"):
        chunk_rows(PageLayout(MAIN_NVFP4, 64, False), rows)


def test_sizes_are_those_of_the_model():
    sizes = {name: record.row_bytes for name, record in ENGINE_RECORDS.items()}
    assert sizes == {
        "main_nvfp4": 288,
        "main_fp8": 528,
        "main_fp8_rotary": 584,
        "index_mxfp4": 68,
        "index_fp8": 132,
        "index_fp8_float": 132,
    }
    assert {r.section_row_bytes for r in ENGINE_RECORDS.values() if r.channels == 512} == {288}
    assert {r.section_row_bytes for r in ENGINE_RECORDS.values() if r.channels == 128} == {68}
