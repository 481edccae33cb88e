"""A lease as an asynchronous client holds it; `kvstore.client.sync` has the blocking one."""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from kvstore.client.arguments import check_ttl
from kvstore.client.namespaces import NamespaceHandle
from kvstore.client.transport import Transport
from kvstore.errors import LeaseExpired, Unavailable, WrongProcess
from kvstore.store.types import LeaseGrant

_log = logging.getLogger(__name__)


class _Owner(Protocol):
    """What a lease needs of the client that acquired it."""

    deadline_s: float

    @property
    def _transport(self) -> Transport: ...


class AsyncLease:
    """A client's time-bounded right to the blocks of a prefix; an async context manager.

    `blocks`: how many of `keys`, from the first on, are pinned. `match`: what the lookup found.
    """

    def __init__(
        self,
        client: _Owner,
        namespace: NamespaceHandle,
        keys: Sequence[bytes],
        grant: LeaseGrant,
    ) -> None:
        self._client = client
        self.namespace = namespace
        self.id = grant.lease_id
        self.keys = tuple(keys[: grant.blocks])
        self.blocks = grant.blocks
        self.ttl_s = grant.ttl_s
        self.match = grant.match
        self._shown: set[bytes] = set()

    async def renew(self, ttl_s: float | None = None) -> float:
        """Hold it for `ttl_s` from now on; returns what was granted. Raises `LeaseExpired`."""
        ttl_s = check_ttl(ttl_s)
        self.ttl_s = await self._client._transport.renew(self.id, ttl_s, self._client.deadline_s)
        return self.ttl_s

    async def release(self) -> None:
        """Give it back. One that has expired is as good as given back."""
        await self._client._transport.release(self.id, self._client.deadline_s)

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.release()
        except (Unavailable, LeaseExpired, WrongProcess) as e:
            # It expires by itself; the error of the body, if any, is the one to see.
            _log.debug("lease %d was not released: %s", self.id, e)
