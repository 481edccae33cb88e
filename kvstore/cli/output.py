"""How the commands print what they found: tables for people, JSON for programs."""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.bench.show import print_whole
from kvstore.block import PutOutcome, Tier, TierCost
from kvstore.store.types import BlockInfo, Stat, TierStat, VerifyReport

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FOUND = {
    "hit_hbm": "hit in hbm",
    "hit_dram": "hit in dram",
    "hit_ssd": "hit on ssd",
    "pending": "pending",
    "miss": "miss",
}
_WINDOWS = {
    "hit": "hits",
    "miss": "misses",
    "expired": "expired",
    "evicted": "evicted",
    "refused": "refused",
}
_ID_CHARS = 16
UNBOUNDED_BYTES = 1 << 60
"""A budget that says: whatever is there. Looking at a directory must never evict from it."""


def tier_name(tier: Tier) -> str:
    """`dram`, `dram+ssd`, or `-` for none."""
    return "+".join(str(t.name).lower() for t in Tier if t in tier and t) or "-"


def human_bytes(n: float) -> str:
    """Bytes with a unit, three digits."""
    for unit in _UNITS:
        if n < 1024 or unit == _UNITS[-1]:
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"


def shares_percent(counts: dict[str, int]) -> dict[str, float]:
    """Each count's share of all, with one decimal, so rounded that the shares sum to 100 %.

    All zero where nothing was counted.
    """
    total = sum(counts.values())
    if not total:
        return dict.fromkeys(counts, 0.0)
    tenths = {name: n * 1000 // total for name, n in counts.items()}
    by_remainder = sorted(counts, key=lambda name: counts[name] * 1000 % total, reverse=True)
    for name in by_remainder[: 1000 - sum(tenths.values())]:
        tenths[name] += 1
    return {name: n / 10 for name, n in tenths.items()}


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2))


def _tier_json(t: TierStat) -> dict[str, Any]:
    measured = asdict(t.cost) if _measured(t.cost) else None
    return {**{k: v for k, v in asdict(t).items() if k != "tier"}, "cost": measured}


def stat_json(stat: Stat) -> dict[str, Any]:
    """`Stat` with tiers by name, null for a cost not yet measured, and the lookups' shares."""
    tiers = {tier_name(t.tier): _tier_json(t) for t in stat.tiers}
    shares = shares_percent(stat.lookup_blocks)
    return {**asdict(stat), "tiers": tiers, "lookup_percent": shares}


def info_json(info: BlockInfo) -> dict[str, Any]:
    """`BlockInfo` with digests in hex."""
    digests = {name: getattr(info, name).hex() for name in ("key", "namespace_id", "parent")}
    return {**asdict(info), **digests, "residency": tier_name(info.residency)}


def report_json(report: VerifyReport) -> dict[str, Any]:
    """`VerifyReport` with tiers by name and keys in hex."""
    return {
        "clean": report.clean,
        "frames": {tier_name(t): n for t, n in report.frames.items()},
        "payload_bytes": {tier_name(t): n for t, n in report.payload_bytes.items()},
        "corrupt": [key.hex() for key in report.corrupt],
        "unreadable": report.unreadable,
    }


def _ordered(counts: Collection[str], order: Iterable[str]) -> list[str]:
    known = [name for name in order if name in counts]
    return known + sorted(set(counts) - set(known))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table


def _measured(cost: TierCost) -> bool:
    return math.isfinite(cost.bytes_per_s)


def _cost(cost: TierCost) -> str:
    if not _measured(cost):
        return "not measured"
    said = "" if cost.measured else ", assumed"
    return f"{cost.bytes_per_s / 1e9:.2f} GB/s + {cost.latency_s * 1e6:.0f} µs{said}"


def counted(n: int, what: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _print_tiers(console: Console, stat: Stat, stopped: bool) -> None:
    table = _table("tier", "blocks", "payload", "used", "budget", "full", "read", "state")
    for t in stat.tiers:
        bounded = 0 < t.budget_bytes < UNBOUNDED_BYTES and not stopped
        table.add_row(
            tier_name(t.tier),
            f"{t.objects:,}",
            human_bytes(t.payload_bytes),
            human_bytes(t.used_bytes),
            human_bytes(t.budget_bytes) if bounded else "–",
            f"{100 * t.used_bytes / t.budget_bytes:.1f} %" if bounded else "–",
            _cost(t.cost),
            "–" if stopped else "accepting" if t.accepting else "refusing",
        )
    print_whole(console, table)
    for t in stat.tiers:
        if not t.accepting:
            why = t.refuses_why or "the daemon's log says why"
            console.print(f"{tier_name(t.tier)} refuses new blocks: {why}")
        if t.tier is Tier.SSD and t.used_bytes:
            _print_log(console, t, stopped)


def _print_log(console: Console, t: TierStat, stopped: bool) -> None:
    rest = human_bytes(max(0, t.used_bytes - t.live_bytes))
    console.print(
        f"ssd: {human_bytes(t.live_bytes)} in use by blocks; {rest} index, segments begun, and "
        "dead frames, reclaimed when room is needed"
    )
    if not stopped:
        console.print(
            "ssd: of the budget, two segments (ssd.segment_bytes) are kept for compaction and for "
            "writing: less than 100 % is full"
        )


def _print_lookups(console: Console, stat: Stat) -> None:
    table = _table("lookups", "keys", "share")
    shares = shares_percent(stat.lookup_blocks)
    for name in _ordered(stat.lookup_blocks, _FOUND):
        n = stat.lookup_blocks[name]
        table.add_row(_FOUND.get(name, name), f"{n:,}", f"{shares[name]:.1f} %")
    table.add_row("all", f"{sum(stat.lookup_blocks.values()):,}", f"{sum(shares.values()):.1f} %")
    console.print(table)


def print_stat(console: Console, stat: Stat, stopped: bool = False) -> None:
    """Tiers, lookups, puts, the rest, and what went wrong. `stopped`: of a store that only this
    process has open, whose budgets and devices say nothing of the daemon's."""
    _print_tiers(console, stat, stopped)
    console.print()
    _print_lookups(console, stat)
    console.print()
    puts = _table("puts", "blocks")
    for name in _ordered(stat.puts, (o.name.lower() for o in PutOutcome)):
        puts.add_row(name.replace("_", " "), f"{stat.puts[name]:,}")
    console.print(puts)
    console.print(
        f"\n{counted(stat.blocks, 'block')} in {counted(stat.namespaces, 'namespace')}; "
        f"{counted(stat.leases, 'lease')} and calls pin {counted(stat.pinned_blocks, 'block')}; "
        f"{counted(stat.reservations, 'reservation')}; "
        f"{counted(stat.dirty_blocks, 'block')} not on ssd yet "
        f"({human_bytes(stat.write_back_bytes)})"
    )
    _print_windows(console, stat)
    if (amplification := stat.write_amplification) is not None:
        console.print(f"the ssd wrote {amplification:.2f} bytes of frames per byte that it took in")
    if declined := stat.counters.get("declined_ssd_blocks"):
        console.print(f"{declined:,} blocks kept out of a full ssd whose blocks are worth more")
    if stat.evicted_ssd_age_s_min is not None:
        age = f"{stat.evicted_ssd_age_s_min:,.0f} s"
        console.print(f"the youngest block that left the ssd for room was {age} old")
    if refused := stat.counters.get("refused_ssd_blocks"):
        console.print(f"{refused:,} blocks kept out of an ssd full of blocks too young to go")
    for note in () if stopped else stat.notes:
        console.print(note, soft_wrap=True)
    wrong = {k: n for k, n in stat.counters.items() if n and k.startswith(("corrupt", "disk_"))}
    for name, n in wrong.items():
        console.print(f"[red]{name.replace('_', ' ')}: {n:,}[/red]")


def _print_windows(console: Console, stat: Stat) -> None:
    w = stat.windows
    counts = ", ".join(
        f"{stat.counters.get(f'windows_{name}', 0):,} {word}" for name, word in _WINDOWS.items()
    )
    console.print(
        f"{w.objects:,} window snapshots and hand-over records take {human_bytes(w.used_bytes)} of "
        f"{human_bytes(w.budget_bytes)}; {counts}"
    )


def print_ls(console: Console, blocks: Sequence[BlockInfo], limit: int) -> None:
    """One line per block."""
    table = _table("key", "namespace", "depth", "tiers", "payload", "pins", "dirty", "age")
    for b in blocks:
        table.add_row(
            b.key.hex(),
            b.namespace_id.hex()[:_ID_CHARS],
            str(b.depth),
            tier_name(b.residency),
            human_bytes(b.payload_bytes),
            str(b.pins),
            "yes" if b.dirty else "no",
            f"{b.age_s:.0f} s",
        )
    print_whole(console, table)
    if len(blocks) == limit:
        console.print(f"perhaps more; go on with --after {blocks[-1].key.hex()}", soft_wrap=True)


def print_report(console: Console, report: VerifyReport) -> None:
    """What was checked, and what was wrong."""
    for tier, frames in report.frames.items():
        size = human_bytes(report.payload_bytes.get(tier, 0))
        console.print(f"{tier_name(tier)}: {frames:,} frames, {size} checked")
    for key in report.corrupt:
        console.print(f"[red]corrupt, quarantined: {key.hex()}[/red]", soft_wrap=True)
    if report.unreadable:
        console.print(f"[red]{report.unreadable:,} frames could not be read[/red]")
    if report.clean:
        console.print("everything is as it was written")
