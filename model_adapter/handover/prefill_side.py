"""The prefill node: blocks as chunks finish, then the record."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import Client, Namespace, PutOutcome
from model_adapter.decoding import Sampler, SamplingParams, never_generated
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import HandoverLost
from model_adapter.handover.record import (
    PROMPT_SUFFIX,
    Announcement,
    HandoverRecord,
    Sampling,
)
from model_adapter.session import CachedSession, Request, RequestReport, Stored
from model_adapter.session.source import TokenIds
from model_adapter.vision import ImagePatches


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What lies in the store for the decode node. Sizes are bytes. `block_bytes`: of all full
    blocks of the prompt, whoever wrote them."""

    first_token: int
    blocks: int
    block_bytes: int
    record_bytes: int
    prompt_bytes: int
    report: RequestReport


def hand_over(
    session: CachedSession,
    client: Client,
    namespace: Namespace,
    request_id: str,
    prompt_ids: TokenIds,
    params: SamplingParams,
    *,
    images: Sequence[ImagePatches] = (),
    drafts: SequenceDrafts | None = None,
    ttl_s: float | None = None,
) -> HandedOver:
    """Prefill a prompt over `session`, whose source is the store at `client`, and leave all that
    decoding needs there under `request_id`, for `ttl_s` seconds (the store's default without).

    Raises `HandoverLost` where the store did not take all of it, and what it raises when it can't
    be reached.
    """
    sampler = Sampler(params, never_generated(session.model.config))
    sampling = Sampling(params.temperature, params.top_p, sampler.seed)
    request = session.request(prompt_ids, 1, images=images, drafts=drafts)
    handle = client.open_namespace(namespace)
    # an earlier request of this name must not be taken for this one
    client.drop_handover(handle, request_id)
    prompt = Announcement(request.ids, tuple(request.spans), sampling).to_bytes()
    announced = client.put_handover(handle, request_id + PROMPT_SUFFIX, prompt, ttl_s=ttl_s)
    _expect(announced, request_id, "the announced prompt", len(prompt))
    first = sampler.token(request.prefill(), 0)
    if drafts is not None:
        drafts.take_up(request.cache.length)
    _expect_blocks(request.stored, request_id)
    record = HandoverRecord(
        handle.snapshot_key(request.ids, request.spans),
        len(request.ids),
        first,
        1,
        sampling,
        request.snapshot(),
    ).to_bytes()
    handed = client.put_handover(handle, request_id, record, ttl_s=ttl_s)
    _expect(handed, request_id, "the hand-over record", len(record))
    return _handed_over(request, namespace, first, len(record), len(prompt))


def _handed_over(
    request: Request, namespace: Namespace, first: int, record_bytes: int, prompt_bytes: int
) -> HandedOver:
    blocks = len(request.ids) // namespace.layout.block_tokens
    size = blocks * namespace.layout.block_bytes
    return HandedOver(first, blocks, size, record_bytes, prompt_bytes, request.report())


def _expect_blocks(stored: Stored, request_id: str) -> None:
    if stored.error:
        raise HandoverLost(f"{request_id} is not handed over: {stored.error}; retry")
    if stored.refused:
        raise HandoverLost(
            f"{request_id} is not handed over: the store refused {stored.refused} of its blocks; "
            "give it more room, then retry"
        )


def _expect(outcome: PutOutcome, request_id: str, what: str, size: int) -> None:
    if outcome is not PutOutcome.STORED:
        raise HandoverLost(
            f"{request_id} is not handed over: the store has no room for {what} of {size} bytes "
            f"({outcome.name}); raise windows.budget_bytes, or retry when others have gone"
        )
