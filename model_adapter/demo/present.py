"""The tables."""

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvstore import Tier
from model_adapter.demo.results import DemoResults, Totals

WIDTH_MIN = 112
"""Columns that the tables need."""
HBM_WIDTH = 6
"""Columns that HBM adds to them."""


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(columns[0], no_wrap=True, vertical="bottom")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _count(n: float) -> str:
    return f"{n:,.0f}" if n else "–"


def turn_table(results: DemoResults) -> Table:
    """A row per turn, the three passes side by side; times in milliseconds."""
    table = _table(
        "Each turn: without a store │ with an empty one │ with a warm one, its daemon restarted",
        "session\n·turn",
        "prompt\ntokens",
        "no store\nTTFT ms",
        "empty:\nhit",
        "\nTTFT ms",
        "warm:\nhit",
        "\nreplayed",
        "\nTTFT ms",
        "\ngain",
        "fetched\nkB",
        "blocks\nssd",
        "\ndram",
        *(["\nhbm"] if results.hbm else []),
        "\nequal",
    )
    for plain, empty, warm in zip(results.plain, results.empty, results.warm, strict=True):
        p, e, w = plain.report, empty.report, warm.report
        table.add_row(
            plain.turn.label,
            _count(p.prompt_tokens),
            _count(p.ttft_s * 1e3),
            _count(e.hit_tokens),
            _count(e.ttft_s * 1e3),
            _count(w.hit_tokens),
            _count(w.replayed_tokens),
            _count(w.ttft_s * 1e3),
            f"÷ {p.ttft_s / w.ttft_s:.1f}",
            _count((w.fetched_bytes + w.snapshot_bytes) / 1e3),
            _count(w.hit_blocks.get(Tier.SSD, 0)),
            _count(w.hit_blocks.get(Tier.DRAM, 0)),
            *([_count(w.hit_blocks.get(Tier.HBM, 0))] if results.hbm else []),
            "yes" if empty.equal and warm.equal else "NO",
        )
    return table


def total_table(results: DemoResults) -> Table:
    """A row per pass."""
    table = _table(
        "In all",
        "pass",
        "prompt\ntokens",
        "hit",
        "turns\nresumed",
        "replayed",
        "encoder\npositions",
        "TTFT s",
        "fetched\nkB",
        "stored\nkB",
        "blocks\nssd",
        "\ndram",
        *(["\nhbm"] if results.hbm else []),
    )
    names = {"no store": results.plain, "empty": results.empty, "warm": results.warm}
    for name, played in names.items():
        t = Totals.of(played)
        table.add_row(
            name,
            _count(t.prompt_tokens),
            f"{t.hit_share:.1%}",
            _count(t.resumed_turns),
            _count(t.replayed_tokens),
            _count(t.encoder_positions),
            f"{t.ttft_s:.1f}",
            _count(t.fetched_bytes / 1e3),
            _count(t.stored_bytes / 1e3),
            _count(t.hit_blocks[Tier.SSD]),
            _count(t.hit_blocks[Tier.DRAM]),
            *([_count(t.hit_blocks[Tier.HBM])] if results.hbm else []),
        )
    return table


def _lookups(results: DemoResults) -> str:
    total = sum(results.lookup_blocks.values())
    parts = [f"{name} {n / total:.1%}" for name, n in results.lookup_blocks.items() if n]
    return f"{total} blocks looked up after the restart: {', '.join(parts)}"


def report(results: DemoResults) -> Group:
    """Both tables and what they do not say."""
    layout = results.layout
    notes = (
        f"{layout.bytes_per_token:g} B of global KV per token, {layout.block_bytes:,} B per block "
        f"of {layout.block_tokens} tokens. {_lookups(results)}.\n"
        f"{results.same_as_plain} of {len(results.warm)} warm answers are also those of a full "
        f"prefill, which a replay approximates. "
        f"{Totals.of(results.empty).resumed_turns} turns of the pass with an empty store went on "
        "at a window snapshot, with nothing replayed; snapshots do not outlive the daemon. "
        f"{results.seconds:.0f} s in all."
    )
    if results.hbm:
        notes += f"\nThe store's device memory: {results.hbm}."
    return Group(turn_table(results), total_table(results), Text(notes), Text())


def print_report(results: DemoResults, console: Console) -> None:
    """The tables, then the verdict on a line of its own, however long."""
    console.print(report(results))
    style = "bold red" if results.problems else "bold green"
    console.print(Text(results.verdict, style=style), soft_wrap=True)
