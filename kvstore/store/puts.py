"""The write path: room, bytes, commit, and the wait for durability where it is asked for."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.block import BlockPut, Buffer, Durability, PutOutcome
from kvstore.errors import InvalidRequest, WrongSectionSize
from kvstore.migration.tickets import Ticket
from kvstore.migration.workers import Filling, Lane, as_bytes, fill_frame
from kvstore.namespace import Layout
from kvstore.store.driver import Driver
from kvstore.store.reservations import Draft, Incoming
from kvstore.store.types import PackedBlocks, ReservationGrant
from kvstore.tiers.base import SlotTier
from kvstore.tiers.frame import CHECKSUM_BYTES, BlockName, BlockShape

_PUT_DRAM_FRACTION = 4
_PIECE_BYTES_MIN = 4 << 20
"""Less is not worth another worker: they share the interpreter, and waking one takes time."""
Copy = asyncio.Task[list[bool]]
"""Fills some slots; whether each has what was promised."""
Source = tuple[Sequence[Buffer], bytes]
"""One block's sections and checksums, as `Filling` has them."""


class Puts:
    """See the module."""

    def __init__(self, driver: Driver, dram: SlotTier) -> None:
        self._driver, self._dram = driver, dram
        self._reservations = driver.core.reservations
        self._copies: dict[int, set[Copy]] = {}

    # reserve

    async def reserve(
        self, namespace_id: bytes, blocks: Sequence[tuple[bytes, bytes]], ttl_s: float | None
    ) -> ReservationGrant:
        """See `Engine.reserve`."""
        self._reservations.rights.clamp_ttl(ttl_s)
        self._reservations.check(namespace_id, blocks)
        draft = await self._draft(namespace_id, blocks, set())
        reservation_id, ttl_s = self._reservations.grant(draft, self._driver.now_s(), ttl_s)
        return ReservationGrant(reservation_id, tuple(draft.outcomes), ttl_s)

    async def _draft(
        self, namespace_id: bytes, blocks: Sequence[tuple[bytes, bytes]], refused: set[bytes]
    ) -> Draft:
        """Room for as many blocks as can be had, waiting for it a while."""
        reservations, driver = self._reservations, self._driver
        draft = reservations.begin(namespace_id, [key for key, _ in blocks], refused)
        deadline = driver.deadline(driver.config.limits.room_wait_s_max)
        wall_s = driver.clock.wall_s()
        try:
            for _, parent in blocks:
                while not reservations.reserve_next(draft, parent, wall_s):
                    driver.pump()
                    if not reservations.may_get_room() or not await driver.changed(deadline):
                        reservations.refuse_next(draft)
                        break
                    wall_s = driver.clock.wall_s()
        except BaseException:
            reservations.abandon(draft)
            driver.pump()
            raise
        return draft

    # write

    async def write(
        self,
        reservation_id: int,
        key: bytes,
        sections: Sequence[Buffer],
        checksums: Sequence[bytes] | None,
    ) -> None:
        """See `Engine.write`."""
        now_s = self._driver.now_s()
        draft = self._reservations.rights.get(reservation_id, now_s).held
        layout = self._driver.core.namespaces.layout(draft.number)
        check_sections(layout, sections, checksums)
        incoming = self._reservations.start_copy(reservation_id, key, now_s)
        packed, shape = b"".join(checksums or ()), BlockShape.of(layout.section_bytes)
        work = [(incoming, self._filling(draft, incoming, shape, sections, packed))]
        copies = self._start_copies(work)
        self._copies.setdefault(reservation_id, set()).update(copies)
        for copy in copies:
            copy.add_done_callback(partial(self._forget_copy, reservation_id))
        await _over(copies)

    def _forget_copy(self, reservation_id: int, copy: Copy) -> None:
        copies = self._copies[reservation_id]
        copies.discard(copy)
        if not copies:
            del self._copies[reservation_id]

    def _filling(
        self,
        draft: Draft,
        incoming: Incoming,
        shape: BlockShape,
        sections: Sequence[Buffer],
        checksums: bytes,
    ) -> Filling:
        name = BlockName(
            incoming.key,
            draft.namespace_id,
            incoming.parent,
            incoming.depth,
            incoming.reserved_wall_s,
        )
        return Filling(self._dram.view(incoming.slot), name, shape, sections, checksums)

    def _start_copies(self, work: Sequence[tuple[Incoming, Filling]]) -> list[Copy]:
        """Fill slots, many of them in parallel. Tasks of their own: a slot is in use until its copy
        is over, whoever has gone by then."""
        parts = self._driver.config.migration.verify_workers
        step = max(-(-len(work) // parts), _PIECE_BYTES_MIN // len(work[0][1].frame))
        copies = []
        for at in range(0, len(work), step):
            blocks, fillings = zip(*work[at : at + step], strict=True)
            run = self._driver.workers.run(Lane.BYTES, partial(_fill_all, fillings))
            copies.append(self._driver.loop.create_task(run))
            copies[-1].add_done_callback(partial(self._end_copies, blocks))
        return copies

    def _end_copies(self, blocks: Sequence[Incoming], copy: Copy) -> None:
        failed = copy.cancelled() or copy.exception() is not None
        self._reservations.end_copies(blocks, [False] * len(blocks) if failed else copy.result())
        self._driver.pump()

    # commit

    async def commit(self, reservation_id: int, durability: Durability) -> list[PutOutcome]:
        """See `Engine.commit`."""
        self._check_durability(durability)
        if copies := set(self._copies.get(reservation_id, ())):
            await asyncio.wait(copies)
        outcomes, tickets = self._commit(reservation_id, durability)
        await self._settle(tickets)
        return outcomes

    def _commit(
        self, reservation_id: int, durability: Durability
    ) -> tuple[list[PutOutcome], list[Ticket]]:
        draft = self._reservations.commit(reservation_id, self._driver.now_s())
        tickets = self._tickets(draft, durability)
        self._driver.pump()
        return draft.outcomes, tickets

    def _tickets(self, draft: Draft, durability: Durability) -> list[Ticket]:
        """What to wait for; opened before anything else can happen to the blocks."""
        return [self._reservations.ticket(draft)] if durability is Durability.DURABLE else []

    async def _settle(self, tickets: Sequence[Ticket]) -> None:
        if tickets:
            await self._driver.durable(tickets, self._driver.config.limits.disk_wait_s_max)

    def _check_durability(self, durability: Durability) -> None:
        ssd = self._driver.config.ssd
        if durability is not Durability.DURABLE:
            return
        if self._driver.core.lane is None or ssd is None:
            raise InvalidRequest("this store has no ssd tier; put with durability ACCEPTED")
        if not ssd.sync:
            raise InvalidRequest("ssd.sync is off, nothing is durable; put with ACCEPTED")

    def abort(self, reservation_id: int) -> None:
        """See `Engine.abort`."""
        self._reservations.abort(reservation_id)
        self._driver.pump()

    # all in one

    async def put(
        self, namespace_id: bytes, blocks: Sequence[BlockPut], durability: Durability
    ) -> list[PutOutcome]:
        """See `Engine.put`."""
        names = [(block.key, block.parent) for block in blocks]
        layout = self._check(namespace_id, names, durability)
        for block in blocks:
            check_sections(layout, block.sections, block.checksums)

        def source(place: int) -> Source:
            return blocks[place].sections, b"".join(blocks[place].checksums or ())

        return await self._put(namespace_id, names, source, durability)

    async def put_packed(
        self, namespace_id: bytes, blocks: PackedBlocks, durability: Durability
    ) -> list[PutOutcome]:
        """See `Engine.put_packed`."""
        names = list(zip(blocks.keys, blocks.parents, strict=True))
        layout = self._check(namespace_id, names, durability)
        check_packed(layout, blocks)
        size, step = layout.block_bytes, CHECKSUM_BYTES * len(layout.section_bytes)
        payload, checksums = blocks.payload, blocks.checksums

        def source(place: int) -> Source:
            own = checksums[place * step : (place + 1) * step]
            return (payload[place * size : (place + 1) * size],), own

        return await self._put(namespace_id, names, source, durability)

    def _check(
        self, namespace_id: bytes, names: Sequence[tuple[bytes, bytes]], durability: Durability
    ) -> Layout:
        self._check_durability(durability)
        self._reservations.check(namespace_id, names)
        namespaces = self._driver.core.namespaces
        return namespaces.layout(namespaces.number(namespace_id))

    async def _put(
        self,
        namespace_id: bytes,
        names: Sequence[tuple[bytes, bytes]],
        source: Callable[[int], Source],
        durability: Durability,
    ) -> list[PutOutcome]:
        namespaces = self._driver.core.namespaces
        number = namespaces.number(namespace_id)
        layout = namespaces.layout(number)
        step = self._blocks_at_once(namespaces.frame_bytes(number))
        outcomes: list[PutOutcome] = []
        tickets: list[Ticket] = []
        refused: set[bytes] = set()
        try:
            for at in range(0, len(names), step):
                draft = await self._draft(namespace_id, names[at : at + step], refused)
                from_here = partial(_shifted, source, at)
                tickets += await self._fill(draft, from_here, layout, durability)
                outcomes += draft.outcomes
        except BaseException:
            for ticket in tickets:
                self._driver.core.residency.tickets.close(ticket)
            raise
        await self._settle(tickets)
        return outcomes

    def _blocks_at_once(self, frame_bytes: int) -> int:
        """As many as leave DRAM room for others, and write-back something to do meanwhile."""
        size = min(
            self._dram.budget_bytes // _PUT_DRAM_FRACTION,
            self._driver.config.migration.write_back_bytes_max // 2,
        )
        return max(1, size // frame_bytes)

    async def _fill(
        self,
        draft: Draft,
        source: Callable[[int], Source],
        layout: Layout,
        durability: Durability,
    ) -> list[Ticket]:
        """Copy and commit what the draft reserved; what to wait for."""
        reservation_id, _ = self._reservations.grant(draft, self._driver.now_s(), None)
        if not reservation_id:
            return self._tickets(draft, durability)
        shape = BlockShape.of(layout.section_bytes)
        work = [
            (incoming, self._filling(draft, incoming, shape, *source(incoming.place)))
            for incoming in self._reservations.start_copies(draft)
        ]
        try:
            await _over(self._start_copies(work))
        except BaseException:
            self.abort(reservation_id)
            raise
        return self._commit(reservation_id, durability)[1]


def check_sections(
    layout: Layout, sections: Sequence[Buffer], checksums: Sequence[bytes] | None
) -> None:
    """Raise `WrongSectionSize` where buffers do not fit the layout, `InvalidRequest` where they or
    their checksums are of the wrong kind."""
    expected = layout.section_bytes
    if len(sections) != len(expected):
        raise WrongSectionSize(f"a block has {len(expected)} sections, not {len(sections)}")
    for i, (section, size) in enumerate(zip(sections, expected, strict=True)):
        try:
            given = as_bytes(section).size
        except (TypeError, ValueError, BufferError) as e:
            raise InvalidRequest(f"section {i} is no contiguous buffer: {e}") from e
        if given != size:
            spec = layout.sections[i]
            raise WrongSectionSize(
                f"section {i} (layer {spec.layer}, {spec.role}) has {size} B, not {given}"
            )
    if checksums and (
        len(checksums) != len(expected) or any(len(c) != CHECKSUM_BYTES for c in checksums)
    ):
        raise InvalidRequest(f"checksums are {len(expected)} digests of {CHECKSUM_BYTES} B")


def check_packed(layout: Layout, blocks: PackedBlocks) -> None:
    """`check_sections`, for all of them."""
    expected, n = layout.section_bytes, len(blocks.keys)
    if tuple(blocks.section_bytes) != expected or len(blocks.payload) != n * layout.block_bytes:
        raise WrongSectionSize(
            f"a block has sections of {expected} B, not {tuple(blocks.section_bytes)}, and {n} "
            f"blocks have {n * layout.block_bytes} B, not {len(blocks.payload)}"
        )
    if blocks.checksums and len(blocks.checksums) != n * len(expected) * CHECKSUM_BYTES:
        raise InvalidRequest(
            f"checksums are {len(expected)} digests of {CHECKSUM_BYTES} B per block, "
            f"not {len(blocks.checksums)} B"
        )


def _shifted(source: Callable[[int], Source], first: int, place: int) -> Source:
    return source(first + place)


async def _over(copies: Sequence[Copy]) -> None:
    """Until all of them are; raises what one of them did."""
    await asyncio.wait(copies)
    for copy in copies:
        copy.result()


def _fill_all(work: Sequence[Filling]) -> list[bool]:
    return [fill_frame(filling) for filling in work]
