"""A request trace as arrays: which blocks every request asks for, when, and of which chain.

Block *i* of a trace is row *i* of the simulator's index; a block's parent always has a smaller
number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.eviction import Outlook

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """One request before its blocks are numbered.

    `time_s`: arrival. `keys`: one hashable per whole block, equal exactly for equal content after
    equal prefixes *within `scope`*. `tokens`: length of the prompt; at least the blocks' tokens.
    `answer_s`: how long the answer took. `outlook`: what the client knew when it ended.
    """

    time_s: float
    keys: Sequence[int | bytes]
    tokens: int
    session: str = ""
    scope: str = ""
    answer_s: float = 0.0
    outlook: Outlook = Outlook.UNKNOWN


@dataclass(frozen=True, slots=True)
class Trace:
    """See the module. Requests are in order of arrival; request *r* asks for the blocks
    `blocks[start[r]:start[r + 1]]`, root first. `parent`: per block, -1 for a first block."""

    name: str
    block_tokens: int
    start: Ids
    blocks: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    time_s: npt.NDArray[np.float64]
    tokens: Ids
    answer_s: npt.NDArray[np.float64]
    outlook: npt.NDArray[np.uint8]

    @property
    def requests(self) -> int:
        return len(self.time_s)

    @property
    def accesses(self) -> int:
        return len(self.blocks)

    @property
    def unique(self) -> int:
        return len(self.parent)

    def chain(self, request: int) -> npt.NDArray[np.int32]:
        """The blocks of one request, root first."""
        return self.blocks[self.start[request] : self.start[request + 1]]

    def unbounded_hit_rate(self) -> float:
        """What a cache that forgets nothing reaches, of all accesses."""
        return 1 - self.unique / self.accesses if self.accesses else 0.0


class Numbering:
    """Gives blocks their numbers; one per trace."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int | bytes, int]] = {}
        self.parent: list[int] = []

    def chain(self, request: Request) -> npt.NDArray[np.int32]:
        """The numbers of a request's blocks.

        Raises `InvalidRequest` where a key stands behind two different prefixes: such keys name
        content, not chains, and would count hits that no prefix cache has.
        """
        known = self._of.setdefault(request.scope, {})
        parents = self.parent
        above = -1
        numbers = []
        for key in request.keys:
            number = known.setdefault(key, len(parents))
            if number == len(parents):
                parents.append(above)
            elif parents[number] != above:
                raise InvalidRequest(
                    f"block id {key!r} follows two different blocks, so the ids do not name "
                    "prefixes; chain them (hash each with the one before it) first"
                )
            numbers.append(number)
            above = number
        return np.array(numbers, np.int32)


def build(name: str, block_tokens: int, requests: Iterable[Request]) -> Trace:
    """A trace of requests that come in order of arrival."""
    numbering = Numbering()
    rows = [(r.time_s, numbering.chain(r), r.tokens, r.answer_s, int(r.outlook)) for r in requests]
    chains = [row[1] for row in rows]
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(c) for c in chains], out=start[1:])
    trace = Trace(
        name=name,
        block_tokens=block_tokens,
        start=start,
        blocks=np.concatenate(chains) if chains else np.zeros(0, np.int32),
        parent=np.array(numbering.parent, np.int32),
        time_s=np.array([row[0] for row in rows], np.float64),
        tokens=np.array([row[2] for row in rows], np.int64),
        answer_s=np.array([row[3] for row in rows], np.float64),
        outlook=np.array([row[4] for row in rows], np.uint8),
    )
    if (np.diff(trace.time_s) < 0).any():
        raise InvalidRequest(f"the requests of {name} are not in order of their times; sort them")
    return trace


def head(trace: Trace, requests: int) -> Trace:
    """The first so many requests, with the blocks that they ask for."""
    if requests >= trace.requests:
        return trace
    start = trace.start[: requests + 1]
    return compact(
        Trace(
            name=f"{trace.name}, first {requests}",
            block_tokens=trace.block_tokens,
            start=start,
            blocks=trace.blocks[: start[-1]],
            parent=trace.parent,
            time_s=trace.time_s[:requests],
            tokens=trace.tokens[:requests],
            answer_s=trace.answer_s[:requests],
            outlook=trace.outlook[:requests],
        )
    )


def compact(trace: Trace) -> Trace:
    """The trace without the blocks that no request asks for."""
    used = np.zeros(trace.unique, bool)
    used[trace.blocks] = True
    if used.all():
        return trace
    number = np.cumsum(used, dtype=np.int64) - 1
    parent = trace.parent[used]
    return Trace(
        trace.name,
        trace.block_tokens,
        trace.start,
        number[trace.blocks].astype(np.int32),
        np.where(parent >= 0, number[parent], -1).astype(np.int32),
        trace.time_s,
        trace.tokens,
        trace.answer_s,
        trace.outlook,
    )


def with_one_offs(trace: Trace, share: float, seed: int) -> Trace:
    """The trace with prompts mixed in that nobody repeats: `share` of all requests then are such.

    A one-off has the length of a randomly chosen request of the trace and arrives at a random
    place in it, at the time of the request before it. Its first block is already its own.
    """
    random = np.random.default_rng(seed)
    extra = round(trace.requests * share / (1 - share))
    lengths = np.diff(trace.start)
    model = random.integers(0, trace.requests, extra)
    place = np.sort(random.integers(0, trace.requests, extra))
    after = np.concatenate((np.arange(trace.requests), place))
    own = np.concatenate((np.ones(trace.requests, bool), np.zeros(extra, bool)))
    order = np.argsort(after, kind="stable")
    chains, parents, at = [], [trace.parent], trace.unique
    for index in order.tolist():
        if own[index]:
            chains.append(trace.chain(index))
            continue
        n = int(lengths[model[index - trace.requests]])
        chain = np.arange(at, at + n, dtype=np.int32)
        parents.append(np.concatenate((np.full(min(n, 1), -1, np.int32), chain[:-1])))
        chains.append(chain)
        at += n
    source = np.concatenate((np.arange(trace.requests), model))[order]
    start = np.zeros(len(order) + 1, np.int64)
    np.cumsum([len(c) for c in chains], out=start[1:])
    return Trace(
        name=f"{trace.name}+{share:.0%} one-off",
        block_tokens=trace.block_tokens,
        start=start,
        blocks=np.concatenate(chains),
        parent=np.concatenate(parents),
        time_s=trace.time_s[after[order]],
        tokens=trace.tokens[source],
        answer_s=trace.answer_s[source],
        outlook=np.where(own[order], trace.outlook[source], 0).astype(np.uint8),
    )
