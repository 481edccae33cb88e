"""Tables for the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from kvstore.bench.report import trace_figures
from kvstore.bench.trace import Trace

_WIDTH_MAX = 1000


def curves_of(figures: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Per policy (capacity share, hit rate), from `replay_figures`."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for f in figures:
        curves.setdefault(f["policy"], []).append((f["capacity_share"], f["hit_rate"]))
    return curves


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it must be: a cut number is a wrong one, however narrow the
    terminal."""
    options = console.options.update(max_width=_WIDTH_MAX)
    before = console.width
    console.width = max(before, Measurement.get(console, options, table).maximum)
    console.print(table, crop=False, no_wrap=True)
    console.width = before


def show(trace: Trace, figures: list[dict[str, Any]]) -> None:
    """A row per replay; `figures` from `replay_figures`."""
    facts = trace_figures(trace)
    console = Console()
    console.print(
        f"{facts['name']}: {facts['requests']:,} requests, {facts['block_accesses']:,} block "
        f"accesses, {facts['unique_blocks']:,} unique blocks of {facts['block_tokens']} tokens, "
        f"unbounded cache {facts['unbounded_hit_rate']:.2%}"
    )
    places = [place for place in figures[0]["hits"] if place != "miss"]
    split = places if len(places) > 1 else []
    table = Table(Column("policy", no_wrap=True), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ("blocks", "hit %", *split, "miss", "asked", "evicted", "p50", "p99")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for f in figures:
        hits, seconds, blocks = f["hits"], f["ttft_s"], f["blocks"]
        shares = [f["hit_rate"], *(hits.get(p, 0) for p in split), hits["miss"]]
        table.add_row(
            f["policy"],
            f"{f['capacity_blocks']:,}",
            *(f"{share * 100:.1f}" for share in (*shares, f["request_hit_rate"])),
            _count(blocks["evicted"]),
            *(f"{seconds.get(q, 0):.2f}" for q in ("p50", "p99")),
        )
    cold = figures[0]["ttft_without_cache_s"]
    print_whole(console, table)
    console.print(
        f"hit, miss: % of tokens; asked: % of requests that hit; seconds to first token by model "
        f"{figures[0]['cost_model']}; without a cache p50 "
        f"{cold.get('p50', 0):.2f} s, p99 {cold.get('p99', 0):.2f} s"
    )


def _count(n: int) -> str:
    """Three or four digits."""
    if n < 10_000:
        return str(n)
    return f"{n / 1000:.0f}k" if n < 10_000_000 else f"{n / 1e6:.1f}M"


def show_measured(measured: dict[str, Any]) -> None:
    """What a live run measured; `measured` of `live_figures`."""
    fetch, put, counters = measured["fetch_s"], measured["put_s"], measured["counters"]
    n = measured["sessions"]
    sessions = "1 session" if n == 1 else f"{n} sessions"
    pace = f"{measured['speedup']:g} times as fast" if measured["speedup"] else "without waiting"
    print(
        f"{measured['seconds']:.1f} s, {sessions} at a time, {pace}; at most "
        f"{measured['late_s_max']:.2f} s late; {measured['wrong_blocks']} wrong blocks"
    )
    for what, took, rate in (
        ("fetching a hit", fetch, measured["fetch_bytes_per_s"]),
        ("putting the rest", put, measured["put_bytes_per_s"]),
    ):
        if took:
            print(
                f"{what}: p50 {took['p50'] * 1e3:.1f} ms, p99 {took['p99'] * 1e3:.1f} ms, "
                f"{rate / 1e9:.2f} GB/s"
            )
    ttft = measured["ttft_s"]
    print(
        f"to first token with the fetch as measured: p50 {ttft['p50']:.2f}, p99 {ttft['p99']:.2f}"
    )
    print("puts: " + ", ".join(f"{n} {name.lower()}" for name, n in measured["puts"].items()))
    if refused := counters.get("refused_ssd_blocks"):
        print(
            f"{refused} blocks kept out of an ssd full of blocks younger than ssd.lifetime_min_s, "
            "which the simulator does not do; lower that, or evict what is not needed"
        )
    if declined := measured["puts"].get("NO_SPACE"):
        behind = measured["puts"].get("PARENT_MISSING", 0)
        print(f"{declined} blocks found no room, and {behind} came behind such ones")
    print("store: " + ", ".join(f"{n} {name}" for name, n in counters.items()))
