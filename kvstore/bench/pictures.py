"""Pictures of replays. Needs matplotlib, which the `model` extra brings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.cost import CostModel
from kvstore.bench.report import attribution
from kvstore.bench.simulate import Replay
from kvstore.bench.sweep import OPTIMUM
from kvstore.errors import InvalidRequest

_SIZE_INCHES = (8.0, 5.0)
_DPI = 120


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InvalidRequest(
            "pictures need matplotlib: pip install 'ds41-kvstore[model]', or leave --png out"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")
    plt.close(figure)


def hit_rates(title: str, curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Hit rate over capacity. `curves`: per policy (share of the unique blocks, hit rate)."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    for name, points in curves.items():
        x, y = zip(*sorted(points), strict=True)
        look: dict[str, Any] = {"linewidth": 2.5} if name.startswith("gittins") else {}
        if name == OPTIMUM:
            look = {"color": "black", "linestyle": "--"}
        axes.plot(np.array(x) * 100, np.array(y) * 100, marker="o", label=name, **look)
    axes.set_xscale("log")
    ticks = sorted({x * 100 for points in curves.values() for x, _ in points})
    axes.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("capacity, % of the unique blocks")
    axes.set_ylabel("token hit rate, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(plt, figure, path)


def tiers_over_time(replay: Replay, path: Path) -> None:
    """Where the hits came from in the course of the trace."""
    plt = _pyplot()
    spans = attribution(replay)
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    dram, store = np.array(spans["dram"]) * 100, np.array(spans["store"]) * 100
    layers = [dram, store, 100 - dram - store]
    labels = ["dram", "ssd", "miss"] if replay.dram_capacity else ["", "store", "miss"]
    axes.stackplot(spans["request"], *layers, labels=labels, alpha=0.8)
    axes.set_xlabel("request")
    axes.set_ylabel("tokens, %")
    axes.set_ylim(0, 100)
    axes.set_title(f"{replay.trace.name}, {replay.policy}, {replay.capacity:,} blocks")
    axes.legend(loc="lower right")
    _save(plt, figure, path)


def ttft(replays: Sequence[Replay], cost: CostModel, path: Path) -> None:
    """Distribution of the time to first token by the cost model, without a cache and with."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    trace = replays[0].trace
    share = (np.arange(trace.requests) + 1) / trace.requests * 100
    cold = np.sort(trace.tokens / cost.prefill_tokens_per_s + cost.wait_s)
    axes.plot(cold, share, color="black", linestyle="--", label="without a cache")
    for replay in replays:
        label = f"{replay.policy}, {replay.capacity:,} blocks"
        axes.plot(np.sort(cost.ttft_s(replay)), share, label=label)
    axes.set_xscale("log")
    axes.set_xlabel(f"time to first token, s ({cost.name}, an idle machine)")
    axes.set_ylabel("requests, %")
    axes.set_title(trace.name)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(plt, figure, path)
