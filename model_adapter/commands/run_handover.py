"""What `ds41f prefill` and `ds41f decode` do; apart from their flags, so that `--help` loads no
torch."""

import logging
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import kvstore
from kvstore import Client, Namespace
from kvstore.errors import KVStoreError, Unavailable
from model_adapter.commands.prompt_files import PromptFiles
from model_adapter.commands.run_generate import parse_bytes, report_rows, table_of
from model_adapter.decoding import generate
from model_adapter.devices import device_of
from model_adapter.dspark import Drafter, SequenceDrafts
from model_adapter.errors import HandoverError, HandoverLost, HandoverUnusable
from model_adapter.handover import (
    Announcement,
    HandedOver,
    Received,
    Sampling,
    Waiting,
    announced,
    continued,
    hand_over,
    receive,
)
from model_adapter.handover.record import PROMPT_SUFFIX
from model_adapter.model import Model
from model_adapter.replay import Mode
from model_adapter.session import CachedSession, Decode, Generation, StoreBlocks, namespace_of
from model_adapter.sizes import estimate
from model_adapter.tokenizer import decode_answer, load_tokenizer
from model_adapter.vision import ImagePatches, ImagePrompt

logger = logging.getLogger(__name__)

_SEED_BITS = 64
_CONNECT_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Node:
    """The flags that both commands have."""

    checkpoint: Path
    store: str
    request_id: str
    mode: Mode
    dtype: str
    speculate: bool
    block_tokens: int
    deadline_s: float
    weight_cache: str
    device: str = "cpu"

    def model(self) -> Model:
        """Loaded as the flags say."""
        dtype = getattr(torch, self.dtype)
        room = parse_bytes(self.weight_cache)
        return Model.load(self.checkpoint, dtype, room, device_of(self.device))

    def namespace(self, model: Model) -> Namespace:
        """Of the model's blocks."""
        return namespace_of(model, self.checkpoint, self.block_tokens)

    def drafts(self, model: Model) -> SequenceDrafts | None:
        """Fresh ones, where the flags ask for them."""
        return SequenceDrafts(Drafter(model)) if self.speculate else None


@dataclass(frozen=True, slots=True)
class Answering:
    """The flags of `ds41f decode` alone."""

    max_tokens: int
    wait_s: float
    recompute: bool
    keep: bool
    ids: bool


def seed_of(seed: int | None) -> int:
    """The one to use, below 2⁶⁴."""
    return (secrets.randbits(_SEED_BITS) if seed is None else seed) % (1 << _SEED_BITS)


def prefill(
    node: Node, given: PromptFiles, sampling: Sampling, ttl_s: float | None, chunk_tokens: int
) -> None:
    """Prefill, hand over, and say on stderr what was."""
    prompt = given.read(node.checkpoint)
    params = sampling.params(1)
    model = node.model()
    namespace = node.namespace(model)
    drafts = node.drafts(model)
    try:
        with kvstore.connect(node.store, deadline_s=node.deadline_s) as client:
            source = StoreBlocks(client, namespace)
            session = CachedSession(model, source, node.mode, chunk_tokens)
            done = hand_over(
                *(session, client, namespace, node.request_id, prompt.token_ids, params),
                images=[placed.image for placed in prompt.images],
                drafts=drafts,
                ttl_s=ttl_s,
            )
    except Unavailable as e:
        raise HandoverLost(f"{node.request_id} is not handed over: {e}; retry") from e
    Console(stderr=True).print(_handed_over_table(node, model, done))


def decode(node: Node, how: Answering, given: PromptFiles | None, sampling: Sampling) -> None:
    """Wait, go on, print the answer on stdout and what it took on stderr."""
    since = time.monotonic()
    own = _Own(given.read(node.checkpoint), sampling) if given else None
    model = node.model()
    namespace = node.namespace(model)
    with _connected(node, how, since, own) as client:
        session = CachedSession(
            model, StoreBlocks(client, namespace) if client else None, node.mode
        )
        answer = _Answer(node, how, session, client, namespace, own)
        generation = answer.run(since)
        if client and not how.keep and generation.token_ids:
            _drop(client, namespace, node.request_id)
    if not how.ids:
        print(decode_answer(load_tokenizer(node.checkpoint), generation.token_ids))
    rows = answer.rows | report_rows(generation.report)
    if "waited" in rows:
        # it was drawn elsewhere
        del rows["time to first token"]
    Console(stderr=True).print(table_of(rows))


@dataclass(frozen=True, slots=True)
class _Own:
    """The prompt that the flags give, and how they have its answer drawn."""

    prompt: ImagePrompt
    sampling: Sampling

    def announcement(self) -> Announcement:
        """As a prefill node would have announced it."""
        ids = self.prompt.token_ids.astype(np.uint32)
        return Announcement(ids, tuple(self.prompt.spans), self.sampling)


class _Answer:
    """One request at the decode node. `rows`: what its report says beside the usual."""

    def __init__(
        self,
        node: Node,
        how: Answering,
        session: CachedSession,
        client: Client | None,
        namespace: Namespace,
        own: _Own | None,
    ) -> None:
        self._node, self._how, self._session = node, how, session
        self._client, self._namespace = client, namespace
        self._own = own
        self._prompt = own.announcement() if own else None
        self._stop_ids = (session.model.config.eos_token,)
        self.rows: dict[str, str] = {}

    def run(self, since: float) -> Generation:
        """Go on from the hand-over, or else, where that is wanted, compute from the prompt."""
        try:
            return self._taken_over(since)
        except HandoverError as e:
            if not self._how.recompute:
                raise
            if self._prompt is None:
                message = f"{e}; the prompt is not in the store either, so give --prompt-file"
                raise type(e)(message) from e
            logger.warning("recomputing: %s", e)
            self.rows["handed over"] = f"no; recomputed ({type(e).__name__})"
            return self._recomputed(self._prompt)

    def _taken_over(self, since: float) -> Generation:
        if self._client is None:
            raise HandoverLost(f"{self._node.request_id}: the store can't be reached; retry")
        drafts = self._node.drafts(self._session.model)
        waiting = Waiting(
            *(self._client, self._namespace, self._node.request_id, self._how.wait_s, since)
        )
        prompt = self._prompt = announced(waiting)
        received = receive(waiting, self._session, prompt, drafts)
        self.rows |= _received_rows(received)
        request = self._session.request(
            prompt.token_ids, self._how.max_tokens, spans=prompt.images, drafts=drafts
        )
        request.go_on(received.prefix)
        return request.answer(
            torch.empty(0),
            self._how.max_tokens,
            self._stop_ids,
            self._on_token,
            continued(received.record, drafts),
        )

    def _recomputed(self, prompt: Announcement) -> Generation:
        drafts = self._node.drafts(self._session.model)
        return self._session.generate(
            prompt.token_ids,
            self._how.max_tokens,
            self._stop_ids,
            self._on_token,
            images=self._images_of(prompt),
            drafts=drafts,
            decode=_from_logits(prompt.sampling, drafts),
        )

    def _images_of(self, prompt: Announcement) -> list[ImagePatches]:
        """Pixels, which only the flags can give."""
        own = self._own.prompt if self._own else None
        if prompt.images and (own is None or tuple(own.spans) != prompt.images):
            raise HandoverUnusable(
                f"{self._node.request_id}: its prompt has {len(prompt.images)} images, and the "
                "store does not keep pixels; to recompute, give --prompt-file and each --image"
            )
        return [placed.image for placed in own.images] if own and prompt.images else []

    def _on_token(self, token: int) -> None:
        if self._how.ids:
            print(token, flush=True)


def _from_logits(sampling: Sampling, drafts: SequenceDrafts | None) -> Decode:
    def decode(model, cache, logits, max_tokens, stop_ids):  # type: ignore[no-untyped-def]
        yield from generate(model, cache, logits, sampling.params(max_tokens), stop_ids, drafts)

    return decode


@contextmanager
def _connected(
    node: Node, how: Answering, since: float, own: _Own | None
) -> Generator[Client | None]:
    """A client, as soon as the store is there; None where it is not in time and the prompt is known
    without it."""
    while True:
        try:
            client = kvstore.connect(node.store, deadline_s=node.deadline_s)
            break
        except Unavailable as e:
            left_s = since + how.wait_s - time.monotonic()
            if left_s > 0:
                time.sleep(min(_CONNECT_PAUSE_S, left_s))
                continue
            if how.recompute and own is not None:
                logger.warning("going on without the store: %s", e)
                yield None
                return
            raise HandoverLost(
                f"the store did not come up within {how.wait_s:g} s: {e}; retry"
            ) from e
    with client:
        yield client


def _drop(client: Client, namespace: Namespace, request_id: str) -> None:
    """Give the memory back; it would go by itself."""
    try:
        handle = client.open_namespace(namespace)
        for name in (request_id, request_id + PROMPT_SUFFIX):
            client.drop_handover(handle, name)
    except KVStoreError as e:
        logger.debug("%s stays until it expires: %s", request_id, e)


def _received_rows(received: Received) -> dict[str, str]:
    loaded = received.prefix.loaded
    return {
        "handed over": f"{len(received.token_ids)} tokens: {loaded.payload_bytes:,} B in "
        f"{loaded.blocks} blocks + {received.record_bytes:,} B",
        "waited": f"{received.waited_s:.3f} s; {received.early_blocks} blocks came meanwhile",
    }


def _handed_over_table(node: Node, model: Model, done: HandedOver) -> Table:
    """What was computed and left, beside what the arithmetic says."""
    tokens = done.report.prompt_tokens
    expected = estimate(model.config, tokens)
    without = 0 if node.speculate else expected.dspark_windows
    rows = report_rows(done.report)
    del rows["generated"], rows["time to first token"]
    rows["handed over"] = (
        f"{done.block_bytes:,} B in {done.blocks} blocks + {done.record_bytes:,} B, and "
        f"{done.prompt_bytes:,} B of prompt"
    )
    rows["by the arithmetic"] = f"{expected.handover - without:,} B, its own headers aside"
    rows["took"] = f"{done.report.total_s:.3f} s"
    return table_of(rows)
