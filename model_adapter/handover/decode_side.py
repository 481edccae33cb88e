"""The decode node: blocks while they come, then the record, then tokens.

Reading takes nothing out of the store, so that another node may take over from one that died, and
draws the same tokens: which one comes next follows from the seed and its number alone.
"""

import logging
import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field

import torch

from kvstore import Client, ImageSpan, Namespace, NamespaceHandle
from kvstore.errors import KVStoreError
from model_adapter.cache import SequenceCache
from model_adapter.decoding import generate
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import HandoverLost, HandoverUnusable, SnapshotError
from model_adapter.handover.record import PROMPT_SUFFIX, Announcement, HandoverRecord
from model_adapter.model import Model
from model_adapter.session import (
    CachedSession,
    Decode,
    Loaded,
    PrefixOutcome,
    SnapshotOutcome,
    StoreBlocks,
)
from model_adapter.session.prefix import Prefix
from model_adapter.session.source import TokenIds
from model_adapter.snapshot import Computed, read_snapshot

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks for new blocks while the prefill runs."""


@dataclass(slots=True)
class Received:
    """A sequence to go on with. `early_blocks`: fetched before the record was there. `waited_s`:
    from the first question to the record. Sizes are bytes."""

    prefix: Prefix
    record: HandoverRecord
    token_ids: TokenIds
    early_blocks: int
    waited_s: float
    record_bytes: int


@dataclass(slots=True)
class _Fetched:
    """The prompt's blocks as far as they have come."""

    cache: SequenceCache
    blocks: int = 0
    loaded: Loaded = field(default_factory=Loaded)


class Waiting:
    """Waits for the parts of one request's hand-over, for `wait_s` seconds in all from `since` on
    (`time.monotonic`; now without).

    A store that goes away meanwhile is asked again until then: whoever restarts it may run the
    prefill again, under the same name.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        request_id: str,
        wait_s: float,
        since: float | None = None,
    ) -> None:
        self.client = client
        self.namespace = namespace
        self.request_id = request_id
        self.handle: NamespaceHandle | None = None
        self._wait_s = wait_s
        self._ends_s = (time.monotonic() if since is None else since) + wait_s
        self._error = ""

    def part(self, suffix: str, at_most_s: float | None = None) -> bytes | None:
        """One part; None after `at_most_s`. Raises `HandoverLost` at the end of all waiting."""
        step_s = self._left_s() if at_most_s is None else min(at_most_s, self._left_s())
        try:
            if self.handle is None:
                self.handle = self.client.open_namespace(self.namespace)
            return self.client.wait_handover(self.handle, self.request_id + suffix, step_s)
        except KVStoreError as e:
            self._error = f"; the store: {e}"
            self.handle = None
            time.sleep(min(POLL_S, self._left_s()))
            return None

    def check(self, what: str) -> None:
        """Raise `HandoverLost` where the time is up."""
        if not self._left_s():
            raise HandoverLost(
                f"{what} of {self.request_id} did not come within {self._wait_s:g} s"
                f"{self._error}: its prefill runs still, has died or never began, or it has "
                "expired, or a decode has finished it (--keep leaves it); run the prefill again "
                "and retry, or decode with --recompute"
            )

    def _left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())


def announced(waiting: Waiting) -> Announcement:
    """The prompt of a request, as soon as its prefill has begun.

    Raises `HandoverLost` where it did not in time, `HandoverUnusable` where it can't be read.
    """
    while (payload := waiting.part(PROMPT_SUFFIX)) is None:
        waiting.check("the prompt")
    try:
        return Announcement.from_bytes(payload)
    except SnapshotError as e:
        name = waiting.request_id
        raise HandoverUnusable(f"{name}: {e}; give the prompt and --recompute") from e


def receive(
    waiting: Waiting,
    session: CachedSession,
    prompt: Announcement,
    drafts: SequenceDrafts | None = None,
) -> Received:
    """Fetch a request's blocks as they appear, and its record; restore the state behind its prompt.

    Raises `HandoverLost` where the record did not come in time, `HandoverUnusable` where it, or a
    block before it, can't be used: decode anew from the prompt then.
    """
    start = time.perf_counter()
    source = StoreBlocks(waiting.client, waiting.namespace)
    fetched = _Fetched(session.model.new_cache())
    fetched.cache.reserve(len(prompt.token_ids))
    while (payload := waiting.part("", POLL_S)) is None:
        waiting.check("the hand-over")
        if waiting.handle is not None:
            _fetch(source, fetched, prompt.token_ids, prompt.images)
    waited_s, early = time.perf_counter() - start, fetched.blocks
    prefix, record = _taken_up(waiting, session, source, fetched, prompt, payload, drafts)
    return Received(prefix, record, prompt.token_ids, early, waited_s, len(payload))


def _fetch(
    source: StoreBlocks, fetched: _Fetched, ids: TokenIds, images: Sequence[ImageSpan]
) -> None:
    """Load the blocks that are READY now and were not before."""
    found = source.find(ids, images)
    if found.blocks > fetched.blocks:
        more = source.load(found, found.blocks, fetched.cache, fetched.blocks)
        fetched.blocks += more.blocks
        fetched.loaded = Loaded(
            fetched.blocks,
            fetched.loaded.tiers + more.tiers,
            fetched.loaded.payload_bytes + more.payload_bytes,
        )


def _taken_up(
    waiting: Waiting,
    session: CachedSession,
    source: StoreBlocks,
    fetched: _Fetched,
    prompt: Announcement,
    payload: bytes,
    drafts: SequenceDrafts | None,
) -> tuple[Prefix, HandoverRecord]:
    ids, images, request_id = prompt.token_ids, prompt.images, waiting.request_id
    assert waiting.handle is not None
    try:
        record = HandoverRecord.from_bytes(payload)
        if record.prompt_key != waiting.handle.snapshot_key(ids, images):
            raise SnapshotError("the hand-over record is another prompt's than the announced one")
        computed = Computed(session.model.weights.dtype, session.mode)
        snapshot = read_snapshot(
            *(record.snapshot, session.model.config, computed),
            *(len(ids), source.layout.block_tokens),
        )
    except SnapshotError as e:
        raise HandoverUnusable(f"{request_id}: {e}; decode with --recompute") from e
    if fetched.blocks < snapshot.blocks:
        _fetch(source, fetched, ids, images)
    if fetched.blocks < snapshot.blocks:
        raise HandoverUnusable(
            f"{request_id}: the store has only {fetched.blocks} of the {snapshot.blocks} blocks "
            "before its hand-over (it was restarted, or they were evicted); decode with --recompute"
        )
    fetched.cache.from_snapshot(snapshot, ids, drafts.windows.layers if drafts else ())
    prefix = Prefix(
        *(fetched.cache, PrefixOutcome.HIT, SnapshotOutcome.HIT),
        *(snapshot.position, len(record.snapshot), fetched.loaded),
    )
    return prefix, record


def continued(record: HandoverRecord, drafts: SequenceDrafts | None = None) -> Decode:
    """How the request's answer goes on: its first token, then what follows from it."""

    def decode(
        model: Model,
        cache: SequenceCache,
        logits: torch.Tensor,
        max_tokens: int,
        stop_ids: Collection[int],
    ) -> Generator[int, None, None]:
        yield record.first_token
        if record.first_token in stop_ids or max_tokens == 1:
            return
        observer = drafts.observer if drafts else None
        behind = model.decode(cache, record.first_token, observer)
        params = record.sampling.params(max_tokens - 1)
        yield from generate(model, cache, behind, params, stop_ids, drafts, drawn=record.drawn)

    return decode
