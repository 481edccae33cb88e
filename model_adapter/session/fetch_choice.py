"""How much of a hit to take: what gives the first token soonest.

Taking n blocks costs their fetching, as the store estimates it, and computing what lies behind them
together with the replay; taking none costs computing all of it. To the store's estimates, which end
at its door, comes what fetching a block took here beyond them: the median of the last requests, so
that one hiccup decides nothing. The rate of computing is this process's own, a moving mean. Until
something was computed every hit is taken.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

_GAIN = 0.3
_FETCHES_MIN, _FETCHES_MAX = 3, 7


class FetchChoice:
    """See the module. One per session: it learns from request to request.

    `token_s`: seconds to compute one token of a prompt; None before the first.
    """

    def __init__(self) -> None:
        self.token_s: float | None = None
        self._beyond_s: deque[float] = deque(maxlen=_FETCHES_MAX)

    def computed(self, tokens: int, seconds: float) -> None:
        """So many tokens of a prompt were computed in so many seconds."""
        if tokens < 1 or not seconds > 0:
            return
        now = seconds / tokens
        self.token_s = now if self.token_s is None else self.token_s + _GAIN * (now - self.token_s)

    def fetched(self, blocks: int, estimated_s: float, seconds: float) -> None:
        """Fetching so many blocks was estimated to take `estimated_s`, and took `seconds`."""
        self._beyond_s.append(max(0.0, seconds - estimated_s) / blocks)

    @property
    def block_s(self) -> float:
        """Seconds per block beyond the store's estimate; 0 until there are a few to go by."""
        return median(self._beyond_s) if len(self._beyond_s) >= _FETCHES_MIN else 0.0

    def seconds(
        self, tokens: int, blocks: int, block_tokens: int, fetch_s: Sequence[float], replay: int
    ) -> npt.NDArray[np.float64]:
        """Estimated seconds to the first token of a prompt of `tokens` for every number of blocks
        taken, from 0 to `blocks`. `fetch_s`: the store's estimates, from 0 blocks on. `replay`:
        tokens computed again behind a hit; a hit no longer than that is worth nothing."""
        assert self.token_s is not None, "nothing was computed yet"
        n = np.arange(blocks + 1)
        computed = tokens - n * block_tokens + replay * (n > 0)
        fetched = np.asarray(fetch_s[: blocks + 1]) + n * self.block_s
        total: npt.NDArray[np.float64] = computed * self.token_s + fetched
        total[1:][n[1:] * block_tokens <= replay] = np.inf
        return total

    def blocks(
        self, tokens: int, blocks: int, block_tokens: int, fetch_s: Sequence[float], replay: int
    ) -> int:
        """The number of blocks to take; see `seconds`. All of them where there is nothing to go by:
        no estimates, or nothing computed yet."""
        if self.token_s is None or len(fetch_s) <= blocks:
            return blocks
        return int(np.argmin(self.seconds(tokens, blocks, block_tokens, fetch_s, replay)))

    def exact_pays(self, position: int, blocks: int, tokens: int, fetch_s: Sequence[float]) -> bool:
        """Whether going on at `position` behind `blocks` fetched ones beats computing it all."""
        if self.token_s is None or len(fetch_s) <= blocks:
            return True
        fetched_s = fetch_s[blocks] + blocks * self.block_s
        return fetched_s < min(position, tokens) * self.token_s
