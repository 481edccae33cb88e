"""The table of eviction policies: real traces × capacities × policies, with the optimum.

`--traces DIR` is a folder with mooncake/, ragpulse/, lmcache-agent/ and weka/ as their projects
publish them; the smoke size plays the small samples of the tests. For every trace it also plays a
copy of which 30 % of the requests are prompts that nobody repeats (`scan`), at 5 %. Results are
added to the JSON trace by trace, so that a run can be continued with `--only`. `--foresight` asks
instead what a policy would hit that guesses the times of the next requests with a given accuracy,
`--costs` what a policy costs. Targets: `gittins` never more than 0.5 points below the best of the
five classic policies; on the agentic traces at 1 % and 2 % at least half-way from that to the
optimum; 2 µs per access.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.bench import pictures
from kvstore.bench.belady import Belady, guessed_uses
from kvstore.bench.cost import PRESETS
from kvstore.bench.read import read
from kvstore.bench.report import replay_figures, trace_figures
from kvstore.bench.show import curves_of
from kvstore.bench.simulate import simulate
from kvstore.bench.sweep import CLASSICS, DEFAULT_SHARES, HINTED, OPTIMUM, blocks_of, sweep
from kvstore.bench.trace import Trace, with_one_offs
from kvstore.bench.weka import Users

OURS = "gittins"
NAMES = {
    "mooncake-conversation": "mooncake/conversation_trace.jsonl",
    "mooncake-synthetic": "mooncake/synthetic_trace.jsonl",
    "ragpulse": "ragpulse",
    "miniswe": "lmcache-agent/miniswe",
    "magagent": "lmcache-agent/magagent",
    "weka-cap60": "weka/weka_traces_710.tar.zst",
    "weka-asrecorded": "weka/weka_traces_710.tar.zst",
    "weka-sixth-cap60": "weka/weka_traces_710.tar.zst",
    "weka-sixth-asrecorded": "weka/weka_traces_710.tar.zst",
}
"""`weka-sixth`: a sixth of the sessions and of the users, for machines with an hour to spare."""
AGENTIC = ("miniswe", "magagent", *(name for name in NAMES if name.startswith("weka")))
SCAN_SHARE, SCAN_CAPACITY = 0.3, 0.05
SAMPLES = Path(__file__).parent.parent / "tests" / "kvstore" / "traces"
SMOKE = {"mooncake-conversation": "mooncake.jsonl", "weka-cap60": "weka.tar.zst"}
FORESIGHT_CAPACITIES, FORESIGHT_R2 = (0.01, 0.02), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COST_RUNS, COST_CAPACITY = 3, 0.05
_SEED = 0


def load(name: str, folder: Path, smoke: bool) -> Trace:
    """One trace by the name that the table uses."""
    think = None if name.endswith("asrecorded") else 60.0
    users = Users(50, think, seed=_SEED)
    if smoke:
        users = Users(2, think, seed=_SEED)
    elif "sixth" in name:
        users = Users(8, think, seed=_SEED, sessions_max=115)
    return read(folder / (SMOKE[name] if smoke else NAMES[name]), users)


def policies(trace: Trace) -> list[str]:
    """Those that can differ on this trace."""
    hinted = [OURS + HINTED] if trace.outlook.any() else []
    return [*CLASSICS, OURS, *hinted, OPTIMUM]


def measure(trace: Trace, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Every policy at every capacity, with the seconds of CPU that the replay took per access."""
    runs = sweep(trace, policies(trace), shares)
    while True:
        began = time.process_time()
        replay = next(runs, None)
        if replay is None:
            return
        seconds = time.process_time() - began
        figures = replay_figures(replay, PRESETS["h100"])
        yield {**figures, "us_per_access": seconds / max(trace.accesses, 1) * 1e6}


def verdict(name: str, replays: list[dict[str, Any]]) -> dict[str, Any]:
    """Per capacity: the best classic policy, ours, the optimum, and whether the targets hold."""
    rates = {
        c: {r["policy"]: r["hit_rate"] for r in replays if r["capacity_blocks"] == c}
        for c in {r["capacity_blocks"] for r in replays}
    }
    share = {r["capacity_blocks"]: r["capacity_share"] for r in replays}
    out = {}
    for capacity, rate in sorted(rates.items()):
        best = max(rate[c] for c in CLASSICS)
        row = {
            "best_classic": best,
            "ours": rate[OURS],
            "optimum": rate[OPTIMUM],
            "not_below_classic": rate[OURS] >= best - 0.005,
        }
        if OURS + HINTED in rate:
            row["ours_with_hints"] = rate[OURS + HINTED]
        if name in AGENTIC and share[capacity] < 0.03:
            row["half_way"] = rate[OURS] >= (best + rate[OPTIMUM]) / 2
            row["half_way_with_hints"] = (
                rate.get(OURS + HINTED, rate[OURS]) >= (best + rate[OPTIMUM]) / 2
            )
        out[f"{share[capacity]:.3f}"] = row
    return out


def one(name: str, trace: Trace, shares: Sequence[float]) -> dict[str, Any]:
    """All that is measured on one trace."""
    replays = []
    for figures in measure(trace, shares):
        replays.append(figures)
        print(
            f"  {figures['policy']:14} {figures['capacity_share']:7.2%} "
            f"{figures['hit_rate']:7.2%}  {figures['us_per_access']:6.2f} µs per access",
            flush=True,
        )
    scan = with_one_offs(trace, SCAN_SHARE, _SEED)
    # the same room as without the scan, which brings as many blocks again and more
    room = max(1, int(SCAN_CAPACITY * trace.unique))
    scans = [
        replay_figures(r, PRESETS["h100"]) for r in sweep(scan, ("lru", OURS, OPTIMUM), [room])
    ]
    alone = trace.accesses / scan.accesses
    return {
        "trace": trace_figures(trace),
        "replays": replays,
        "targets": verdict(name, replays),
        "scan": {
            "one_offs": SCAN_SHARE,
            "capacity_blocks": room,
            # of the requests that are not one-offs; those can't hit
            "hit_rate": {f["policy"]: f["hit_rate"] / alone for f in scans},
        },
    }


def foresight(trace: Trace) -> dict[str, Any]:
    """Hit rates at 1 % and 2 % of Belady's rule over guesses, by their accuracy."""
    rates: dict[str, Any] = {}
    for share in FORESIGHT_CAPACITIES:
        for r2 in FORESIGHT_R2:
            guess = guessed_uses(trace, r2, _SEED)
            made = simulate(trace, lambda _, g=guess: Belady(trace, g), blocks_of(share, trace))
            rates.setdefault(f"{share}", {})[f"{r2}"] = made.hit_rate
            print(f"  {share:.0%}, r2 {r2:.1f}: {made.hit_rate:.2%}", flush=True)
    return rates


def costs(trace: Trace) -> dict[str, Any]:
    """Microseconds of CPU per access at 5 %, the least of a few runs, per policy."""
    least: dict[str, float] = {}
    for _ in range(COST_RUNS):
        runs = sweep(trace, policies(trace), [COST_CAPACITY])
        while True:
            began = time.process_time()
            replay = next(runs, None)
            if replay is None:
                break
            us = (time.process_time() - began) / max(trace.accesses, 1) * 1e6
            least[replay.policy] = min(us, least.get(replay.policy, us))
    for name, us in least.items():
        print(f"  {name:14} {us:6.2f} µs per access, {us / least['lru']:.2f} of lru's", flush=True)
    return least


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything ran; targets that are not met are printed, not failed."""
    parser = argparse.ArgumentParser(prog="bench_policies", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--traces", type=Path, help="the folder of the traces")
    parser.add_argument("--only", nargs="*", choices=sorted(NAMES), help="some of the traces")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--png", type=Path, help="folder for the pictures")
    parser.add_argument("--costs", action="store_true", help="CPU per access alone, at 5 %%")
    parser.add_argument("--foresight", action="store_true", help="guesses instead of policies")
    options = parser.parse_args(argv)
    if not options.smoke and not options.traces:
        parser.print_usage(sys.stderr)
        print("bench_policies: give --traces DIR, or --smoke", file=sys.stderr)
        return 2
    folder = SAMPLES if options.smoke else options.traces
    for name in options.only or (SMOKE if options.smoke else NAMES):
        print(name, flush=True)
        trace = load(name, folder, options.smoke)
        if options.costs:
            _add(options.json, name, "us_per_access", costs(trace), options.smoke)
            continue
        if options.foresight:
            _add(options.json, name, "foresight", foresight(trace), options.smoke)
            continue
        result = one(name, trace, DEFAULT_SHARES[-1:] if options.smoke else DEFAULT_SHARES)
        for share, row in result["targets"].items():
            missed = [what for what in ("not_below_classic", "half_way") if row.get(what) is False]
            print(f"  {float(share):.0%} " + (f"misses {', '.join(missed)}" if missed else "ok"))
        for key, value in result.items():
            _add(options.json, name, key, value, options.smoke)
        if options.png:
            title = f"{result['trace']['name']}: token hit rate"
            pictures.hit_rates(title, curves_of(result["replays"]), options.png / f"{name}.png")
    return 0


def _add(path: Path | None, name: str, key: str, value: Any, smoke: bool) -> None:
    if path is None:
        return
    whole: dict[str, Any] = {"benchmark": "policies", "smoke": smoke, "traces": {}}
    if path.exists():
        whole = json.loads(path.read_text())
    whole["machine"] = platform.machine()
    whole["traces"].setdefault(name, {})[key] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
