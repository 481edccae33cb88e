"""Readers of trace formats. `read` picks one by looking at the path.

| format | looks like | block |
|---|---|---|
| mooncake | JSONL: `timestamp` (ms), `input_length`, `hash_ids` (prefix-chained) | 512 tokens |
| ragpulse | a directory with `0_trace.jsonl` and the token-length tables | 128 tokens |
| lmcache | JSONL, or a directory of it: `timestamp` (µs), `input`, `session_id` | 128 tokens |
| weka | `.tar.zst`, directory or file of JSON sessions (`kvstore.bench.weka`) | 256 tokens |
| generic | JSONL, see `_generic` | as it says |

A request counts whole blocks of its prompt only, and answers add no blocks, as in the published
evaluations of these traces. Text is taken as one pseudo token per 4 bytes.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.trace import Request, Trace, build
from kvstore.bench.weka import Users, read_weka
from kvstore.errors import InvalidRequest
from kvstore.eviction import Outlook

Progress = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""

_PSEUDO_TOKEN_BYTES = 4
_MOONCAKE_BLOCK_TOKENS = 512
_SMALL_BLOCK_TOKENS = 128
_RAG_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_RAG_TABLES = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}


def read(path: Path, users: Users | None = None, progress: Progress = lambda share: None) -> Trace:
    """Read a trace in any of the module's formats.

    `users`: how the sessions of a weka trace are played. Raises `InvalidRequest` where the path is
    missing, the format unknown or a line can't be right.
    """
    if not path.exists():
        raise InvalidRequest(f"there is no trace at {path}")
    if path.is_dir() and (path / "0_trace.jsonl").exists():
        return build(f"{path.name}-128", _SMALL_BLOCK_TOKENS, _ragpulse(path))
    if path.name.endswith(".tar.zst") or _is_session(path):
        return read_weka(path, users or Users(), progress)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        return build(path.name, _SMALL_BLOCK_TOKENS, _lmcache(files))
    first = next(_lines(path), (0, {}))[1]
    if "hash_ids" in first:
        return build(path.stem, _MOONCAKE_BLOCK_TOKENS, _mooncake(path))
    if "input" in first:
        return build(path.stem, _SMALL_BLOCK_TOKENS, _lmcache([path]))
    if "time_s" in first:
        block_tokens = int(first.get("block_tokens", _SMALL_BLOCK_TOKENS))
        return build(path.stem, block_tokens, _generic(path, block_tokens))
    raise InvalidRequest(
        f"{path} is in no known format: its first line has the fields {sorted(first)}; "
        "see `kvstore bench replay --help`"
    )


def _is_session(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("*.json")) or any(path.glob("*/*.json"))
    return path.suffix == ".json"


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as e:
                raise InvalidRequest(f"{path}, line {number} is not JSON: {e}") from None
            if not isinstance(entry, dict):
                raise InvalidRequest(f"{path}, line {number} is not an object")
            yield number, entry


def _field(path: Path, line: int, entry: dict[str, Any], name: str) -> Any:
    try:
        return entry[name]
    except KeyError:
        raise InvalidRequest(f"{path}, line {line} has no field {name!r}") from None


def _mooncake(path: Path) -> Iterator[Request]:
    for line, entry in _lines(path):
        yield Request(
            time_s=_field(path, line, entry, "timestamp") / 1000,
            keys=_field(path, line, entry, "hash_ids"),
            tokens=int(entry.get("input_length", 0)),
        )


def _lmcache(files: list[Path]) -> Iterator[Request]:
    calls = [
        (_field(f, line, e, "timestamp") / 1e6, _field(f, line, e, "input"), e.get("session_id"))
        for f in files
        for line, e in _lines(f)
    ]
    calls.sort(key=lambda call: call[0])
    for time_s, text, session in calls:
        prompt = text.encode()
        yield Request(
            time_s=time_s - calls[0][0],
            keys=_chained(prompt, _SMALL_BLOCK_TOKENS * _PSEUDO_TOKEN_BYTES),
            tokens=len(prompt) // _PSEUDO_TOKEN_BYTES,
            session=str(session),
        )


def _chained(content: bytes, block_bytes: int) -> list[bytes]:
    keys, above = [], b""
    for at in range(0, len(content) - block_bytes + 1, block_bytes):
        above = sha256(above + content[at : at + block_bytes]).digest()[:16]
        keys.append(above)
    return keys


def _ragpulse(path: Path) -> Iterator[Request]:
    tokens_of = {
        entry[key]: int(entry["token_length"])
        for table, key in _RAG_TABLES.items()
        for _, entry in _lines(path / table)
    }
    trace = path / "0_trace.jsonl"
    # a few lines are out of order by some seconds
    for line, entry in sorted(_lines(trace), key=lambda one: float(one[1].get("timestamp", 0))):
        parts = _field(trace, line, entry, "hash_ids")
        ids = [i for part in _RAG_PARTS for i in parts.get(part, [])]
        ends = np.cumsum([tokens_of[i] for i in ids])
        yield Request(
            time_s=float(_field(trace, line, entry, "timestamp")),
            keys=_chained_parts(ids, ends),
            tokens=int(ends[-1]) if len(ids) else 0,
            session=str(entry.get("session_id", "")),
        )


def _chained_parts(ids: list[int], ends: Any) -> list[bytes]:
    """A block is named by the block before it and the parts that it touches; parts start at the
    same place wherever the blocks before are equal."""
    keys, above = [], b""
    whole = int(ends[-1]) // _SMALL_BLOCK_TOKENS if len(ids) else 0
    edges = np.arange(whole + 1) * _SMALL_BLOCK_TOKENS
    first = np.searchsorted(ends, edges[:-1], side="right")
    last = np.searchsorted(ends, edges[1:] - 1, side="right")
    for a, b in zip(first.tolist(), last.tolist(), strict=True):
        above = sha256(above + np.array(ids[a : b + 1], "<i8").tobytes()).digest()[:16]
        keys.append(above)
    return keys


def _generic(path: Path, block_tokens: int) -> Iterator[Request]:
    """One request per line, in order of `time_s` (seconds): `blocks` (prefix-chained ids of whole
    blocks), or `tokens` (ids; cut into blocks here), or `text`; on the first line `block_tokens`.
    Optional: `session`, `prompt_tokens`, `answer_s`, `next` (`tool_call`, `user_turn`,
    `end_of_session`)."""
    for line, entry in _lines(path):
        if "blocks" in entry:
            keys, tokens = entry["blocks"], len(entry["blocks"]) * block_tokens
        elif "tokens" in entry:
            raw = np.array(entry["tokens"], "<u4").tobytes()
            keys, tokens = _chained(raw, block_tokens * 4), len(entry["tokens"])
        elif "text" in entry:
            raw = str(entry["text"]).encode()
            keys = _chained(raw, block_tokens * _PSEUDO_TOKEN_BYTES)
            tokens = len(raw) // _PSEUDO_TOKEN_BYTES
        else:
            raise InvalidRequest(f"{path}, line {line} has none of: blocks, tokens, text")
        yield Request(
            time_s=float(_field(path, line, entry, "time_s")),
            keys=keys,
            tokens=int(entry.get("prompt_tokens", tokens)),
            session=str(entry.get("session", "")),
            answer_s=float(entry.get("answer_s", 0)),
            outlook=_outlook(path, line, entry.get("next")),
        )


def _outlook(path: Path, line: int, name: str | None) -> Outlook:
    if name is None:
        return Outlook.UNKNOWN
    try:
        return Outlook[name.upper()]
    except KeyError:
        names = ", ".join(o.name.lower() for o in Outlook)
        raise InvalidRequest(f"{path}, line {line}: next is {name!r}, not one of {names}") from None
