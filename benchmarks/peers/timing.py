"""Gets and puts of one object at a time. Imports nothing but the standard library, since it runs in
the peers' own environments."""

import json
import statistics
import sys
import time
from collections.abc import Callable

OBJECT_BYTES = (64 << 10, 256 << 10, 1 << 20)
RUNS = 300
OBJECTS = 16


def _timed(operation: Callable[[str], object], keys: list[str]) -> list[float]:
    seconds = []
    for n in range(RUNS):
        start = time.perf_counter()
        operation(keys[n % len(keys)])
        seconds.append(time.perf_counter() - start)
    return seconds[RUNS // 10 :]


def rows(
    system: str, put: Callable[[str, bytes], object], get: Callable[[str], object]
) -> list[dict[str, object]]:
    """One row per size: microseconds at the median and at p99, and GB/s at the median."""
    out: list[dict[str, object]] = []
    for size in OBJECT_BYTES:
        value = bytes(range(256)) * (size // 256)
        keys = [f"{size}-{n}" for n in range(OBJECTS)]
        for key in keys:
            put(key, value)
            if get(key) != value:
                raise RuntimeError(f"{system} gave other bytes than it was given")
        for name, seconds in (("get", _timed(get, keys)),):
            ordered = sorted(seconds)
            p50 = statistics.median(ordered)
            out.append(
                {
                    "system": system,
                    "operation": name,
                    "bytes": size,
                    "p50_us": p50 * 1e6,
                    "p99_us": ordered[int(len(ordered) * 0.99)] * 1e6,
                    "gb_s": size / p50 / 1e9,
                }
            )
    return out


def tell(result: list[dict[str, object]]) -> None:
    """Hand the rows to `benchmarks.peers.run`, as the last line of the output."""
    json.dump(result, sys.stdout)
    print()
