"""`ds41f estimate`."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from model_adapter.config import ModelConfig
    from model_adapter.sizes import CacheEstimate, PartSize

_CONTEXTS_DEFAULT = (8 << 10, 32 << 10, 128 << 10, 1 << 20)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_MB = 1e6
_WIDTH_MIN = 120


def estimate(
    config: Annotated[Path, typer.Option(help="A config.json, or the directory that holds one.")],
    tokens: Annotated[
        list[str] | None,
        typer.Option(help="Context length; repeatable; K and M are 1024 and 1024²."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters by part, cache bytes per token and context, and what a prefill node hands over."""
    from model_adapter.config import ModelConfig
    from model_adapter.sizes import estimate as estimate_caches
    from model_adapter.sizes import part_sizes

    parsed = ModelConfig.load(config)
    lengths = _lengths(tokens, parsed.positions_max)
    contexts = [estimate_caches(parsed, n) for n in lengths]
    parts = part_sizes(parsed)
    if as_json:
        print(json.dumps(_as_json(parsed, parts, contexts, block_tokens), indent=2))
        return
    console = Console()
    console.width = max(console.width, _WIDTH_MIN)
    for table in (
        _parameter_table(parts),
        _record_table(parsed, block_tokens),
        _context_table(contexts),
    ):
        console.print(table)
        console.print()


def _lengths(tokens: list[str] | None, positions_max: int) -> list[int]:
    if tokens:
        return [_length(text) for text in tokens]
    return [n for n in _CONTEXTS_DEFAULT if n < positions_max] + [positions_max]


def _length(text: str) -> int:
    from model_adapter.errors import InputError

    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None:
        raise InputError(f"--tokens {text!r} is no context length; write 8192, 128K or 1M")
    return int(match[1]) * _UNITS[match[2]]


def _short(tokens: int) -> str:
    for unit in ("M", "K"):
        if tokens % _UNITS[unit] == 0:
            return f"{tokens // _UNITS[unit]}{unit}"
    return f"{tokens}"


def _parameter_table(parts: "list[PartSize]") -> Table:
    from model_adapter.sizes import Group, total

    table = Table(box=None, title="Parameters, in millions")
    table.add_column("")
    table.add_column("part")
    for column in ("parameters", "GB on disk", "active, prefill", "active, decode"):
        table.add_column(column, justify="right")
    for group in Group:
        mine = [p for p in parts if p.group is group]
        for i, p in enumerate([*mine, total(parts, group)] if mine else ()):
            table.add_row(
                "" if i else group.value,
                p.part,
                f"{p.parameters / 1e6:,.2f}",
                f"{p.disk_bytes / 1e9:,.3f}",
                *(f"{n / 1e6:,.2f}" if n else "–" for n in (p.active_prefill, p.active_decode)),
            )
    return table


def _record_table(config: "ModelConfig", block_tokens: int) -> Table:
    from model_adapter.sizes import block_bytes, global_bytes_per_token, record_sizes

    table = Table(
        box=None,
        title=f"Cache records; global KV {float(global_bytes_per_token(config)):,g} B/token, "
        f"{block_bytes(config, block_tokens):,} B per block of {block_tokens} tokens",
    )
    table.add_column("record")
    for column in ("bytes", "layers", "tokens per record", "tokens kept", "B/token"):
        table.add_column(column, justify="right")
    for r in record_sizes(config):
        kept = "all" if r.tokens_max is None else f"at most {r.tokens_max}"
        layers = ", ".join(map(str, r.layers)) if len(r.layers) <= 4 else f"{len(r.layers)} layers"
        per_token = f"{float(r.bytes_per_token):,g}" if r.bytes_per_token else "–"
        table.add_row(r.name, f"{r.record_bytes:,}", layers, f"{r.ratio}", kept, per_token)
    return table


def _context_table(contexts: "list[CacheEstimate]") -> Table:
    table = Table(box=None, title="One sequence, in MB; a prefill node hands over all of it")
    for column in ("tokens", "main", "index", "global", "windows", "DSpark", "pending", "handover"):
        table.add_column(column, justify="right")
    for c in contexts:
        windows = c.encoder_windows + c.decoder_windows
        sizes = (c.main, c.index, c.global_kv, windows, c.dspark_windows, c.pending)
        digits = 1 if c.beside_global >= _MB else 3
        handover = f"{c.global_kv / _MB:,.{digits}f} + {c.beside_global / _MB:,.{digits}f}"
        table.add_row(_short(c.tokens), *(f"{n / _MB:,.3f}" for n in sizes), handover)
    return table


def _as_json(
    config: "ModelConfig",
    parts: "list[PartSize]",
    contexts: "list[CacheEstimate]",
    block_tokens: int,
) -> dict[str, Any]:
    from model_adapter.sizes import block_bytes, global_bytes_per_token, record_sizes

    return {
        "parameters": [
            {
                "group": p.group.value,
                "part": p.part,
                "parameters": p.parameters,
                "disk_bytes": p.disk_bytes,
                "active_prefill": p.active_prefill,
                "active_decode": p.active_decode,
            }
            for p in parts
        ],
        "records": [
            {
                "record": r.name,
                "bytes": r.record_bytes,
                "layers": list(r.layers),
                "tokens_per_record": r.ratio,
                "tokens_kept_max": r.tokens_max,
                "bytes_per_token": float(r.bytes_per_token),
            }
            for r in record_sizes(config)
        ],
        "global_bytes_per_token": float(global_bytes_per_token(config)),
        "block": {"tokens": block_tokens, "bytes": block_bytes(config, block_tokens)},
        "contexts": [
            {
                "tokens": c.tokens,
                "main_bytes": c.main,
                "index_bytes": c.index,
                "global_bytes": c.global_kv,
                "encoder_window_bytes": c.encoder_windows,
                "decoder_window_bytes": c.decoder_windows,
                "dspark_window_bytes": c.dspark_windows,
                "pending_bytes": c.pending,
                "handover_bytes": c.handover,
            }
            for c in contexts
        ],
    }
