"""The client's calls for window snapshots and hand-over records, asynchronous."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import xxhash

from kvstore.block import Buffer, PutOutcome, check_window_name
from kvstore.client.arguments import check_ttl, check_wait
from kvstore.client.batching import section_view
from kvstore.client.namespaces import NamespaceHandle
from kvstore.client.transport import Transport
from kvstore.errors import InvalidRequest
from kvstore.prefix_hash import ImageSpan, TokenIds
from kvstore.server.messages import check_digest
from kvstore.store.types import WindowHead, WindowPut

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def _put_of(head: Callable[[int, bytes], WindowHead], payload: Buffer) -> WindowPut:
    view = section_view(payload, "payload")
    return WindowPut(head(len(view), xxhash.xxh3_128_digest(view)), view)


class AsyncWindows:
    """The part of `kvstore.client.aio.AsyncClient` that deals with the window pool."""

    deadline_s: float
    corrupt_windows: int
    """Payloads that this client received with a wrong checksum; each was returned as a miss."""

    @property
    def _transport(self) -> Transport:
        raise NotImplementedError

    async def _in(self, ns: NamespaceHandle, call: Callable[[], Awaitable[_T]]) -> _T:
        raise NotImplementedError

    async def put_snapshot(
        self,
        ns: NamespaceHandle,
        token_ids: TokenIds,
        payload: Buffer,
        *,
        images: Sequence[ImageSpan] = (),
        ttl_s: float | None = None,
    ) -> PutOutcome:
        """Store the window snapshot behind exactly these tokens, in the place of an earlier one.

        `payload`: any contiguous bytes. `ttl_s`: until it goes by itself (`windows.ttl_s_default`
        without, `windows.ttl_s_max` at most). NO_SPACE where the pool is full of objects that
        can't go. Raises `MessageTooLarge` for more than `windows.payload_bytes_max`.
        """
        ttl_s = check_ttl(ttl_s)
        key, place = ns.snapshot_name(token_ids, images)
        put = _put_of(lambda size, checksum: WindowHead(key, place, size, checksum, ttl_s), payload)
        return await self._in(ns, lambda: self._transport.put_window(ns.id, put, self.deadline_s))

    async def get_window(self, ns: NamespaceHandle, key: bytes) -> bytes | None:
        """The payload of a window snapshot, verified; None for a miss: it never was there, has
        expired, was evicted or arrived corrupt."""
        return await self._get(ns, check_digest(key, "key"))

    async def put_handover(
        self, ns: NamespaceHandle, request_id: str, payload: Buffer, *, ttl_s: float | None = None
    ) -> PutOutcome:
        """Store the hand-over record of a request, in the place of an earlier one; as
        `put_snapshot`."""
        check_window_name(_text(request_id))
        ttl_s = check_ttl(ttl_s)
        put = _put_of(
            lambda size, checksum: WindowHead(request_id, None, size, checksum, ttl_s), payload
        )
        return await self._in(ns, lambda: self._transport.put_window(ns.id, put, self.deadline_s))

    async def wait_handover(
        self, ns: NamespaceHandle, request_id: str, deadline_s: float
    ) -> bytes | None:
        """The payload of a hand-over record, verified, as soon as it is there; None where it did
        not come within `deadline_s` from now. Reading does not consume it.

        Raises `Unavailable` where the daemon goes meanwhile: what it held is lost.
        """
        check_window_name(_text(request_id))
        ends_s = time.monotonic() + check_wait(deadline_s)
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            if await self._wait_window(ns, request_id, left_s):
                payload = await self._get(ns, request_id)
                if payload is not None:
                    return payload
            if time.monotonic() >= ends_s:
                return None

    async def _wait_window(self, ns: NamespaceHandle, request_id: str, wait_s: float) -> bool:
        return await self._in(
            ns, lambda: self._transport.wait_window(ns.id, request_id, wait_s, self.deadline_s)
        )

    async def drop_handover(self, ns: NamespaceHandle, request_id: str) -> bool:
        """Let a hand-over record go; whether it was there."""
        check_window_name(_text(request_id))
        return await self._in(
            ns, lambda: self._transport.drop_window(ns.id, request_id, self.deadline_s)
        )

    async def _get(self, ns: NamespaceHandle, name: bytes | str) -> bytes | None:
        arrived = await self._in(
            ns, lambda: self._transport.get_window(ns.id, name, self.deadline_s)
        )
        if arrived is None:
            return None
        if xxhash.xxh3_128_digest(arrived.payload) != arrived.checksum:
            self.corrupt_windows += 1
            _log.warning("a window payload arrived with a wrong checksum: %r", name)
            return None
        return arrived.payload


def _text(request_id: object) -> str:
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id is text, not {type(request_id).__name__}")
    return request_id
