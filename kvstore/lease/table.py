"""Time-bounded rights: who holds what, and until when.

One table serves leases (right to read) and reservations (right to write). It knows ids, owners and
expiry; what a right pins is its payload, which the caller undoes when the right ends. Time is an
argument. Expiry takes no scan: a heap holds exactly one entry per right, and a renewed one is put
back when it comes up.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.errors import InvalidRequest, KVStoreError, Overloaded

T = TypeVar("T")


@dataclass(slots=True)
class Right(Generic[T]):
    """One right. `expires_s`: on the monotonic clock; from that instant on it is over."""

    id: int
    held: T
    expires_s: float


@dataclass(slots=True)
class RightsTable(Generic[T]):
    """All rights of one kind.

    `kind`: its word for messages. `lapsed`: the error for an id that is not there (any more).
    `rights_max`: more are refused. `ttl_s_default`, `ttl_s_max`: what a caller gets without and
    at most. `first_id`: ids count up from it; a random one keeps ids of an earlier run from
    meaning something now.
    """

    kind: str
    lapsed: type[KVStoreError]
    rights_max: int
    ttl_s_default: float
    ttl_s_max: float
    first_id: int = 1
    _rights: dict[int, Right[T]] = field(default_factory=dict, init=False)
    _heap: list[tuple[float, int]] = field(default_factory=list, init=False)
    _granted: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._rights)

    def __iter__(self) -> Iterator[Right[T]]:
        return iter(self._rights.values())

    def clamp_ttl(self, ttl_s: float | None) -> float:
        """What will be granted. Raises `InvalidRequest` for a time that is not above zero."""
        if ttl_s is None:
            return self.ttl_s_default
        if not ttl_s > 0:
            raise InvalidRequest(f"a {self.kind}'s ttl_s must be above 0, not {ttl_s!r}")
        return min(ttl_s, self.ttl_s_max)

    def check_room(self) -> None:
        """Raise `Overloaded` where one more would be too many."""
        if len(self._rights) >= self.rights_max:
            raise Overloaded(
                f"{self.rights_max} {self.kind}s are held, the most allowed; release some"
            )

    def grant(self, held: T, now_s: float, ttl_s: float | None) -> tuple[Right[T], float]:
        """A new right and its lifetime in seconds. Raises `Overloaded`, `InvalidRequest`."""
        self.check_room()
        ttl_s = self.clamp_ttl(ttl_s)
        right = Right(self.first_id + self._granted, held, now_s + ttl_s)
        self._granted += 1
        self._rights[right.id] = right
        heapq.heappush(self._heap, (right.expires_s, right.id))
        return right, ttl_s

    def get(self, right_id: int, now_s: float) -> Right[T]:
        """A right that still holds; raises `lapsed` otherwise."""
        right = self._rights.get(right_id)
        if right is None or right.expires_s <= now_s:
            raise self.lapsed(f"{self.kind} {right_id} has lapsed or was never granted")
        return right

    def renew(self, right_id: int, now_s: float, ttl_s: float | None) -> float:
        """Let it last `ttl_s` from now; returns the lifetime granted. Raises `lapsed`."""
        ttl_s = self.clamp_ttl(ttl_s)
        right = self.get(right_id, now_s)
        right.expires_s = max(right.expires_s, now_s + ttl_s)
        return right.expires_s - now_s

    def end(self, right_id: int) -> Right[T] | None:
        """Take a right away, lapsed or not; None where it is not there (any more)."""
        right = self._rights.pop(right_id, None)
        if len(self._heap) > 64 + 2 * len(self._rights):
            self._heap = [(r.expires_s, r.id) for r in self._rights.values()]
            heapq.heapify(self._heap)
        return right

    def expire(self, now_s: float) -> list[Right[T]]:
        """Take away and return all rights that are over, oldest first."""
        over = []
        while self._heap and self._heap[0][0] <= now_s:
            _, right_id = heapq.heappop(self._heap)
            right = self._rights.get(right_id)
            if right is None:
                continue
            if right.expires_s > now_s:
                heapq.heappush(self._heap, (right.expires_s, right_id))
            else:
                over.append(self._rights.pop(right_id))
        return over

    def next_expiry_s(self) -> float | None:
        """No right ends before this instant; None without any."""
        return self._heap[0][0] if self._rights else None

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the heap would miss an expiry."""
        due = {right_id: at for at, right_id in self._heap}
        for right in self._rights.values():
            assert due.get(right.id, float("inf")) <= right.expires_s, (
                f"{self.kind} {right.id} would never expire"
            )
        assert len(self._rights) <= self.rights_max, f"too many {self.kind}s"
