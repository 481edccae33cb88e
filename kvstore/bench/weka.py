"""The WEKA traces of agentic coding: recorded sessions, played by a number of concurrent users.

A session is a JSON object with `block_size`, ids that are comparable within it only, and
`requests`; an entry of type `subagent` holds requests of its own, whose times count from it. The
requests of a session, subagents included, are played one after another in order of their times:
each comes `api_time` after the one before it arrived, plus the idle time between them as recorded
(the gap of the arrivals less `api_time`), at most `think_s_max`. Each user plays a session, then
the next of a shuffled list.
"""

import heapq
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from kvstore.bench.fields import Fields
from kvstore.bench.trace import Trace, compact
from kvstore.errors import InvalidRequest
from kvstore.eviction import Outlook

_WINDOW_BYTES_MAX = 1 << 27
_ID_MAX = (1 << 26) - 1
"""Ids of a session are small: tables are as long as the largest."""
_OUTLOOKS = {"tool_use": Outlook.TOOL_CALL, "end_turn": Outlook.USER_TURN}


@dataclass(frozen=True, slots=True)
class Users:
    """`count` at a time; idle times are cut at `think_s_max` (None: as recorded). `block_tokens`:
    a multiple of the trace's own. `seed`: of the order of the sessions; `sessions_max` takes that
    many of the list's front."""

    count: int = 50
    think_s_max: float | None = 60.0
    block_tokens: int = 256
    seed: int = 0
    sessions_max: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    at_s: float
    blocks: npt.NDArray[np.int32]
    tokens: int
    answer_s: float
    outlook: Outlook


_Entry = tuple[float, dict[str, Any], npt.NDArray[np.int64]]
"""A call's time, what is recorded of it, and its `hash_ids`."""


def read_weka(path: Path, users: Users, progress: Callable[[float], None]) -> Trace:
    """All distinct sessions below `path` (a `.tar.zst`, a directory, or one file), interleaved."""
    parents: list[npt.NDArray[np.int32]] = []
    sessions: list[list[_Call]] = []
    seen: set[bytes] = set()
    at = 0
    for name, session, share in _sessions(path):
        entries = list(_flat(session))
        digest = _digest(entries)
        if digest not in seen:
            seen.add(digest)
            calls, parent = _number(name, session, entries, users.block_tokens, at)
            sessions.append(calls)
            parents.append(parent)
            at += len(parent)
        progress(share)
    if not sessions:
        raise InvalidRequest(f"{path} holds no sessions")
    think = "asrecorded" if users.think_s_max is None else f"cap{users.think_s_max:g}"
    name = f"weka-{users.block_tokens}-u{users.count}-{think}"
    return compact(_played(name, sessions, np.concatenate(parents), users))


def _sessions(path: Path) -> Iterator[tuple[str, Fields, float]]:
    if path.is_file() and path.name.endswith(".tar.zst"):
        size = path.stat().st_size
        with path.open("rb") as raw:
            stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(
                raw
            )
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    if file is not None:
                        yield member.name, _parsed(member.name, file.read()), raw.tell() / size
        return
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    for i, one in enumerate(files):
        yield one.name, _parsed(one.name, one.read_bytes()), (i + 1) / len(files)


def _parsed(name: str, content: bytes) -> Fields:
    try:
        session = json.loads(content)
    except ValueError as e:
        raise InvalidRequest(f"{name} is not JSON: {e}") from None
    if not isinstance(session, dict):
        raise InvalidRequest(f"{name} is not a session: no object")
    return Fields(name, session)


def _flat(session: Fields, from_s: float = 0.0) -> Iterator[_Entry]:
    """The calls of a session or a subagent, checked."""
    for entry in session.objects("requests"):
        at_s = from_s + entry.number("t")
        if entry.text("type") == "subagent":
            yield from _flat(entry, at_s)
            continue
        entry.tokens("in")
        entry.tokens("out")
        for name in ("api_time", "ttft"):
            if entry.entry.get(name) is not None:
                entry.number(name, least_s=0)
        yield at_s, entry.entry, entry.id_array("hash_ids", 0, _ID_MAX)


def _digest(calls: list[_Entry]) -> bytes:
    """Equal for sessions that differ in their name only."""
    digest = sha256()
    for at_s, entry, ids in calls:
        digest.update(repr((at_s, entry["in"], entry["out"], entry.get("model"))).encode())
        digest.update(ids.tobytes())
    return digest.digest()


def _number(
    name: str, session: Fields, calls: list[_Entry], block_tokens: int, first: int
) -> tuple[list[_Call], npt.NDArray[np.int32]]:
    """A session's calls with blocks numbered from `first`, and the parents of the new blocks."""
    own_tokens = session.tokens("block_size", least=1)
    merged, rest = divmod(block_tokens, own_tokens)
    if rest or not merged:
        raise InvalidRequest(
            f"blocks of {block_tokens} tokens can't be made of {name}'s {own_tokens}"
        )
    calls = sorted(calls, key=lambda call: call[0])
    # an id is chained: the last of those that a block merges names the block and all before it
    ids = [all_ids[merged - 1 :: merged] for _, _, all_ids in calls]
    number = np.full(max((int(i.max(initial=0)) for i in ids), default=0) + 1, -1, np.int64)
    parents: list[npt.NDArray[np.int64]] = []
    parent_of = np.full(len(number), -1, np.int64)
    out = []
    for (at_s, entry, _), chain in zip(calls, ids, strict=True):
        new = chain[number[chain] < 0]
        number[new] = first + np.arange(len(new))
        first += len(new)
        above = np.concatenate(([-1], number[chain[:-1]]))[: len(chain)]
        unknown = len(chain) - len(new)
        parent_of[new] = above[unknown:]
        parents.append(above[unknown:])
        if not np.array_equal(parent_of[chain], above):
            raise InvalidRequest(f"the block ids of {name} are not prefix-chained")
        out.append(
            _Call(
                at_s=at_s,
                blocks=number[chain].astype(np.int32),
                tokens=entry["in"],
                answer_s=entry.get("api_time", entry.get("ttft", 0.0)) or 0.0,
                outlook=_OUTLOOKS.get(entry.get("stop", ""), Outlook.UNKNOWN),
            )
        )
    return out, np.concatenate(parents or [np.zeros(0, np.int64)]).astype(np.int32)


def _played(
    name: str, sessions: list[list[_Call]], parent: npt.NDArray[np.int32], users: Users
) -> Trace:
    order = list(range(len(sessions)))
    Random(users.seed).shuffle(order)
    waiting = iter(order[: users.sessions_max])
    cap = float("inf") if users.think_s_max is None else users.think_s_max
    due: list[tuple[float, int, int, int]] = []
    started = 0
    played: list[tuple[float, _Call, Outlook]] = []

    def start(at_s: float) -> None:
        nonlocal started
        session = next(waiting, None)
        if session is not None:
            started += 1
            heapq.heappush(due, (at_s, started, session, 0))

    for _ in range(users.count):
        start(0.0)
    while due:
        at_s, turn, session, i = heapq.heappop(due)
        calls = sessions[session]
        call, last = calls[i], i + 1 == len(calls)
        played.append((at_s, call, Outlook.END_OF_SESSION if last else call.outlook))
        if last:
            start(at_s)
        else:
            idle = min(max(calls[i + 1].at_s - call.at_s - call.answer_s, 0.0), cap)
            heapq.heappush(due, (at_s + call.answer_s + idle, turn, session, i + 1))
    start_of = np.zeros(len(played) + 1, np.int64)
    np.cumsum([len(call.blocks) for _, call, _ in played], out=start_of[1:])
    return Trace(
        name=name,
        block_tokens=users.block_tokens,
        start=start_of,
        blocks=np.concatenate([call.blocks for _, call, _ in played]),
        parent=parent,
        time_s=np.array([at_s for at_s, _, _ in played]),
        tokens=np.array([call.tokens for _, call, _ in played], np.int64),
        answer_s=np.array([call.answer_s for _, call, _ in played]),
        outlook=np.array([int(o) for _, _, o in played], np.uint8),
    )
