"""The table of eviction policies: real traces × capacities × policies, with the optimum.

    python -m benchmarks.bench_policies --traces DIR --json benchmarks/results/policies.json

`DIR` is a folder with mooncake/, ragpulse/, lmcache-agent/ and weka/ as their projects publish
them; the smoke size plays the small samples of the tests. Every cell is written as it is done. The
same command goes on with what is missing or was made by other code, so that the table is of one
version (`policy_cells`); `--table` prints it. For every trace it also plays a copy of which 30 % of
the requests are prompts that nobody repeats (`scan`), at 5 %. `--foresight` asks instead what a
policy would hit that guesses the times of the next requests with a given accuracy, `--costs` what a
policy costs. Targets: `gittins` never more than 0.5 points below the best of the five classic
policies; on the agentic traces at 1 % and 2 % at least half-way from that to the optimum; 2 µs per
access.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policy_cells import Results, version
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
from kvstore.eviction import POLICIES

OURS = "gittins"
Load = Callable[[str], Trace]
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
SCANNED = ("lru", OPTIMUM, OURS)
BELOW_CLASSIC, HALF_WAY_SHARE_MAX = 0.005, 0.02
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


def policies(name: str) -> list[str]:
    """Those that can differ on this trace, the dearest last."""
    hinted = [OURS + HINTED] if name.startswith("weka") else []
    return [*CLASSICS, OPTIMUM, OURS, *hinted]


def version_of(policy: str) -> str:
    """Of all code that decides what a policy hits."""
    plain = policy.removesuffix(HINTED)
    return version(read, simulate, with_one_offs, Belady if plain == OPTIMUM else POLICIES[plain])


def fill(
    results: Results, name: str, versions: dict[str, str], shares: Sequence[float], new: Load
) -> None:
    """Make the cells of one trace that the results lack, of policies in these versions; `new` reads
    the trace."""
    # large capacities first: they are done soonest
    wanted = {f"{p}@{c}": versions[p] for c in sorted(shares)[::-1] for p in versions}
    scanned = {p: versions[p] for p in versions if p in SCANNED}
    missing = results.lacks(name, "cells", wanted)
    unscanned = results.lacks(name, "scan", scanned)
    if not missing and not unscanned:
        return
    trace = new(name)
    results.add(name, "trace", trace_figures(trace))
    for cell in missing:
        policy, _, share = cell.partition("@")
        figures = measure(trace, policy, blocks_of(float(share), trace))
        results.add(name, cell, figures | {"version": wanted[cell]}, "cells")
    if not unscanned:
        return
    scan = with_one_offs(trace, SCAN_SHARE, _SEED)
    # the same room as without the scan, which brings as many blocks again and more
    room = max(1, int(SCAN_CAPACITY * trace.unique))
    for policy in unscanned:
        rate = measure(scan, policy, room)["hit_rate"]
        # of the requests that are not one-offs; those can't hit
        rate *= scan.accesses / max(trace.accesses, 1)
        figures = {"hit_rate": rate, "capacity_blocks": room, "version": scanned[policy]}
        results.add(name, policy, figures, "scan")


def measure(trace: Trace, policy: str, capacity: int) -> dict[str, Any]:
    """One replay, with the seconds of CPU that it took per access."""
    began = time.process_time()
    replay = next(sweep(trace, [policy], [capacity]))
    seconds = time.process_time() - began
    figures = replay_figures(replay, PRESETS["h100"])
    figures["us_per_access"] = seconds / max(trace.accesses, 1) * 1e6
    print(
        f"  {policy:14} {figures['capacity_share']:7.2%} {figures['hit_rate']:7.2%}  "
        f"{figures['us_per_access']:6.2f} µs per access",
        flush=True,
    )
    return figures


def verdict(name: str, cells: dict[str, Any], shares: Sequence[float]) -> dict[str, Any]:
    """Per capacity that is complete: the best classic policy, ours, the optimum, and whether the
    targets hold."""
    out = {}
    for share in shares:
        rate = {p: cells.get(f"{p}@{share}", {}).get("hit_rate") for p in policies(name)}
        if None in rate.values():
            continue
        best, ours = max(rate[c] for c in CLASSICS), rate[OURS]
        half_way = (best + rate[OPTIMUM]) / 2
        row = {"best_classic": best, "ours": ours, "optimum": rate[OPTIMUM]}
        row["not_below_classic"] = ours >= best - BELOW_CLASSIC
        if OURS + HINTED in rate:
            row["ours_with_hints"] = rate[OURS + HINTED]
        if name in AGENTIC and share <= HALF_WAY_SHARE_MAX:
            row["half_way"] = ours >= half_way
            row["half_way_with_hints"] = rate.get(OURS + HINTED, ours) >= half_way
        out[str(share)] = row
    return out


def show_table(results: Results) -> None:
    """The hit rates in %, as Markdown."""
    for name, known in results.whole["traces"].items():
        cells = known.get("cells", {})
        shares = [c for c in DEFAULT_SHARES if any(cell.endswith(f"@{c}") for cell in cells)]
        print(f"\n**{name}**\n\n| policy |" + "".join(f" {c * 100:g} % |" for c in shares))
        print("|---|" + "---|" * len(shares))
        last = policies(name)
        for policy in [*(p for p in last if p != OPTIMUM), OPTIMUM]:
            rates = [cells.get(f"{policy}@{c}", {}).get("hit_rate") for c in shares]
            texts = ["–" if rate is None else f"{rate * 100:.1f}" for rate in rates]
            print(f"| {policy} | " + " | ".join(texts) + " |")


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


def costs(trace: Trace, names: Sequence[str]) -> dict[str, Any]:
    """Microseconds of CPU per access at 5 %, the least of a few runs, per policy."""
    least: dict[str, float] = {}
    for _ in range(COST_RUNS):
        runs = sweep(trace, names, [COST_CAPACITY])
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
    parser.add_argument("--policies", nargs="*", choices=policies("weka"), help="some of them")
    parser.add_argument("--shares", nargs="*", type=float, help="some of the capacities")
    parser.add_argument("--json", type=Path, help="go on with the results in this file")
    parser.add_argument("--png", type=Path, help="folder for the pictures")
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--costs", action="store_true", help="CPU per access alone, at 5 %%")
    parser.add_argument("--foresight", action="store_true", help="guesses instead of policies")
    options = parser.parse_args(argv)
    results = Results(options.json, options.smoke)
    if options.table:
        show_table(results)
        return 0
    if not options.smoke and not options.traces:
        parser.print_usage(sys.stderr)
        print("bench_policies: give --traces DIR, or --smoke", file=sys.stderr)
        return 2
    folder = SAMPLES if options.smoke else options.traces
    shares = options.shares or (DEFAULT_SHARES[-1:] if options.smoke else DEFAULT_SHARES)

    # once, so that a change of the files does not pass for one of what runs
    versions = {policy: version_of(policy) for policy in policies("weka")}

    def new(name: str) -> Trace:
        return load(name, folder, options.smoke)

    for name in options.only or (SMOKE if options.smoke else NAMES):
        print(name, flush=True)
        if options.costs:
            results.add(name, "us_per_access", costs(new(name), policies(name)))
        elif options.foresight:
            results.add(name, "foresight", foresight(new(name)))
        else:
            chosen = [p for p in policies(name) if p in (options.policies or versions)]
            fill(results, name, {p: versions[p] for p in chosen}, shares, new)
            judge(results, name, shares, options.png)
    return 0


def judge(results: Results, name: str, shares: Sequence[float], png: Path | None) -> None:
    """Note and print whether the targets hold, and draw the picture."""
    known = results.of(name)
    targets = known.get("targets", {}) | verdict(name, known["cells"], shares)
    results.add(name, "targets", targets)
    for share, row in targets.items():
        missed = [what for what in ("not_below_classic", "half_way") if row.get(what) is False]
        print(f"  {float(share):.0%} " + (f"misses {', '.join(missed)}" if missed else "ok"))
    if png:
        title = f"{known['trace']['name']}: token hit rate"
        figures = sorted(known["cells"].values(), key=lambda f: f["capacity_share"])
        pictures.hit_rates(title, curves_of(figures), png / f"policies-{name}.png")


if __name__ == "__main__":
    raise SystemExit(main())
