"""Would constants of `gittins` chosen on other requests have been as good?

    python -m benchmarks.policy_constants --traces DIR

The constants were set by looking at the traces that the table measures. Here each is moved alone,
down and up by about a half; the setting that hits most in the first half of every trace's requests
is chosen, and what it hits in the second half, which had no part in the choice, is shown beside the
constants as they are and the best and worst of all settings there. `chosen elsewhere` is chosen on
all requests of the other traces.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_policies import SAMPLES, SMOKE, load
from kvstore.bench.simulate import simulate
from kvstore.bench.sweep import blocks_of
from kvstore.bench.trace import Trace
from kvstore.eviction import Gittins, arrivals, block_classes, ends, reuse_times

AS_THEY_ARE = "as they are"
MOVES = {
    (block_classes, "_PACE_GAIN"): (0.15, 0.5),
    (block_classes, "_GREW_BLOCKS"): (1, 3),
    (arrivals, "_SHARED_FACTOR"): (0.25, 0.75),
    (arrivals, "_USES_MAX"): (4, 16),
    (ends, "_REVALUE_SHARE"): (4, 12),
    (reuse_times, "_PRIOR_REQUESTS"): (10.0, 30.0),
    (reuse_times, "_GROUP_REQUESTS"): (10.0, 30.0),
    (reuse_times, "_CLASS_REQUESTS"): (20.0, 60.0),
}
NAMES = ("miniswe", "magagent", "mooncake-synthetic", "mooncake-conversation")
SHARES = (0.02, 0.05)


@contextmanager
def moved(module: Any, name: str, value: float) -> Iterator[None]:
    """One constant has another value meanwhile."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def halves(trace: Trace) -> np.ndarray[Any, Any]:
    """Mean hit rate over `SHARES` in both halves of the requests, in points."""
    asked, middle = np.diff(trace.start), trace.requests // 2
    rates = []
    for share in SHARES:
        hits = simulate(trace, Gittins, blocks_of(share, trace)).hit_store
        parts = (slice(middle), slice(middle, None))
        rates.append([100 * hits[p].sum() / max(asked[p].sum(), 1) for p in parts])
    return np.mean(rates, axis=0)


def measure(traces: dict[str, Trace]) -> dict[str, dict[str, Any]]:
    """Per setting and trace the rates of both halves; prints as it goes."""
    settings: list[tuple[str, Any]] = [(AS_THEY_ARE, None)]
    settings += [
        (f"{name.strip('_').lower()} {value}", (module, name, value))
        for (module, name), values in MOVES.items()
        for value in values
    ]
    rates = {}
    for label, move in settings:
        with moved(*(move or (block_classes, "_PACE_GAIN", block_classes._PACE_GAIN))):
            rates[label] = {name: halves(trace) for name, trace in traces.items()}
        shown = "  ".join(f"{n} {r[0]:.2f} {r[1]:.2f}" for n, r in rates[label].items())
        print(f"{label:22} {shown}", flush=True)
    return rates


def held_out(rates: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Per trace the second half under each way to choose."""
    out = {}
    for name in names:
        second = {label: float(of[name][1]) for label, of in rates.items()}
        first = max(rates, key=lambda label, n=name: rates[label][n][0])
        others = [n for n in names if n != name]
        elsewhere = max(rates, key=lambda label, o=others: sum(rates[label][n].mean() for n in o))
        out[name] = {
            AS_THEY_ARE: second[AS_THEY_ARE],
            "chosen on the first half": [first, second[first]],
            "chosen elsewhere": [elsewhere, second[elsewhere]],
            "best and worst": [max(second.values()), min(second.values())],
        }
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything ran."""
    parser = argparse.ArgumentParser(prog="policy_constants", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--traces", type=Path, help="the folder of the traces")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if not options.smoke and not options.traces:
        parser.print_usage(sys.stderr)
        print("policy_constants: give --traces DIR, or --smoke", file=sys.stderr)
        return 2
    names = tuple(SMOKE) if options.smoke else NAMES
    folder = SAMPLES if options.smoke else options.traces
    traces = {name: load(name, folder, options.smoke) for name in names}
    out = held_out(measure(traces), names)
    print(json.dumps(out, indent=1))
    if options.json:
        options.json.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
