"""The tables."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from model_adapter.demo.results import DemoResults, Totals

_COLUMNS = (
    ("session", "left"),
    ("turn", "right"),
    ("tokens", "right"),
    ("TTFT no store", "right"),
    ("hit", "right"),
    ("TTFT", "right"),
    ("hit ", "right"),
    ("replayed", "right"),
    ("TTFT ", "right"),
    ("gain", "right"),
    ("fetched", "right"),
    ("from", "left"),
    ("equal", "center"),
)


def _seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.0f} ms"


def _kilobytes(b: int) -> str:
    return f"{b / 1e3:,.0f} kB" if b else "–"


def turn_table(results: DemoResults) -> Table:
    """A row per turn. The first hit and TTFT are the pass with an empty store, the second those
    after the restart."""
    table = Table(
        title="Each turn: without a store │ store empty at first │ store warm, daemon restarted",
        title_justify="left",
    )
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    for plain, empty, warm in zip(results.plain, results.empty, results.warm, strict=True):
        p, e, w = plain.report, empty.report, warm.report
        table.add_row(
            plain.turn.session,
            str(plain.turn.number),
            str(p.prompt_tokens),
            _seconds(p.ttft_s),
            str(e.hit_tokens),
            _seconds(e.ttft_s),
            str(w.hit_tokens),
            str(w.replayed_tokens),
            _seconds(w.ttft_s),
            f"÷ {p.ttft_s / w.ttft_s:.1f}",
            _kilobytes(w.fetched_bytes),
            w.tiers,
            "yes" if empty.equal and warm.equal else "NO",
        )
    return table


def total_table(results: DemoResults) -> Table:
    """A row per pass."""
    table = Table(title="In all", title_justify="left")
    for name in (
        "pass",
        "prompt tokens",
        "hit",
        "replayed",
        "encoder positions",
        "TTFT",
        "fetched",
        "stored",
        "blocks from",
    ):
        table.add_column(name, justify="left" if name in ("pass", "blocks from") else "right")
    names = {"no store": results.plain, "empty": results.empty, "warm": results.warm}
    for name, played in names.items():
        t = Totals.of(played)
        tiers = ", ".join(f"{str(k.name).lower()} {n}" for k, n in t.hit_blocks.items() if n)
        table.add_row(
            name,
            f"{t.prompt_tokens:,}",
            f"{t.hit_share:.1%}",
            f"{t.replayed_tokens:,}",
            f"{t.encoder_positions:,}",
            _seconds(t.ttft_s),
            _kilobytes(t.fetched_bytes),
            _kilobytes(t.stored_bytes),
            tiers or "–",
        )
    return table


def lookup_line(results: DemoResults) -> str:
    """What the restarted daemon's counters say of all keys that were looked up."""
    total = sum(results.lookup_blocks.values())
    parts = [f"{name} {n / total:.1%}" for name, n in results.lookup_blocks.items()]
    return f"the restarted daemon's lookups: {', '.join(parts)} of {total} blocks"


def report(results: DemoResults) -> Group:
    """Everything, the verdict last."""
    layout = results.layout
    notes = (
        f"{layout.bytes_per_token:g} B of global KV per token, blocks of {layout.block_tokens} "
        f"tokens = {layout.block_bytes:,} B; {lookup_line(results)}.\n"
        f"{results.same_as_plain} of {len(results.warm)} warm answers are also those of a full "
        f"prefill: a replay is approximate by design. {results.seconds:.0f} s."
    )
    style = "bold red" if results.problems else "bold green"
    verdict = Text(results.verdict, style=style)
    return Group(turn_table(results), total_table(results), Text(notes), verdict)
