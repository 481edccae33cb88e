"""Writes what `bench_ssd --json` measured into a page: `python -m benchmarks.ssd.table JSON PAGE`.

The page has a line `<!-- bench_ssd -->` before and `<!-- /bench_ssd -->` behind the tables.
"""

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench_ssd -->", "<!-- /bench_ssd -->"


def _lines(header: str, rows: list[list[str]]) -> list[str]:
    columns = header.split("|")
    out = [header, "|".join(["---"] * len(columns)), *("|".join(row) for row in rows)]
    return [f"|{line}|" for line in out] + [""]


def _gb_s(figures: dict[str, Any]) -> str:
    return f"{figures['gb_s']:.2f}"


def _row(row: dict[str, Any]) -> list[str]:
    ratios = row.get("ratios", {})

    def beside(name: str) -> str:
        return f"({ratios[name]:.2f})" if name in ratios else ""

    return [
        f" {row['shape']} ",
        f" {row['clients']} ",
        f" {_gb_s(row['read'])} {beside('read')} ",
        f" {beside('read_p99').strip('()')} ",
        f" {_gb_s(row['prefix'])} {beside('prefix')} ",
        f" {_gb_s(row['write'])} {beside('write')} ",
        f" {beside('durable')} ",
    ]


def _other(row: dict[str, Any]) -> list[str]:
    peer = row.get("lmcache", {})
    load = peer.get("load_gb_s")
    ratio = ""
    if load:
        prefix, scattered = (row[name]["gb_s"] / load for name in ("prefix", "scattered"))
        ratio = f"{prefix:.2f} (scattered {scattered:.2f})"
    return [
        f" {row['shape']} ",
        " " + ", ".join(_gb_s(row[name]) for name in ("write", "scattered", "prefix")) + " ",
        f" {_gb_s(row['lmdb_write'])}, {_gb_s(row['lmdb_read'])} ",
        f" {_gb_s(row['files_write'])}, {_gb_s(row['files_read'])} ",
        f" {peer['store_gb_s']:.2f}, {load:.2f} " if load else " not measured ",
        f" {ratio} ",
    ]


def tables(report: dict[str, Any]) -> list[str]:
    """The report as Markdown."""
    before, after = (round(report[name][0], 1) for name in ("load_before", "load_after"))
    out = [
        f"{report['cpus']} cores, load average {before} before and {after} after; medians of "
        f"{report['rounds']} rounds. GB/s of payload, ratio to fio in brackets.",
        "",
    ]
    out += _lines(
        " object | clients | scattered reads | p99, × fio's | prefix reads "
        "| durable writes, to fio unsynced | to fio synced ",
        [_row(row) for row in report["rows"]],
    )
    out += ["Beside it, one client, GB/s.", ""]
    out += _lines(
        " object | ours: write, scattered, prefix | LMDB write, read "
        "| file per object: write, read | LMCache store, load | our prefix read ÷ LMCache's load ",
        [_other(row) for row in report["others"]],
    )
    if report["daemon"]:
        d = report["daemon"]
        out += [
            f"Through the daemon, one client, {d['blocks']} blocks a call: durable put "
            f"{_gb_s(d['daemon_write'])} GB/s, read of what only the SSD holds "
            f"{_gb_s(d['daemon_read'])}; the library beside it {_gb_s(d['write'])} and "
            f"{_gb_s(d['prefix'])}.",
        ]
    return out


def main() -> int:
    """Replace what lies between the marks."""
    results, page = map(Path, sys.argv[1:])
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    body = "\n".join(tables(json.loads(results.read_text(encoding="utf-8"))))
    page.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
