"""How near the device kernels come to a plain copy on the same device in the same run.

A kernel's rate counts what it reads and what it writes; so does the copy's. Rounds of copy and
kernel take turns, each timed by events around several launches, and the medians are compared. The
buffers are larger than any cache. Target: 0.8 of the copy.

Without CuPy or a device nothing is measured, and the output says so.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels import gpu
from kernels.engine_records import ENGINE_RECORDS, EngineRecord, PageLayout
from kernels.gpu import runtime
from kernels.gpu.plan import chunk_rows
from kernels.layout import KINDS

RELEASED_CHANNELS = {"nvfp4": 512, "mxfp4": 128, "fp8": 512}
SECTION_ROWS = 128
PAGE_ROWS = 64
RATIO_TARGET = 0.8


@dataclass(frozen=True, slots=True)
class Size:
    """`bytes_each`: of the larger side of every kernel. `launches`: between two events."""

    bytes_each: int
    rounds: int
    launches: int


FULL = Size(bytes_each=1 << 30, rounds=15, launches=5)
SMOKE = Size(bytes_each=1 << 16, rounds=2, launches=1)


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to time: what it is, the bytes that it reads and writes, and its launch."""

    name: str
    nbytes: int
    launch: Callable[[], None]


def copy_work(cp: Any, size: Size) -> Work:
    """The limit: a copy within the device's memory."""
    source, target = (cp.zeros(size.bytes_each, np.uint8) for _ in range(2))

    def launch() -> None:
        stream = cp.cuda.get_current_stream()
        target.data.copy_from_device_async(source.data, source.nbytes, stream)

    return Work("copy", 2 * size.bytes_each, launch)


def conversions(cp: Any, size: Size, seed: int) -> Iterator[Work]:
    """Quantise and dequantise, of every kind and value type, at the released widths."""
    rng = np.random.default_rng(seed)
    for kind, channels in RELEASED_CHANNELS.items():
        for values, dtype in (("bfloat16", np.uint16), ("float32", np.float32)):
            rows = max(1, size.bytes_each // channels // np.dtype(dtype).itemsize)
            x = cp.zeros((rows, channels), dtype)
            few = min(rows, 256)
            normal = rng.standard_normal((few, channels), np.float32)
            part = normal if values == "float32" else (normal.view(np.uint32) >> 16)
            x[:few] = cp.asarray(part.astype(dtype))
            records = cp.zeros((rows, KINDS[kind].record_bytes(channels)), np.uint8)
            nbytes = x.nbytes + records.nbytes
            yield Work(
                f"quantize_{kind}_{values}",
                nbytes,
                lambda kind=kind, x=x, records=records: gpu.quantize(kind, x, records),
            )
            yield Work(
                f"dequantize_{kind}_{values}",
                nbytes,
                lambda kind=kind, x=x, records=records, values=values: gpu.dequantize(
                    kind, records, values, x
                ),
            )


def moves(cp: Any, size: Size, seed: int) -> Iterator[Work]:
    """Gather and scatter of every engine record, in pages of both forms, in random order."""
    rng = np.random.default_rng(seed)
    for record in ENGINE_RECORDS.values():
        for split in (False, True):
            yield from _moves(cp, size, rng, record, split)


def _moves(
    cp: Any, size: Size, rng: np.random.Generator, record: EngineRecord, split: bool
) -> Iterator[Work]:
    layout = PageLayout(record, PAGE_ROWS, split)
    chunk = chunk_rows(layout, SECTION_ROWS)
    most = (1 << 16) // (SECTION_ROWS // chunk) - 1
    sections = min(most, max(1, size.bytes_each // record.row_bytes // SECTION_ROWS))
    chunks = SECTION_ROWS // chunk
    pages = sections * SECTION_ROWS // PAGE_ROWS
    pool = cp.zeros((pages, layout.page_bytes), np.uint8)
    blocks = cp.zeros((sections, SECTION_ROWS, record.section_row_bytes), np.uint8)
    slots = (rng.permutation(sections * chunks) * chunk).reshape(sections, chunks)
    launches = gpu.PageMoves(record, sections * chunks, split=split, rows_max=chunk)
    launches.load([gpu.pool_moves(layout, pool, slots, list(blocks), SECTION_ROWS)])
    form = "split" if split else "interleaved"
    nbytes = pool.nbytes + blocks.nbytes
    yield Work(f"gather_{record.name}_{form}", nbytes, launches.gather)
    yield Work(f"scatter_{record.name}_{form}", nbytes, launches.scatter)


def checksums(cp: Any, size: Size) -> Work:
    """xxh3-128 of main sections of the released layout. It writes next to nothing."""
    section_bytes = 128 * 288
    count = max(1, size.bytes_each // section_bytes)
    sections = cp.zeros((count, section_bytes), np.uint8)
    launches = gpu.Checksums(count)
    launches.load(list(sections))
    return Work("checksum", sections.nbytes, launches.run)


def elapsed_s(cp: Any, work: Work, launches: int) -> float:
    """Seconds of one launch, out of several in a row."""
    before, behind = cp.cuda.Event(), cp.cuda.Event()
    before.record(cp.cuda.get_current_stream())
    for _ in range(launches):
        work.launch()
    behind.record(cp.cuda.get_current_stream())
    behind.synchronize()
    return float(cp.cuda.get_elapsed_time(before, behind)) / 1e3 / launches


def measure(cp: Any, work: Work, copy: Work, size: Size) -> dict[str, Any]:
    """GB/s of a kernel and of the copy beside it, and the median ratio."""
    work.launch()
    copy.launch()
    rates: list[tuple[float, float]] = []
    for _ in range(size.rounds):
        own, limit = (elapsed_s(cp, w, size.launches) for w in (work, copy))
        rates.append((work.nbytes / own / 1e9, copy.nbytes / limit / 1e9))
    return {
        "kernel": work.name,
        "bytes": work.nbytes,
        "gb_s": statistics.median(own for own, _ in rates),
        "copy_gb_s": statistics.median(limit for _, limit in rates),
        "to_copy": statistics.median(own / limit for own, limit in rates),
    }


def run(cp: Any, size: Size, seed: int) -> dict[str, Any]:
    """Every kernel on the current device."""
    copy = copy_work(cp, size)
    results = []
    works: Iterator[Work]
    for works in (conversions(cp, size, seed), moves(cp, size, seed), iter([checksums(cp, size)])):
        results += [measure(cp, work, copy, size) for work in works]
    name = cp.cuda.runtime.getDeviceProperties(0)["name"]
    return {"measured": True, "device": name.decode(), "results": results}


def print_table(report: dict[str, Any]) -> None:
    print(f"on {report['device']}: GB/s read and written, and the ratio to a copy on the device")
    for row in report["results"]:
        mark = "" if row["to_copy"] >= RATIO_TARGET else f"  below {RATIO_TARGET}"
        print(f"{row['kernel']:36} {row['gb_s']:9.1f} {row['to_copy']:6.3f}{mark}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_gpu", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    size = SMOKE if options.smoke else FULL
    try:
        report = run(runtime.cupy(), size, options.seed)
    except gpu.GpuUnavailableError as error:
        report = {"measured": False, "reason": str(error), "results": []}
        print(f"not measured: no GPU ({error})")
    else:
        print_table(report)
    if options.json:
        report = {
            "benchmark": "gpu",
            "smoke": options.smoke,
            "seed": options.seed,
            "ratio_target": RATIO_TARGET,
            **report,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
