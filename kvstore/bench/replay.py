"""`kvstore bench replay`: a trace against policies, in the simulator."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from kvstore.bench import pictures
from kvstore.bench.cost import PRESETS
from kvstore.bench.read import read
from kvstore.bench.report import attribution, replay_figures, trace_figures
from kvstore.bench.sweep import CLASSICS, DEFAULT_SHARES, OPTIMUM, blocks_of, maker, sweep
from kvstore.bench.trace import Trace, with_one_offs
from kvstore.bench.weka import Users


class Preset(StrEnum):
    """Cost models by name."""

    H100 = "h100"
    GB300 = "gb300"


_ALL = (*CLASSICS, "gittins", OPTIMUM)


def replay(
    trace: Annotated[Path, typer.Argument(help="mooncake, ragpulse, lmcache, weka or generic")],
    policy: Annotated[
        list[str] | None, typer.Option(help="a policy, 'optimum', or all by default; +hints")
    ] = None,
    capacity: Annotated[
        list[float] | None, typer.Option(help="below 1: share of the unique blocks; else blocks")
    ] = None,
    dram: Annotated[float, typer.Option(help="DRAM's share of the capacity", min=0, max=1)] = 0,
    users: Annotated[int, typer.Option(help="weka: sessions at a time", min=1)] = 50,
    think_max: Annotated[float, typer.Option(help="weka: cut idle seconds; 0: as recorded")] = 60,
    one_offs: Annotated[
        float, typer.Option(help="mix in unrepeated prompts: share", min=0, max=0.9)
    ] = 0,
    seed: Annotated[int, typer.Option(help="of the sessions' order and the one-offs")] = 0,
    cost: Annotated[Preset, typer.Option(help="whose prefill the times come from")] = (Preset.H100),
    prefill: Annotated[float, typer.Option(help="measured prefill tokens/s instead")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    png: Annotated[Path | None, typer.Option(help="folder for pictures")] = None,
) -> None:
    """Replay a request trace against eviction policies: no bytes, any capacity.

    Hit rates are of whole blocks' tokens. Times to first token come from the cost model alone.
    """
    model = PRESETS[cost.value]
    if prefill > 0:
        model = model.with_rate(prefill)
    names = list(policy or _ALL)
    capacities = list(capacity or DEFAULT_SHARES)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        loaded = _load(bar, trace, Users(users, think_max or None, seed=seed))
        if one_offs:
            loaded = with_one_offs(loaded, one_offs, seed)
        for name in names:
            maker(name, loaded)
        for one in capacities:
            blocks_of(one, loaded)
        task = bar.add_task("", total=len(names) * len(capacities))

        def tell(what: str, runs: float) -> None:
            bar.update(task, description=what, completed=runs)

        done = list(sweep(loaded, names, capacities, dram, tell))
    figures = [replay_figures(r, model) for r in done]
    if as_json:
        times = [attribution(r) for r in done]
        print(json.dumps({"trace": trace_figures(loaded), "replays": figures, "over_time": times}))
    else:
        _print(loaded, figures)
    if png:
        curves = curves_of(figures)
        pictures.hit_rates(loaded.name, curves, png / "hit_rates.png")
        pictures.tiers_over_time(done[-1], png / "tiers_over_time.png")
        pictures.ttft([r for r in done if r.capacity == done[0].capacity], model, png / "ttft.png")


def curves_of(figures: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Per policy (capacity share, hit rate), from `replay_figures`."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for f in figures:
        curves.setdefault(f["policy"], []).append((f["capacity_share"], f["hit_rate"]))
    return curves


def _load(bar: Progress, path: Path, users: Users) -> Trace:
    task = bar.add_task(f"reading {path.name}", total=1.0)
    loaded = read(path, users, lambda share: bar.update(task, completed=share))
    bar.remove_task(task)
    return loaded


def _print(trace: Trace, figures: list[dict[str, Any]]) -> None:
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
    console.print(table)
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
