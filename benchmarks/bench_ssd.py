"""How fast the SSD tier moves objects, as ratios to what the disk can do (fio).

Blocks of the released layout and single sections of it, one client and four. Ours and fio take
turns, so that a slow spell of the machine hits both; a ratio is the median of the rounds' ratios.
fio reads with the same size, depth and O_DIRECT on the same file system; it writes new files, with
and without a sync per batch. Every read of ours is verified, fio's are not. Beside it stand LMDB
alone, a file per object, the daemon, and LMCache's disk backend (`--lmcache` names its program).
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ssd import fio, lmcache, through_daemon
from benchmarks.ssd.load import BATCH, SHAPES, Figures, Load, median_ratio
from benchmarks.ssd.log import Log
from benchmarks.ssd.simple import Files, Lmdb

ROUNDS_FULL, ROUNDS_SMOKE = 7, 1
DEPTH = 16
STEP_S = 0.3
READS = (
    ("read", "randread", BATCH, False),
    ("at_once", "randread", 0, False),
    ("prefix", "read", BATCH, True),
)
"""Scattered objects with a full queue, as many as the queue is deep at a time (for latency), and
objects that lie one behind the other: name, fio's pattern, objects per call, adjacent."""
TARGETS = {"read": 0.85, "prefix": 0.85, "write": 0.80, "read_p99": 2.0}
_DISK_BYTES, _ROUND_BYTES = 512 << 20, 96 << 20


def _load(shape: str, clients: int, smoke: bool) -> Load:
    sections = SHAPES[shape]
    stored = Load(sections, 0, 0, 1, 1).stored
    if smoke:
        return Load(sections, BATCH + 1, 1, clients, 4)
    objects = min(8192, _DISK_BYTES // stored)
    calls = max(1, min(24, _ROUND_BYTES // (stored * BATCH)) // clients)
    return Load(sections, objects, calls, clients, DEPTH)


def measure_row(
    directory: Path, shape: str, clients: int, rounds: int, smoke: bool, limit: bool
) -> dict[str, Any]:
    """One size with one number of clients: ours and fio in turns."""
    load, step_s = _load(shape, clients, smoke), 0.05 if smoke else STEP_S
    figures: dict[str, Figures] = {}

    def note(name: str, result: tuple[float, float]) -> None:
        figures.setdefault(name, Figures()).add(*result)

    bytes_each = load.payload * BATCH * load.calls
    size, runtime_ms = load.payload, int(step_s * 1000)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        log = Log(Path(folder) / "store", load)
        for n in range(rounds + 1):
            if n == 1:
                figures.clear()
            for name, pattern, count, adjacent in READS:
                count = count or load.depth
                note(name, log.read(count, adjacent, step_s))
                if limit:
                    options = (size, DEPTH, clients, runtime_ms, name == "at_once")
                    note(f"fio_{name}", fio.read(directory, pattern, *options))
            note("write", log.write())
            if limit:
                note("fio_write", fio.write(directory, size, DEPTH, clients, bytes_each))
                durable = fio.write(directory, size, DEPTH, clients, bytes_each, BATCH)
                note("fio_durable", durable)
        log.close()
    row = {"shape": shape, "clients": clients, "payload_bytes": load.payload}
    row |= {name: f.as_json() for name, f in figures.items()}
    if limit:
        row["ratios"] = _ratios(figures)
    return row


def _ratios(figures: dict[str, Figures]) -> dict[str, float]:
    """Ours over fio's, per round."""
    pairs = {
        "read": ("read", "fio_read"),
        "prefix": ("prefix", "fio_prefix"),
        "write": ("write", "fio_write"),
        "durable": ("write", "fio_durable"),
    }
    ratios = {
        name: median_ratio(figures[a].gb_s, figures[b].gb_s) for name, (a, b) in pairs.items()
    }
    latency = figures["at_once"], figures["fio_at_once"]
    ratios["read_p99"] = median_ratio(latency[0].p99_us, latency[1].p99_us)
    return ratios


def measure_others(
    directory: Path, shape: str, rounds: int, smoke: bool, program: Path | None
) -> dict[str, Any]:
    """LMDB alone, files, ours and LMCache with one client, in turns where they can take any."""
    load, figures = _load(shape, 1, smoke), dict[str, Figures]()
    step_s = 0.05 if smoke else STEP_S
    row: dict[str, Any] = {"shape": shape}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        root = Path(folder)
        for name in ("lmdb", "files", "lmcache"):
            (root / name).mkdir()
        log = Log(root / "store", load)
        contestants = {"lmdb": Lmdb(root / "lmdb", load), "files": Files(root / "files", load)}
        for _ in range(rounds):
            for name, contestant in contestants.items():
                for what in ("write", "read"):
                    gb_s = getattr(contestant, what)()
                    figures.setdefault(f"{name}_{what}", Figures()).add(gb_s)
            figures.setdefault("write", Figures()).add(*log.write())
            figures.setdefault("scattered", Figures()).add(*log.read(BATCH, False, step_s))
            figures.setdefault("prefix", Figures()).add(*log.read(BATCH, True, step_s))
        if program is not None:
            row["lmcache"] = lmcache.measure(program, root / "lmcache", load, rounds + 4)
            figures["scattered"].add(*log.read(BATCH, False, step_s))
            figures["prefix"].add(*log.read(BATCH, True, step_s))
        contestants["lmdb"].close()  # type: ignore[union-attr]
        log.close()
    return row | {name: f.as_json() for name, f in figures.items()}


def measure_daemon(directory: Path, rounds: int, smoke: bool) -> dict[str, Any]:
    """Whole blocks through a daemon, and the tier's library with them in turns."""
    blocks = 8 if smoke else 4 * BATCH
    load, step_s = _load("block 227,840", 1, smoke), 0.05 if smoke else STEP_S
    figures = {name: Figures() for name in ("daemon_write", "daemon_read", "write", "prefix")}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        log = Log(Path(folder) / "library", load)
        with through_daemon.door(Path(folder), blocks) as door:
            for n in range(rounds + 1):
                result = {"daemon_write": (door.write(),), "daemon_read": (door.read(),)}
                result |= {"write": log.write(), "prefix": log.read(BATCH, True, step_s)}
                for name, values in result.items() if n else ():
                    figures[name].add(*values)
        log.close()
    ratios = {
        "daemon_read_to_library": median_ratio(figures["daemon_read"].gb_s, figures["prefix"].gb_s),
        "daemon_write_to_library": median_ratio(
            figures["daemon_write"].gb_s, figures["write"].gb_s
        ),
    }
    return {"blocks": blocks, "ratios": ratios} | {n: f.as_json() for n, f in figures.items()}


def print_report(report: dict[str, Any]) -> None:
    """Few lines: GB/s, and the ratios with their targets."""
    if report["no_fio"]:
        print(report["no_fio"])
    aims = ", ".join(f"{name} {aim:g}" for name, aim in TARGETS.items())
    print(f"tier against fio, medians of {report['rounds']} rounds (targets: {aims})")
    for row in report["rows"]:
        names = ("read", "fio_read", "prefix", "fio_prefix", "write", "fio_write", "fio_durable")
        rates = "  ".join(f"{n} {row[n]['gb_s']:.2f}" for n in names if n in row)
        print(f"  {row['shape']:15} {row['clients']} clients  GB/s {rates}")
        ratios = "  ".join(f"{n} {r:.2f}" for n, r in row.get("ratios", {}).items())
        print(f"  {'':15} {'':9}  ratios {ratios}")
    for row in report["others"]:
        rates = "  ".join(f"{n} {f['gb_s']:.2f}" for n, f in row.items() if "gb_s" in str(f)[:9])
        print(f"  {row['shape']:15} beside: {rates}  lmcache {row.get('lmcache', 'not asked for')}")
    if report["daemon"]:
        daemon = report["daemon"]
        rates = "  ".join(f"{n} {f['gb_s']:.2f}" for n, f in daemon.items() if "gb_s" in str(f)[:9])
        print(f"  daemon, {daemon['blocks']} blocks a call: {rates}  {daemon['ratios']}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_ssd", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--rounds", type=int, default=ROUNDS_FULL)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write (a real disk)")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--clients", nargs="*", type=int, default=(1, 4))
    parser.add_argument("--parts", nargs="*", default=("fio", "others", "daemon"))
    parser.add_argument("--lmcache", type=Path, metavar="PROGRAM", help="LMCache's `lmcache`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    rounds = ROUNDS_SMOKE if options.smoke else options.rounds
    shapes = ("section 8,704", "block 227,840") if options.smoke else options.shapes
    clients = (2,) if options.smoke else options.clients
    no_fio = fio.missing()
    report: dict[str, Any] = {
        "benchmark": "ssd",
        "smoke": options.smoke,
        "rounds": rounds,
        "depth": DEPTH,
        "batch": BATCH,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "targets": TARGETS,
        "no_fio": no_fio,
        "load_before": os.getloadavg(),
        "rows": [],
        "others": [],
        "daemon": {},
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-ssd-") as folder:
        root = Path(folder)
        limit = no_fio is None and not options.smoke
        if "fio" in options.parts:
            report["rows"] = [
                measure_row(root, shape, n, rounds, options.smoke, limit)
                for shape in shapes
                for n in clients
            ]
        if "others" in options.parts:
            report["others"] = [
                measure_others(root, shape, rounds, options.smoke, options.lmcache)
                for shape in shapes
            ]
        if "daemon" in options.parts:
            report["daemon"] = measure_daemon(root, rounds, options.smoke)
    report["load_after"] = os.getloadavg()
    print_report(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
