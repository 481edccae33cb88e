"""Who is in the window pool, who goes, and which snapshots lie on a chain. Decisions only: time is
an argument, bytes are copied by the caller.

An object is a window snapshot, named by its key, or a hand-over record, named by its request id. It
is put in two steps: `reserve` makes room, for which the least recently used objects go, and `put`
makes what the caller has copied there an object, in the place of one of the same name. What
somebody reads (`use`) keeps its memory until the last reader has ended; nothing else outlives its
expiry, its successor or its eviction.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.block import SnapshotPlace, SnapshotRef
from kvstore.config import WindowsConfig
from kvstore.metrics import Metrics
from kvstore.windows.arena import Extent, WindowArena

Name = bytes | str
"""A snapshot's key, or a hand-over's request id: bytes and text are never equal."""
_HEAP_SLACK = 64


@dataclass(slots=True, eq=False)
class Room:
    """Memory for an object on its way in."""

    extent: Extent
    payload_bytes: int


@dataclass(slots=True, eq=False)
class Held:
    """An object. `place`: of a snapshot; None for a hand-over. `checksum`: xxh3-128 of the payload.
    `expires_s`: on the monotonic clock; from that instant on it is over. `live`: False once it has
    left and only its readers keep its memory."""

    namespace: int
    name: Name
    place: SnapshotPlace | None
    extent: Extent
    payload_bytes: int
    checksum: bytes
    expires_s: float
    users: int = 0
    live: bool = True

    @property
    def ref(self) -> SnapshotRef:
        """What a lookup says of it. For snapshots only."""
        assert self.place is not None
        assert isinstance(self.name, bytes)
        return SnapshotRef(self.name, self.place.blocks, self.place.tail_tokens, self.payload_bytes)


@dataclass(slots=True)
class WindowPool:
    """See the module. Objects of one namespace (by the store's number) are unseen by another."""

    config: WindowsConfig
    arena: WindowArena
    metrics: Metrics
    payload_bytes: int = field(default=0, init=False)
    """Of all live objects."""
    _live: dict[tuple[int, Name], Held] = field(default_factory=dict, init=False)
    """In the order of their last use."""
    _behind: dict[int, dict[bytes, dict[bytes, Held]]] = field(default_factory=dict, init=False)
    """Snapshots by namespace, parent and key."""
    _heap: list[tuple[float, int, Held]] = field(default_factory=list, init=False)
    _rooms: dict[int, Room] = field(default_factory=dict, init=False)
    _leaving: dict[int, Held] = field(default_factory=dict, init=False)
    """No longer live, still read; both by the first page."""
    _held_pages: int = field(default=0, init=False)
    """Of rooms and of objects that somebody reads: what eviction can't take."""
    _serial: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._live)

    # in

    def reserve(self, payload_bytes: int, now_s: float) -> Room | None:
        """Room for a payload; `put` or `discard` MUST follow. None where even without all that may
        go there would be too little."""
        self.expire(now_s)
        needed = self.arena.pages_for(payload_bytes)
        if needed + self._held_pages > self.arena.pages:
            return None
        if len(self._rooms) + len(self._leaving) >= self.config.objects_max:
            return None
        while len(self._live) + len(self._rooms) + len(self._leaving) >= self.config.objects_max:
            if not self._evict_one():
                return None
        while (extent := self.arena.alloc(payload_bytes)) is None:
            if not self._evict_one():
                return None
        room = self._rooms[extent.start] = Room(extent, payload_bytes)
        self._held_pages += extent.pages
        return room

    def discard(self, room: Room) -> None:
        """Give room back unused."""
        self._leave_room(room)
        self.arena.free(room.extent)

    def put(
        self,
        room: Room,
        namespace: int,
        name: Name,
        place: SnapshotPlace | None,
        checksum: bytes,
        expires_s: float,
    ) -> Held:
        """Make what lies in `room` an object, the most recently used. One of the same name goes."""
        self._leave_room(room)
        old = self._live.get((namespace, name))
        if old is not None:
            self.remove(old)
        held = Held(namespace, name, place, room.extent, room.payload_bytes, checksum, expires_s)
        self._live[namespace, name] = held
        self.payload_bytes += held.payload_bytes
        if place is not None:
            assert isinstance(name, bytes)
            of_namespace = self._behind.setdefault(namespace, {})
            of_namespace.setdefault(place.parent, {})[name] = held
        self._serial += 1
        heapq.heappush(self._heap, (expires_s, self._serial, held))
        return held

    def _leave_room(self, room: Room) -> None:
        del self._rooms[room.extent.start]
        self._held_pages -= room.extent.pages

    # out

    def expire(self, now_s: float) -> None:
        """Let everything that has lapsed go."""
        while self._heap and self._heap[0][0] <= now_s:
            held = heapq.heappop(self._heap)[2]
            if held.live:
                self.remove(held)
                self.metrics.add("windows_expired")

    def drop(self, namespace: int, name: Name, now_s: float) -> bool:
        """Let one go; whether it was there."""
        held = self.peek(namespace, name, now_s)
        if held is not None:
            self.remove(held)
        return held is not None

    def _evict_one(self) -> bool:
        """The least recently used that nobody reads goes; False where there is none."""
        for held in self._live.values():
            if not held.users:
                self.remove(held)
                self.metrics.add("windows_evicted")
                return True
        return False

    def remove(self, held: Held) -> None:
        """Let a live object go; its memory is free at once, or when its last reader has ended."""
        held.live = False
        del self._live[held.namespace, held.name]
        self.payload_bytes -= held.payload_bytes
        if held.place is not None:
            self._forget_place(held, held.place)
        if held.users:
            self._leaving[held.extent.start] = held
        else:
            self.arena.free(held.extent)
        if len(self._heap) > _HEAP_SLACK + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)

    def _forget_place(self, held: Held, place: SnapshotPlace) -> None:
        of_namespace = self._behind[held.namespace]
        behind = of_namespace[place.parent]
        assert isinstance(held.name, bytes)
        del behind[held.name]
        if not behind:
            del of_namespace[place.parent]
        if not of_namespace:
            del self._behind[held.namespace]

    # reads

    def peek(self, namespace: int, name: Name, now_s: float) -> Held | None:
        """The object of a name, or None. Is no use of it."""
        self.expire(now_s)
        return self._live.get((namespace, name))

    def use(self, held: Held) -> memoryview:
        """The payload of a live object, which stays until `end_use`. Makes it the most recently
        used."""
        self._live[held.namespace, held.name] = self._live.pop((held.namespace, held.name))
        if not held.users:
            self._held_pages += held.extent.pages
        held.users += 1
        return self.arena.view(held.extent, held.payload_bytes).toreadonly()

    def end_use(self, held: Held) -> None:
        """One reader has ended."""
        held.users -= 1
        if held.users:
            return
        self._held_pages -= held.extent.pages
        if not held.live:
            del self._leaving[held.extent.start]
            self.arena.free(held.extent)

    def room_view(self, room: Room) -> memoryview:
        """Where the payload is to be copied."""
        return self.arena.view(room.extent, room.payload_bytes)

    # lookups

    def on_chain(
        self, namespace: int, namespace_id: bytes, keys: Sequence[bytes], now_s: float
    ) -> tuple[SnapshotRef, ...]:
        """Snapshots whose parent is one of `keys` or the namespace itself, deepest first, among
        equals the latest first; at most `candidates_max`."""
        self.expire(now_s)
        of_namespace = self._behind.get(namespace)
        if not of_namespace:
            return ()
        there: Iterable[bytes] = of_namespace
        if len(of_namespace) > len(keys):
            there = of_namespace.keys() & {namespace_id, *keys}
        found = [
            held
            for parent in there
            for held in reversed(of_namespace[parent].values())
            if _parent_at(held, namespace_id, keys) == parent
        ]
        found.sort(key=_position, reverse=True)
        return tuple([held.ref for held in found[: self.config.candidates_max]])

    # the books

    def __iter__(self) -> Iterator[Held]:
        return iter(self._live.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` saying which books disagree."""
        self.arena.check_integrity()
        live, rooms, leaving = self._live, self._rooms, self._leaving
        assert self.arena.used_bytes <= self.arena.budget_bytes, "the budget is passed"
        assert len(live) + len(rooms) + len(leaving) <= self.config.objects_max, "too many objects"
        extents = [held.extent for held in (*live.values(), *leaving.values())]
        extents += [room.extent for room in rooms.values()]
        assert len({extent.start for extent in extents}) == len(extents), "two share memory"
        assert sum(extent.pages for extent in extents) == self.arena.used_pages, "memory is lost"
        taken = [held.extent for held in (*live.values(), *leaving.values()) if held.users]
        taken += [room.extent for room in rooms.values()]
        held_pages = sum(extent.pages for extent in taken)
        assert held_pages == self._held_pages, (
            f"{held_pages} pages held, {self._held_pages} counted"
        )
        assert sum(h.payload_bytes for h in live.values()) == self.payload_bytes, "bytes differ"
        for (namespace, name), held in live.items():
            assert (held.namespace, held.name, held.live) == (namespace, name, True), "misplaced"
        assert all(held.users and not held.live for held in leaving.values()), "left over"
        due = {id(held) for _, _, held in self._heap}
        assert all(id(held) in due for held in live.values()), "an object would never expire"
        assert len(self._heap) <= _HEAP_SLACK + 2 * len(live) + 1, "the heap grows"
        self._check_places()

    def _check_places(self) -> None:
        told = {
            (namespace, parent, key): held
            for namespace, parents in self._behind.items()
            for parent, behind in parents.items()
            for key, held in behind.items()
        }
        snapshots = {
            (held.namespace, held.place.parent, held.name): held
            for held in self._live.values()
            if held.place is not None
        }
        assert told == snapshots, "the index of parents differs"
        assert all(p for parents in self._behind.values() for p in (parents, *parents.values()))


def _position(held: Held) -> tuple[int, int]:
    assert held.place is not None
    return held.place.blocks, held.place.tail_tokens


def _parent_at(held: Held, namespace_id: bytes, keys: Sequence[bytes]) -> bytes | None:
    """The key that a snapshot's position asks for; None behind the end."""
    assert held.place is not None
    blocks = held.place.blocks
    if not blocks:
        return namespace_id
    return keys[blocks - 1] if blocks <= len(keys) else None
