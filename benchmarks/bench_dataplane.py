"""How fast blocks come out of and go into a daemon, as ratios to what the machine can do.

On one host the measure is a copy of the same bytes in the same process; over loopback TCP a bare
socket and a bare gRPC call with the same sizes. What is compared takes turns, so that a slow spell
of the machine hits both. A 1M-token prefix (933 MB) is put, matched and read once. `--peers` names
a JSON file that `benchmarks/peers` wrote, to be put beside.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.dataplane import local, prefix, remote

ROUNDS_FULL, ROUNDS_SMOKE = 41, 1


def print_report(report: dict[str, Any]) -> None:
    """Few lines: a figure, its target, and whether it is met."""
    print("one host, batch of 64 blocks (14.6 MB), medians")
    for name, value in report["local"]["ratios"].items():
        target = local.TARGETS.get(name)
        aim = "" if target is None else f"  target {target:g}"
        print(f"  {name:30} {value:10.3f}{aim}")
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in report["local"]["gb_s"].items())
    print(f"  GB/s: {rates}")
    print("loopback TCP, GB/s (targets 0.8)")
    for row in report["remote"]["rows"]:
        rates = "  ".join(f"{name} {rate:6.2f}" for name, rate in row["gb_s"].items())
        ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items())
        what = f"{row['blocks']} × {row['block_bytes']} B, {row['clients']} clients"
        print(f"  {what:30} {rates}   {ratios}")
    for row in report["prefix"]:
        steps = "  ".join(f"{name} {s:.3f} s" for name, s in row["seconds"].items())
        rates = "  ".join(f"{name} {rate:.2f}" for name, rate in row["gb_s"].items())
        print(f"prefix of {row['blocks']} blocks ({row['data']}): {steps}; GB/s {rates}")
    for row in report.get("peers", {}).get("rows", []):
        print(f"  {row}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_dataplane", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--rounds", type=int, default=ROUNDS_FULL)
    parser.add_argument("--no-prefix", action="store_true", help="leave the 1M-token prefix out")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="results of benchmarks/peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    rounds = ROUNDS_SMOKE if options.smoke else options.rounds
    blocks = prefix.BLOCKS_SMOKE if options.smoke else prefix.BLOCKS_FULL
    ways: list[str] = (
        [] if options.no_prefix else ["shared"] if options.smoke else ["shared", "port"]
    )
    report: dict[str, Any] = {
        "benchmark": "dataplane",
        "smoke": options.smoke,
        "rounds": rounds,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg(),
        "local": local.measure(rounds),
        "remote": remote.measure(rounds, options.smoke),
        "prefix": [prefix.measure(blocks, data) for data in ways],
        "load_after": os.getloadavg(),
    }
    if options.peers:
        report["peers"] = json.loads(options.peers.read_text(encoding="utf-8"))
    print_report(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
