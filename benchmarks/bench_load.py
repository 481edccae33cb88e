"""Sixty-four clients put, get and let things expire for minutes, each byte known beforehand.

Reports what was lost or wrong (nothing may be), how long each kind of call took, and the resident
memory of daemon and clients over time, which must be flat once DRAM is full. `--png` draws it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataplane.daemon import ROOT, daemon_process
from benchmarks.load.memory import MemoryCurve
from kvstore import connect

CLIENTS, PROCESSES, MINUTES, THINK_S = 64, 4, 10.0, 0.5
CLIENTS_SMOKE, PROCESSES_SMOKE, MINUTES_SMOKE, THINK_S_SMOKE = 4, 1, 0.04, 0.01
DRAM, SSD = "64MiB", "128MiB"
"""Less than the prompts' 310 MB, so that blocks come and go on both tiers."""
SETTINGS = {
    "ssd.segment_bytes": "8MiB",
    "windows.budget_bytes": "16MiB",
    "server.data_port.connections_max": 512,
}
QUIET_S_MAX = 60.0
FAULTS = ("wrong", "lost", "errors")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the clients against a daemon of their own."""
    with tempfile.TemporaryDirectory(prefix="kvstore-load-") as folder:
        listen, store = f"unix://{folder}/kv.sock", Path(folder) / "store"
        with daemon_process(listen, DRAM, store, SSD, SETTINGS) as (url, process):
            children: list[subprocess.Popen[bytes]] = []
            curve = MemoryCurve(
                lambda: {"daemon": [process.pid], "clients": [c.pid for c in children]},
                step_s=max(0.2, options.minutes * 60 / 600),
            )
            curve.start()
            try:
                children += _start(url, options)
                results = [json.loads(child.communicate()[0]) for child in children]
            finally:
                for child in children:
                    child.kill()
                curve.stop()
            after = _after(url)
            if options.png:
                title = f"{options.clients} clients, {options.minutes:g} minutes"
                curve.draw(options.png, title, [("dram.budget_bytes", 64 << 20)])
    return _report(options, results, curve, after)


def _start(url: str, options: argparse.Namespace) -> list["subprocess.Popen[bytes]"]:
    each = options.clients // options.processes
    base = [sys.executable, "-m", "benchmarks.load.clients", url]
    rest = [str(each), str(options.minutes * 60), str(options.think_s)]
    return [
        subprocess.Popen(
            [*base, str(options.seed + n * each), *rest], cwd=ROOT, stdout=subprocess.PIPE
        )
        for n in range(options.processes)
    ]


def _after(url: str) -> dict[str, Any]:
    """What the daemon still holds once everything that was left behind has lapsed, and whether all
    that it stores is right."""
    with connect(f"{url}?data=grpc", deadline_s=60.0) as client:
        ends_s = time.monotonic() + QUIET_S_MAX
        while True:
            stat = client.stat()
            held = {
                "leases": stat.leases,
                "reservations": stat.reservations,
                "pinned_blocks": stat.pinned_blocks,
                "windows": stat.windows.objects,
                "windows_used_bytes": stat.windows.used_bytes,
            }
            if not any(held.values()) or time.monotonic() > ends_s:
                break
            time.sleep(0.2)
        report = client.verify(deadline_s=300.0)
    wanted = ("evicted_ssd_blocks", "demoted_blocks", "promoted_blocks", "leases_expired")
    wanted += ("reservations_expired", "windows_expired", "windows_evicted", "windows_hit")
    return {
        "held": held,
        "verify_clean": report.clean,
        "counters": {name: stat.counters[name] for name in wanted},
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ms = np.array(seconds) * 1e3
    if not len(ms):
        return {"calls": 0}
    p50, p99, worst = np.percentile(ms, (50, 99, 100)).tolist()
    return {"calls": len(ms), "p50_ms": p50, "p99_ms": p99, "max_ms": worst}


def _report(
    options: argparse.Namespace,
    results: Sequence[dict[str, Any]],
    curve: MemoryCurve,
    after: dict[str, Any],
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    kinds = results[0]["seconds"]
    calls = {
        kind: _percentiles([s for result in results for s in result["seconds"][kind]])
        for kind in kinds
    }
    return {
        "benchmark": "load",
        "clients": sum(result["clients"] for result in results),
        "minutes": options.minutes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "faults": {name: counts[name] for name in FAULTS},
        "counts": dict(sorted(counts.items())),
        "calls": calls,
        "after": after,
        "memory": curve.as_json(),
    }


def print_report(report: dict[str, Any]) -> None:
    """Few lines."""
    print(f"{report['clients']} clients, {report['minutes']:g} minutes, {report['machine']}")
    print("  faults: " + ", ".join(f"{n} {name}" for name, n in report["faults"].items()))
    for kind, row in report["calls"].items():
        if row["calls"]:
            print(
                f"  {kind:10} {row['calls']:8,} calls  p50 {row['p50_ms']:8.1f} ms  "
                f"p99 {row['p99_ms']:8.1f} ms  longest {row['max_ms']:8.1f} ms"
            )
    for name, g in report["memory"]["growth"].items():
        print(
            f"  {name:24} {g['warm_mib']:8.1f} MiB warm  {g['last_mib']:8.1f} MiB at the end  "
            f"{g['mib_per_minute']:+.2f} MiB/min"
        )
    after = report["after"]
    left = ", ".join(f"{n} {name}" for name, n in after["held"].items())
    print(f"  left behind: {left}; everything stored is right: {after['verify_clean']}")


def main(argv: Sequence[str] | None = None) -> int:
    """0 where nothing was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(prog="bench_load", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few clients for seconds")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--think-s", type=float, default=THINK_S, help="mean pause between calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the memory curve there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    if options.smoke:
        options.minutes, options.clients = MINUTES_SMOKE, CLIENTS_SMOKE
        options.processes, options.think_s = PROCESSES_SMOKE, THINK_S_SMOKE
    report = measure(options)
    print_report(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    held = report["after"]["held"]
    clean = not any(report["faults"].values()) and not any(held.values())
    return 0 if clean and report["after"]["verify_clean"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
