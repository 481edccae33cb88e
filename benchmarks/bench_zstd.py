"""What zstd makes of cache records: gain, and how fast it packs and unpacks them.

Per kind of section (`main`, `index`; ratio 1 and 2), level, and with the codes of all rows before
their scales or rows as they are. Records come from a run of a preset (`wide` has the released
widths) and from Gaussian latents. A section pays when it shrinks by 5 % and unpacks faster than the
disk reads it, which is measured beside. One thread.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.compression.records import Sample, gaussian, of_a_run
from benchmarks.ssd.load import SHAPES, Load
from benchmarks.ssd.log import Log

LEVELS = (-5, -3, -1, 1, 2, 3, 4, 5, 6)
ROUNDS_FULL, ROUNDS_SMOKE = 7, 1
BLOCKS_FULL, BLOCKS_SMOKE = 16, 2
GAIN_MIN = 0.05


def _rate(work: Callable[[], object], size: int, rounds: int) -> float:
    """GB/s, the median of the rounds."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds) / 1e9


def measure(sample: Sample, level: int, separated: bool, rounds: int) -> dict[str, Any]:
    """One way to pack one kind of section."""
    raw = sample.parts(separated)
    size = sum(map(len, raw))
    pack = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
    unpack = zstandard.ZstdDecompressor()
    packed = [pack.compress(section) for section in raw]
    assert [unpack.decompress(p) for p in packed] == raw, "zstd gave other bytes back"
    return {
        "source": sample.source,
        "kind": sample.kind,
        "ratio": sample.ratio,
        "section_bytes": sample.section_bytes,
        "level": level,
        "separated": separated,
        "gain": 1 - sum(map(len, packed)) / size,
        "pack_gb_s": _rate(lambda: [pack.compress(s) for s in raw], size, rounds),
        "unpack_gb_s": _rate(lambda: [unpack.decompress(p) for p in packed], size, rounds),
    }


def disk_read_gb_s(directory: Path, smoke: bool) -> float:
    """What the SSD tier reads of verified whole blocks here, from one thread."""
    load = Load(SHAPES["block 227,840"], 65 if smoke else 1024, 1, 1, 16)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        log = Log(Path(folder) / "store", load)
        rates = [log.read(64, True, 0.05 if smoke else 0.3)[0] for _ in range(3)]
        log.close()
    return statistics.median(rates)


def whole_block(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a block of the released layout gains: its sections weighted by their bytes (72 % are
    main rows of three ratio-2 caches and one of ratio 1, the rest index rows)."""
    counts = {("main", 2): 3, ("index", 2): 3, ("main", 1): 1, ("index", 1): 1}
    out = []
    for key in sorted({(r["source"], r["level"], r["separated"]) for r in rows}):
        own = [r for r in rows if (r["source"], r["level"], r["separated"]) == key]
        weights = [counts[r["kind"], r["ratio"]] * r["section_bytes"] for r in own]
        gain = sum(w * r["gain"] for w, r in zip(weights, own, strict=True)) / sum(weights)
        seconds = sum(w / r["unpack_gb_s"] for w, r in zip(weights, own, strict=True))
        unpack_gb_s = sum(weights) / seconds
        source, level, separated = key
        out.append(
            {
                "source": source,
                "level": level,
                "separated": separated,
                "gain": gain,
                "unpack_gb_s": unpack_gb_s,
            }
        )
    return out


def pays(row: dict[str, Any], disk_gb_s: float) -> bool:
    """Whether it is worth storing packed: small enough, and read no slower."""
    return bool(row["gain"] >= GAIN_MIN and row["unpack_gb_s"] >= disk_gb_s)


def table(rows: Sequence[dict[str, Any]], disk_gb_s: float) -> list[str]:
    """Markdown: the best level of each kind, and levels 1 and −1."""
    lines = [
        "| records | section | level | codes apart | gain | pack GB/s | unpack GB/s | pays |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['source']} | {r['kind']}, ratio {r['ratio']}, {r['section_bytes']:,} B "
        f"| {r['level']} | {'yes' if r['separated'] else 'no'} | {100 * r['gain']:.1f} % "
        f"| {r['pack_gb_s']:.2f} | {r['unpack_gb_s']:.2f} "
        f"| {'yes' if pays(r, disk_gb_s) else 'no'} |"
        for r in rows
    ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_zstd", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="Gaussian latents alone, few levels")
    parser.add_argument("--preset", default="wide", help="whose records; `none` for none")
    parser.add_argument("--tokens", type=int, default=1100, help="of the run's prompt")
    parser.add_argument("--rounds", type=int, default=ROUNDS_FULL)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the disk is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    samples = list(gaussian(BLOCKS_SMOKE if options.smoke else BLOCKS_FULL))
    if options.preset != "none" and not options.smoke:
        samples = [*of_a_run(options.preset, options.tokens), *samples]
    levels = (-1, 1) if options.smoke else LEVELS
    rounds = ROUNDS_SMOKE if options.smoke else options.rounds
    rows = [
        measure(sample, level, separated, rounds)
        for sample in samples
        for level in levels
        for separated in (False, True)
    ]
    disk = disk_read_gb_s(options.dir, options.smoke)
    blocks = whole_block(rows)
    report = {
        "benchmark": "zstd",
        "smoke": options.smoke,
        "rounds": rounds,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_after": os.getloadavg(),
        "disk_read_gb_s": disk,
        "rows": rows,
        "whole_blocks": blocks,
    }
    print(f"the tier reads {disk:.2f} GB/s; zstd pays where it gains {GAIN_MIN:.0%} and keeps up")
    print("\n".join(table(rows, disk)))
    for r in blocks:
        apart = "codes apart" if r["separated"] else "as it is"
        print(
            f"whole block, {r['source']}, level {r['level']}, {apart}: "
            f"gain {100 * r['gain']:.1f} %, unpack {r['unpack_gb_s']:.2f} GB/s, "
            f"pays: {pays(r, disk)}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
