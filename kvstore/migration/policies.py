"""What the eviction policies of the tiers are told of requests, in the order of chains.

A request is told once, when its hit is leased (`asked`): that is the use. What it adds comes later
and in pieces, as chunks are computed and written back; each piece goes on with the request that
computed what lies before it (`expected`, then `arrived` in every tier that it reaches), and is no
use of that again. A policy that counts uses so sees a request as one, as in the simulator.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook, Tier
from kvstore.config import EvictionConfig
from kvstore.eviction import POLICIES, EvictionPolicy, Surroundings, own_end
from kvstore.index import BlockIndex, leading

Rows = npt.NDArray[np.int64]
_FRAME_BYTES_ASSUMED = 229_376
"""Of DS4.1F's released layout; until a tier holds frames to go by."""


class TierPolicies:
    """One policy per tier, the fastest tier first. `budget_bytes`: of each; 0 for one that there
    is not, whose policy stays empty."""

    def __init__(
        self,
        index: BlockIndex,
        config: EvictionConfig,
        budget_bytes: Mapping[Tier, int],
        now_s: Callable[[], float],
    ) -> None:
        self._index, self._budget_bytes = index, dict(budget_bytes)
        self._frame_bytes = _FRAME_BYTES_ASSUMED
        self.of: dict[Tier, EvictionPolicy] = {
            tier: POLICIES[config.policy_of(tier)](
                Surroundings(self._names, now_s, partial(self._room, tier))
            )
            for tier in budget_bytes
        }

    def _told(self) -> Iterator[tuple[Tier, EvictionPolicy]]:
        return ((tier, policy) for tier, policy in self.of.items() if self._budget_bytes[tier])

    def _names(self, rows: Rows) -> npt.NDArray[np.uint64]:
        return self._index.keys.heads(rows)

    def _room(self, tier: Tier) -> int:
        return self._budget_bytes[tier] // self._frame_bytes

    def frame_seen(self, frame_bytes: int) -> None:
        """Frames of this size fill the tiers."""
        self._frame_bytes = frame_bytes

    # requests

    def asked(self, rows: Sequence[int], declined: Sequence[int] = ()) -> None:
        """A request found these blocks and is going to read them; of one chain as a rule. The SSD
        gets another chance to take those that it `declined`."""
        for chain in self._chains(rows):
            tiers = self._index.view("tiers")[chain]
            for tier, policy in self._told():
                # with an enum NumPy takes four times as long
                held = tiers & int(tier) != 0
                if leading(held) == len(chain):
                    policy.foresee(chain, len(chain))
                    policy.touch(chain)
                    continue
                there = chain[held]
                if tier is Tier.SSD:
                    missing = chain[np.isin(chain, declined)] if declined else chain[:0]
                else:
                    # about to be promoted
                    missing = chain[~held & (tiers != 0)]
                policy.foresee(np.concatenate((there, missing)), len(there))
                policy.touch(there)

    def expected(self, rows: Sequence[int]) -> None:
        """Blocks became READY; every tier may hold them from now on."""
        left = set(rows)
        for chain in self._chains(rows):
            new = np.array([row for row in chain.tolist() if row in left], np.int64)
            left.difference_update(new.tolist())
            before = chain[: self._index.depth[new[0]] - self._index.depth[chain[0]]]
            tiers = self._index.view("tiers")[before]
            for tier, policy in self._told():
                there = before[tiers & int(tier) != 0]
                tell = policy.continued if len(before) else policy.foresee
                tell(np.concatenate((there, new)), len(there))

    def answered(self, chain: Sequence[int], lasting: int, outlook: Outlook) -> None:
        """The answer to the last request for `chain` (root first) ended, and the next request can
        have its first `lasting` rows. Of those that it can't have, or of all at the end of a
        session, what no other chain goes through is of no use any more."""
        keep = 0 if outlook is Outlook.END_OF_SESSION else lasting
        useless = own_end(chain[keep:], self._index.children)
        rest = np.asarray(chain[: len(chain) - len(useless)], np.int64)
        for _, policy in self._told():
            if outlook is not Outlook.END_OF_SESSION:
                policy.answered(rest, outlook)
            policy.cool(useless)

    def arrived(self, rows: Sequence[int], tier: Tier) -> None:
        """Rows were added to a tier's policy."""
        for chain in self._chains(rows):
            there = self._index.view("tiers")[chain] & int(tier) != 0
            self.of[tier].arrived(chain[there])

    def _chains(self, rows: Sequence[int]) -> list[Rows]:
        """Rows with all that lies before them: one chain, root first, per row that none of the
        others continues."""
        parent = self._index.parent
        if len(rows) and parent[rows[0]] < 0:
            # the usual case: a chain from its root on
            chain = np.asarray(rows, np.int64)
            if (self._index.view("parent")[chain[1:]] == chain[:-1]).all():
                return [chain]
        out: list[Rows] = []
        seen: set[int] = set()
        for row in sorted(set(rows), key=self._index.depth.__getitem__, reverse=True):
            if row not in seen:
                upwards = [row, *self._index.ancestors(row)]
                seen.update(upwards)
                out.append(np.array(upwards[::-1], np.int64))
        return out
