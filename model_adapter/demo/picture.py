"""The picture: what each turn's prompt was made of, and what that did to its first token."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvstore import Tier
from model_adapter.demo.results import DemoResults

_COLOURS = {
    "no store": "#9aa0a6",
    "empty store": "#7fb3d5",
    "warm store": "#1f618d",
    "from SSD": "#1f618d",
    "from HBM": "#76d7c4",
    "from DRAM": "#7fb3d5",
    "from a snapshot": "#76b7a0",
    "computed": "#e59866",
    "replayed": "#b03a2e",
}
_INCHES = (11.0, 6.5)


def _ticks(axes: Axes, results: DemoResults) -> None:
    labels = [p.turn.label for p in results.plain]
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_ttft(axes: Axes, results: DemoResults) -> None:
    passes = (
        ("no store", results.plain),
        ("empty store", results.empty),
        ("warm store", results.warm),
    )
    for k, (name, played) in enumerate(passes):
        at = [i + (k - 1) * 0.28 for i in range(len(played))]
        heights = [p.report.ttft_s for p in played]
        axes.bar(at, heights, width=0.28, label=name, color=_COLOURS[name])
    axes.set_ylabel("time to first token (s)")
    axes.legend(frameon=False, ncols=3, loc="upper left")
    _ticks(axes, results)


def _draw_tokens(axes: Axes, results: DemoResults) -> None:
    step = results.layout.block_tokens
    reports = [p.report for p in results.warm]
    parts = {
        "from SSD": [r.hit_blocks.get(Tier.SSD, 0) * step for r in reports],
        "from DRAM": [r.hit_blocks.get(Tier.DRAM, 0) * step for r in reports],
        "from HBM": [r.hit_blocks.get(Tier.HBM, 0) * step for r in reports],
        "from a snapshot": [r.hit_tokens - sum(r.hit_blocks.values()) * step for r in reports],
        "computed": [r.prompt_tokens - r.hit_tokens for r in reports],
    }
    if not results.hbm:
        del parts["from HBM"]
    bottom = [0] * len(reports)
    for name, heights in parts.items():
        axes.bar(range(len(reports)), heights, 0.7, bottom, label=name, color=_COLOURS[name])
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    replayed = [r.replayed_tokens for r in reports]
    starts = [r.hit_tokens - n for r, n in zip(reports, replayed, strict=True)]
    axes.bar(
        range(len(reports)),
        replayed,
        0.7,
        starts,
        label="of these replayed",
        color="none",
        edgecolor=_COLOURS["replayed"],
        hatch="////",
        linewidth=0,
    )
    axes.set_ylabel("prompt tokens, warm store")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(frameon=False, ncols=5, loc="upper left")
    _ticks(axes, results)


def draw(results: DemoResults, path: Path) -> None:
    """Save the picture as PNG."""
    figure = Figure(_INCHES, layout="constrained")
    upper, lower = figure.subplots(2, 1)
    _draw_ttft(upper, results)
    _draw_tokens(lower, results)
    for axes in (upper, lower):
        axes.set_ylim(top=axes.get_ylim()[1] * 1.15)
    figure.suptitle(
        f"Agent sessions on the {results.preset} preset, turn by turn (session·turn)", fontsize=11
    )
    figure.savefig(path, dpi=130)
