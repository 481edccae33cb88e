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

from kvstore.bench.fields import Fields
from kvstore.bench.trace import Request, Trace, build
from kvstore.bench.weka import Users, read_weka
from kvstore.errors import InvalidRequest
from kvstore.eviction import Outlook

Progress = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""

_PSEUDO_TOKEN_BYTES = 4
_MOONCAKE_BLOCK_TOKENS = 512
_SMALL_BLOCK_TOKENS = 128
_TOKEN_ID_MAX = (1 << 32) - 1
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
        head = Fields(f"{path}, its first line", first)
        block_tokens = head.tokens("block_tokens", _SMALL_BLOCK_TOKENS, least=1)
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


def _entries(path: Path) -> Iterator[Fields]:
    for number, entry in _lines(path):
        yield Fields(f"{path}, line {number}", entry)


def _mooncake(path: Path) -> Iterator[Request]:
    for entry in _entries(path):
        yield Request(
            time_s=entry.number("timestamp", per_s=1e3),
            keys=entry.ids("hash_ids"),
            tokens=entry.tokens("input_length", 0),
        )


def _lmcache(files: list[Path]) -> Iterator[Request]:
    calls = [
        (e.number("timestamp", per_s=1e6), e.text("input"), e.entry.get("session_id"))
        for f in files
        for e in _entries(f)
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
        entry.whole(key): entry.tokens("token_length")
        for table, key in _RAG_TABLES.items()
        for entry in _entries(path / table)
    }
    # a few lines are out of order by some seconds
    for time_s, entry in sorted(
        ((_rag_time_s(e), e) for e in _entries(path / "0_trace.jsonl")), key=lambda one: one[0]
    ):
        parts = entry.group("hash_ids")
        ids = [i for part in _RAG_PARTS for i in parts.ids(part, [])]
        for i in ids:
            if i not in tokens_of:
                raise parts.wrong("an id", i, "in none of the tables of token lengths")
        ends = np.cumsum([tokens_of[i] for i in ids])
        yield Request(
            time_s=time_s,
            keys=_chained_parts(ids, ends),
            tokens=int(ends[-1]) if len(ids) else 0,
            session=str(entry.entry.get("session_id", "")),
        )


def _rag_time_s(entry: Fields) -> float:
    """The published trace has its times as text."""
    value = entry.entry.get("timestamp")
    if not isinstance(value, str):
        return entry.number("timestamp")
    try:
        return Fields(entry.where, {"timestamp": float(value)}).number("timestamp")
    except ValueError:
        raise entry.wrong("timestamp", value, "not a number") from None


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
    for entry in _entries(path):
        if "blocks" in entry.entry:
            keys = entry.ids("blocks", text=True)
            tokens = len(keys) * block_tokens
        elif "tokens" in entry.entry:
            ids = entry.ids("tokens", least=0, most=_TOKEN_ID_MAX)
            keys, tokens = _chained(np.array(ids, "<u4").tobytes(), block_tokens * 4), len(ids)
        elif "text" in entry.entry:
            raw = entry.text("text").encode()
            keys = _chained(raw, block_tokens * _PSEUDO_TOKEN_BYTES)
            tokens = len(raw) // _PSEUDO_TOKEN_BYTES
        else:
            raise InvalidRequest(f"{entry.where} has none of: blocks, tokens, text")
        yield Request(
            time_s=entry.number("time_s"),
            keys=keys,
            tokens=entry.tokens("prompt_tokens", tokens),
            session=str(entry.entry.get("session", "")),
            answer_s=entry.number("answer_s", 0, least_s=0),
            outlook=_outlook(entry),
        )


def _outlook(entry: Fields) -> Outlook:
    name = entry.entry.get("next")
    if name is None:
        return Outlook.UNKNOWN
    known = {o.name.lower(): o for o in Outlook}
    if not isinstance(name, str) or name.lower() not in known:
        raise entry.wrong("next", name, f"not one of {', '.join(known)}")
    return known[name.lower()]
