"""The demo's outcome: three passes over the same turns, their totals and the verdict."""

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore import Layout, Tier
from model_adapter.demo.play import Played
from model_adapter.session import SnapshotOutcome


@dataclass(frozen=True, slots=True)
class Totals:
    """One pass, all turns together. `resumed_turns`: those that went on from a window snapshot,
    with nothing replayed. `fetched_bytes`: snapshots included."""

    prompt_tokens: int
    hit_tokens: int
    resumed_turns: int
    replayed_tokens: int
    encoder_positions: int
    ttft_s: float
    fetched_bytes: int
    stored_bytes: int
    hit_blocks: Counter[Tier]

    @classmethod
    def of(cls, played: Sequence[Played]) -> "Totals":
        """Sum a pass up."""
        reports = [p.report for p in played]
        blocks: Counter[Tier] = Counter()
        for r in reports:
            blocks.update(r.hit_blocks)
        return cls(
            prompt_tokens=sum(r.prompt_tokens for r in reports),
            hit_tokens=sum(r.hit_tokens for r in reports),
            resumed_turns=sum(r.snapshot is SnapshotOutcome.HIT for r in reports),
            replayed_tokens=sum(r.replayed_tokens for r in reports),
            encoder_positions=sum(r.encoder_positions for r in reports),
            ttft_s=sum(r.ttft_s for r in reports),
            fetched_bytes=sum(r.fetched_bytes + r.snapshot_bytes for r in reports),
            stored_bytes=sum(r.stored_bytes for r in reports),
            hit_blocks=blocks,
        )

    @property
    def hit_share(self) -> float:
        """Tokens hit, of all prompt tokens."""
        return self.hit_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class DemoResults:
    """`plain`: without a store. `empty`: with one that was empty at first. `warm`: with the same
    store after its daemon was stopped and started again. Entry i of each is the same turn. `hbm`:
    what the store's HBM tier was on, empty without one."""

    preset: str
    layout: Layout
    plain: list[Played]
    empty: list[Played]
    warm: list[Played]
    lookup_blocks: dict[str, int]
    seconds: float
    hbm: str = ""

    @property
    def problems(self) -> list[str]:
        """Everything that did not go as it must."""
        found = []
        for name, played in (("empty", self.empty), ("warm", self.warm)):
            for p in played:
                at = f"{name} pass, turn {p.turn.label}"
                if not p.equal:
                    found.append(f"{at}: the answer differs from the same replay without a store")
                if p.report.store_error:
                    found.append(f"{at}: {p.report.store_error}")
                if p.report.refused_blocks:
                    found.append(f"{at}: {p.report.refused_blocks} blocks refused")
        if not Totals.of(self.warm).hit_blocks[Tier.SSD]:
            found.append("warm pass: nothing came from SSD after the restart")
        if self.hbm and not Totals.of(self.warm).hit_blocks[Tier.HBM]:
            found.append(f"warm pass: nothing came from HBM ({self.hbm})")
        return found

    @property
    def same_as_plain(self) -> int:
        """Warm answers that are also those of a full prefill. A replay is approximate by design
        (ds41f §5), so this need not be all of them."""
        pairs = zip(self.plain, self.warm, strict=True)
        return sum(p.token_ids == w.token_ids for p, w in pairs)

    @property
    def verdict(self) -> str:
        """One line."""
        if problems := self.problems:
            return f"FAILED: {problems[0]}" + (
                f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            )
        plain, warm = Totals.of(self.plain), Totals.of(self.warm)
        return (
            f"PASSED: {warm.hit_share:.0%} of the prompt tokens came from the restarted store, "
            f"time to first token ÷ {plain.ttft_s / warm.ttft_s:.1f} ({plain.ttft_s:.1f} s → "
            f"{warm.ttft_s:.1f} s), every answer equal to the same replay without a store."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        passes = {"plain": self.plain, "empty": self.empty, "warm": self.warm}
        return {
            "preset": self.preset,
            "block_tokens": self.layout.block_tokens,
            "block_bytes": self.layout.block_bytes,
            "bytes_per_token": self.layout.bytes_per_token,
            "machine": {
                "cpus": os.cpu_count(),
                "arch": platform.machine(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torch_threads": torch.get_num_threads(),
            },
            "passes": {name: [_turn_json(p) for p in played] for name, played in passes.items()},
            "lookup_blocks_after_restart": self.lookup_blocks,
            "same_as_plain": self.same_as_plain,
            "hbm": self.hbm,
            "seconds": self.seconds,
            "problems": self.problems,
            "verdict": self.verdict,
        }

    def save(self, path: Path) -> None:
        """Write `to_json`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _turn_json(p: Played) -> dict[str, Any]:
    return {
        "session": p.turn.session,
        "turn": p.turn.number,
        "equal": p.equal,
        "token_ids": p.token_ids,
    } | p.report.to_json()
