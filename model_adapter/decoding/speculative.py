"""Speculative decoding: guesses are verified by the backbone in one pass (report §2.4.3).

A round takes the token just yielded and some guesses behind it through the model together. At each
position the sampler draws its token from the backbone's logits as it would without guesses; the
guesses stand as long as they are what was drawn. The first token that is not, or the one behind the
last guess, is the backbone's own, so a round yields one token more than it accepted. What was
rejected is cut from the caches before anything is yielded.

Since a request's randomness depends on the token's number alone (`sampling`), and a pass over few
positions gives each the bits that it has alone (`few_rows`), tokens and caches equal those of plain
decoding, at temperature 0 and above. A guess stands with the probability that the sampler gives it,
which is what rejection sampling gives a draft without randomness of its own.
"""

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from model_adapter.cache import SequenceCache
from model_adapter.decoding.sampling import Sampler
from model_adapter.few_rows import FEW_ROWS_MAX
from model_adapter.forward_pass import Observer
from model_adapter.model import Model


class Drafts(Protocol):
    """Where guesses for one sequence come from; see `dspark.SequenceDrafts`."""

    @property
    def observer(self) -> Observer:
        """Sees every pass of the sequence."""

    def take_up(self, end: int, rejected: int = 0) -> None:
        """Positions up to `end` are final; `rejected` more were seen and are forgotten."""

    def propose(self, token: int, limit: int, banned: Collection[int]) -> Sequence[int]:
        """At most `limit` guesses behind `token`, none of `banned`."""

    def truncate(self, end: int) -> None:
        """Forget the positions from `end` on."""


@dataclass
class SpeculationStats:
    """`rounds`: verifying passes. `verified`: guesses in them. `accepted`: guesses that stood."""

    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the backbone; 1 without drafts. NaN before the first."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


def speculate(
    model: Model,
    cache: SequenceCache,
    logits: torch.Tensor,
    sampler: Sampler,
    stop_ids: Collection[int],
    drafts: Drafts,
    drawn: int,
    stats: SpeculationStats,
) -> Generator[int, None, None]:
    """See `generate`."""
    drafts.take_up(cache.length)
    last = drawn + sampler.params.max_tokens
    token = sampler.token(logits, drawn)
    yield token
    drawn += 1
    while token not in stop_ids and drawn < last:
        room = min(last - drawn, model.config.positions_max - cache.length, FEW_ROWS_MAX) - 1
        proposed = drafts.propose(token, room, sampler.banned)
        guesses = list(takewhile(lambda guess: guess not in stop_ids, proposed))
        found = _verify(model, cache, token, guesses, sampler, drafts, drawn)
        stats.rounds += 1
        stats.verified += len(guesses)
        stats.accepted += len(found) - 1
        drawn += len(found)
        token = found[-1]
        yield from _handed_out(found, cache, drafts)


def _verify(
    model: Model,
    cache: SequenceCache,
    token: int,
    guesses: list[int],
    sampler: Sampler,
    drafts: Drafts,
    drawn: int,
) -> list[int]:
    """The accepted guesses and the token behind them; the cache holds `token` and the accepted."""
    rows = model.prefill_all_logits(cache, [token, *guesses], observer=drafts.observer)
    found: list[int] = []
    for row, guess in zip(rows, [*guesses, None], strict=True):
        found.append(sampler.token(row, drawn + len(found)))
        if found[-1] != guess:
            break
    rejected = len(rows) - len(found)
    cache.truncate(cache.length - rejected)
    drafts.take_up(cache.length, rejected)
    return found


def _handed_out(found: list[int], cache: SequenceCache, drafts: Drafts) -> Iterator[int]:
    """Yield the tokens; where the reader stops early, forget those that it did not take."""
    held = cache.length
    taken = 0
    try:
        for token in found:
            taken += 1
            yield token
    finally:
        if taken < len(found):
            length = held - len(found) + taken
            cache.truncate(length)
            drafts.truncate(length)
