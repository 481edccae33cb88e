"""The resident memory of processes over time, and whether it grows."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("anon", "shmem")
SHARED = "arena and staging areas"
"""Of all processes together: whose share of a page is how large says nothing."""


def resident_bytes(pid: int) -> dict[str, int]:
    """Of a process, by kind: `anon` (its own), `shmem` (its share of what it has in common with
    others). All 0 for one that is gone.

    A page that several mappings show counts as a share of each (PSS): the sum over processes is
    what the machine gives, however many clients map the arena.
    """
    sizes = dict.fromkeys(KINDS, 0)
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return sizes
    for line in lines:
        name, _, value = line.partition(":")
        kind = name.removeprefix("Pss_").lower()
        if name.startswith("Pss_") and kind in sizes:
            sizes[kind] = int(value.split()[0]) << 10
    return sizes


@dataclass
class MemoryCurve:
    """Samples of some processes until `stop`: each group's own memory, and what all share. `pids`:
    by the group's name. `at_s`: since the start."""

    pids: Callable[[], dict[str, list[int]]]
    step_s: float
    at_s: list[float] = field(default_factory=list)
    bytes_of: dict[str, list[int]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Sample on a thread of its own."""
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(self.step_s)

    def _sample(self) -> None:
        self.at_s.append(time.monotonic() - self._started_s)
        sums: dict[str, int] = {SHARED: 0}
        for name, pids in self.pids().items():
            sums[name] = 0
            for pid in pids:
                sizes = resident_bytes(pid)
                sums[name] += sizes["anon"]
                sums[SHARED] += sizes["shmem"]
        for name, size in sums.items():
            self.bytes_of.setdefault(name, []).append(size)

    def stop(self) -> None:
        """The last sample is taken."""
        self._stop.set()
        self._thread.join()

    def growth(self, name: str) -> dict[str, float]:
        """Between the second quarter, when everything is warm, and the last: medians, and the slope
        from the second quarter on."""
        curve, n = np.array(self.bytes_of[name], float), len(self.at_s)
        warm, last = curve[n // 4 : max(n // 2, n // 4 + 1)], curve[n - max(1, n // 4) :]
        at_min = np.array(self.at_s[n // 4 :]) / 60
        slope = float(np.polyfit(at_min, curve[n // 4 :], 1)[0]) if len(at_min) > 1 else 0.0
        return {
            "warm_mib": float(np.median(warm)) / (1 << 20),
            "last_mib": float(np.median(last)) / (1 << 20),
            "mib_per_minute": slope / (1 << 20),
        }

    def draw(self, path: Path, title: str, budgets: Sequence[tuple[str, int]]) -> None:
        """The curves as a picture; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8.0, 4.5))
        minutes = np.array(self.at_s) / 60
        for name, curve in self.bytes_of.items():
            axes.plot(minutes, np.array(curve[: len(minutes)]) / (1 << 20), label=name)
        for name, size in budgets:
            axes.axhline(size / (1 << 20), linestyle=":", color="gray")
            axes.annotate(name, (0, size / (1 << 20)), fontsize="small", color="gray")
        axes.set_xlabel("minutes")
        axes.set_ylabel("resident memory, MiB")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)

    def as_json(self) -> dict[str, Any]:
        """Samples and growth."""
        return {
            "at_s": [round(s, 2) for s in self.at_s],
            "bytes": self.bytes_of,
            "growth": {name: self.growth(name) for name in self.bytes_of},
        }
