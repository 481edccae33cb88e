"""How fast records are made and read: GB/s of the bfloat16 side, one thread, beside a memcpy.

Every figure stands next to a plain copy of the same bfloat16 bytes in the same run, so that the
ratios say more than the machine's mood. The clock is the thread's own CPU time: the work is one
thread's and never waits, so that on a quiet machine this is the wall's time, and on a busy one the
other work is not counted. Targets: 2 GB/s quantising, 6 GB/s dequantising.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kernels import codec
from kernels.layout import KINDS

# Channels of a row in the released model: main entries, index keys, window rows.
RELEASED_CHANNELS = {"nvfp4": 512, "mxfp4": 128, "fp8": 512}
TARGETS_GB_S = {"quantize": 2.0, "dequantize": 6.0}
VALUE_BYTES_FULL = 64 << 20
VALUE_BYTES_SMOKE = 256 << 10
ROUNDS_FULL = 7
ROUNDS_SMOKE = 1


def bfloat16_rows(rows: int, channels: int, seed: int) -> np.ndarray:
    """Normal values, as the upper halves of float32."""
    values = np.random.default_rng(seed).standard_normal((rows, channels), dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def best_seconds(operations: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least CPU time of each operation; they take turns, so that a slow spell hits all."""
    best = dict.fromkeys(operations, float("inf"))
    for _ in range(rounds):
        for name, operation in operations.items():
            start = time.thread_time()
            operation()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def measure(kind: str, backend: str, value_bytes: int, rounds: int, seed: int) -> dict:
    """One kind on one backend: GB/s of both directions and of the copy, and the ratios."""
    channels = RELEASED_CHANNELS[kind]
    values = bfloat16_rows(value_bytes // 2 // channels, channels, seed)
    records = codec.quantize(kind, values, backend=backend)
    restored = np.zeros_like(values)
    seconds = best_seconds(
        {
            "copy": lambda: np.copyto(restored, values),
            "quantize": lambda: codec.quantize(kind, values, records, backend=backend),
            "dequantize": lambda: codec.dequantize(
                kind, records, "bfloat16", restored, backend=backend
            ),
        },
        rounds,
    )
    gb_s = {name: values.nbytes / best / 1e9 for name, best in seconds.items()}
    return {
        "kind": kind,
        "backend": backend,
        "channels": channels,
        "value_bytes": values.nbytes,
        "record_bytes": KINDS[kind].record_bytes(channels),
        "copy_gb_s": gb_s["copy"],
        **{
            f"{name}_{what}": figure
            for name in TARGETS_GB_S
            for what, figure in (("gb_s", gb_s[name]), ("to_copy", gb_s[name] / gb_s["copy"]))
        },
    }


def print_table(results: Sequence[dict]) -> None:
    """One line per kind and backend."""
    print("GB per CPU second of the bfloat16 side, one thread (ratio to a copy of these bytes)")
    print(f"{'kind':6} {'backend':9} {'quantise':>16} {'dequantise':>16} {'copy':>7}")
    for row in results:
        figures = (
            f"{row[f'{name}_gb_s']:7.2f} ({row[f'{name}_to_copy']:5.3f})" for name in TARGETS_GB_S
        )
        cells = " ".join(f"{figure:>16}" for figure in figures)
        print(f"{row['kind']:6} {row['backend']:9} {cells} {row['copy_gb_s']:7.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)

    value_bytes, rounds = (
        (VALUE_BYTES_SMOKE, ROUNDS_SMOKE) if options.smoke else (VALUE_BYTES_FULL, ROUNDS_FULL)
    )
    results = [
        measure(kind, backend, value_bytes, rounds, options.seed)
        for kind in KINDS
        for backend in codec.available_backends()
    ]
    print_table(results)
    if options.json:
        report = {
            "benchmark": "kernels",
            "smoke": options.smoke,
            "seed": options.seed,
            "rounds": rounds,
            "machine": platform.machine(),
            "targets_gb_s": TARGETS_GB_S,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
