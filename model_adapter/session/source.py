"""Where blocks come from and go to, as the session sees it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore import ImageSpan, Layout, Outlook, Tier
from model_adapter.cache import SequenceCache
from model_adapter.session.read_ahead import ReadAhead

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A window snapshot that lies on a prompt. `position`: tokens before it. `blocks`: full blocks
    among them, which are at the source too."""

    key: bytes
    position: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt's blocks at the source.

    `keys`: names of all full blocks of the prompt. `blocks`: how many of them, from the first on,
    can be loaded. `snapshot`: the longest one that lies on the prompt and leaves a token to
    compute. `error`: why the source could not be asked, if so. `fetch_s`: estimated seconds to load
    the first n blocks, for n from 0 to `blocks`; empty where the source can't tell.
    """

    keys: Sequence[bytes] = ()
    blocks: int = 0
    snapshot: FoundSnapshot | None = None
    error: str | None = None
    fetch_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """`payload`: None where it has gone since it was found."""

    payload: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came into the cache.

    `blocks`: loaded, from the first on; fewer than asked for where one was missing, corrupt or out
    of reach. `tiers`: blocks by the tier that held them. `payload_bytes`: their size. `reading`:
    where their sections are still on their way.
    """

    blocks: int = 0
    tiers: Counter[Tier] = field(default_factory=Counter)
    payload_bytes: int = 0
    error: str | None = None
    reading: ReadAhead | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the blocks that were offered.

    `present`: there already, from this writer or another. `refused`: no room, or no parent.
    `payload_bytes`: of the `stored` ones. `snapshots`, `refused_snapshots`: window snapshots that
    were kept, and not.
    """

    stored: int = 0
    present: int = 0
    refused: int = 0
    payload_bytes: int = 0
    snapshots: int = 0
    refused_snapshots: int = 0
    error: str | None = None

    def __add__(self, other: "Stored") -> "Stored":
        return Stored(
            self.stored + other.stored,
            self.present + other.present,
            self.refused + other.refused,
            self.payload_bytes + other.payload_bytes,
            self.snapshots + other.snapshots,
            self.refused_snapshots + other.refused_snapshots,
            self.error or other.error,
        )


class BlockSource(Protocol):
    """Keeps blocks and window snapshots by what stands before them. The session calls it from one
    thread.

    No call raises for a source that fails: the result says so, and counts as a miss.
    """

    layout: Layout

    def find(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Found:
        """How much of the prompt is here. Changes nothing.

        `images`: where images stand in the prompt, in order; their digests are part of the names.
        """
        ...

    def load(self, found: Found, blocks: int, cache: SequenceCache) -> Loaded:
        """Load the first `blocks` (≤ `found.blocks`) into `cache`, which MUST be empty.

        Block i is in the cache whole or not at all, and only when all before it are. Or they are
        promised to the cache, and `Loaded.reading` brings them; where that fails, the next call
        waits for what it loads.
        """
        ...

    def load_snapshot(self, snapshot: FoundSnapshot) -> LoadedSnapshot:
        """A snapshot's payload."""
        ...

    def store_snapshot(
        self, token_ids: TokenIds, payload: bytearray, images: Sequence[ImageSpan] = ()
    ) -> Stored:
        """Keep a snapshot of the position behind `token_ids`, whose full blocks were stored.

        `images`: those among the tokens.
        """
        ...

    def answered(
        self,
        token_ids: TokenIds,
        outlook: Outlook,
        lasting_tokens: int | None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """What is known of the request after the one that left `token_ids`, answer included.

        `lasting_tokens`: how many of them it can begin with at most, if that is known. A hint: that
        it could not be told is logged, and no more.
        """
        ...

    def store(
        self,
        token_ids: TokenIds,
        first: int,
        cache: SequenceCache,
        images: Sequence[ImageSpan] = (),
    ) -> Stored:
        """Keep the full blocks of `cache` from the `first` on.

        `token_ids`: all tokens of the sequence, at least those in the cache and all of `images`.
        The caller guarantees that no block from `first` on was loaded.
        """
        ...
