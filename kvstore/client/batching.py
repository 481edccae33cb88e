"""What a client checks and splits before anything is sent."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

import xxhash

from kvstore.block import BlockData, BlockPut, Buffer
from kvstore.errors import BlockOutOfOrder, InvalidRequest, MessageTooLarge, WrongSectionSize
from kvstore.namespace import Layout
from kvstore.server import wire
from kvstore.server.messages import check_digests, check_some

BATCH_BLOCKS_MAX = 4096
"""Blocks per batch, however small they are."""
BATCH_BYTES = 4 << 20
"""Bytes per batch, unless one block is larger: enough to make the cost of a call small, and so few
that malloc on both sides finds the memory of the last one again."""
BULK_PUT_BYTES = 8 << 20
"""The same for puts on the data port: so few that one is made ready while the last is taken in."""
BULK_READ_BYTES = 16 << 20
"""The same for reads, which are verified piece by piece while they come."""
DURABLE_BATCH_BYTES = 16 << 20
"""The same for a durable put, which costs a sync per batch."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises `InvalidRequest` where there is none, or one is not 32 bytes."""
    check_some(keys, "keys")
    check_digests(keys, "key")


def check_sections(sections: Sequence[int] | None, layout: Layout) -> tuple[int, ...]:
    """Indices of the sections asked for, all of them for None. Raises `InvalidRequest`."""
    known = len(layout.sections)
    if sections is None:
        return tuple(range(known))
    given = tuple(sections)
    if not given:
        raise InvalidRequest("no sections: name at least one, or leave the argument out for all")
    wanted = []
    for index in given:
        whole = hasattr(index, "__index__") and not isinstance(index, bool)
        if not whole or not 0 <= operator.index(index) < known:
            raise InvalidRequest(f"section {index!r} is not among the layout's 0 … {known - 1}")
        wanted.append(operator.index(index))
    return tuple(wanted)


def section_view(section: Buffer, where: str) -> memoryview:
    """A section as bytes. Raises `InvalidRequest`."""
    try:
        return wire.byte_view(section)
    except TypeError as e:
        raise InvalidRequest(
            f"{where}: sections are contiguous buffers of bytes, not {type(section).__name__} ({e})"
        ) from e


def check_room(into: Buffer, size: int) -> memoryview:
    """Writable memory of at least `size` bytes. Raises `InvalidRequest`."""
    view = section_view(into, "into")
    if view.readonly or len(view) < size:
        kind = "read-only" if view.readonly else "writable"
        raise InvalidRequest(f"into: {len(view)} {kind} B, where {size} writable ones are needed")
    return view


def moved_into(
    into: memoryview, blocks: Sequence[BlockData], sizes: Sequence[int]
) -> list[BlockData]:
    """The same blocks, their bytes in `into`."""
    out = []
    for i, block in enumerate(blocks):
        at, sections = i * sum(sizes), []
        for section in block.sections:
            to = into[at : at + len(section)]
            to[:] = section
            sections.append(to)
            at += len(section)
        out.append(replace(block, sections=tuple(sections)))
    return out


def check_section_bytes(sections: Sequence[Buffer], layout: Layout, where: str) -> list[memoryview]:
    """The sections as bytes. Raises `WrongSectionSize`, `InvalidRequest`."""
    try:
        views = list(map(wire.byte_view, sections))
    except TypeError:
        views = [section_view(section, where) for section in sections]
    sizes = tuple(map(len, views))
    if sizes != layout.section_bytes:
        raise WrongSectionSize(
            f"{where}: sections of {sizes} B; the namespace's layout has {layout.section_bytes}"
        )
    return views


def check_blocks(blocks: Sequence[BlockPut], layout: Layout) -> list[list[memoryview]]:
    """Check a whole put, so that a wrong block is found before any batch was sent.

    Returns the sections as bytes, per block. Raises `WrongSectionSize`, `BlockOutOfOrder`,
    `InvalidRequest`.
    """
    check_some(blocks, "blocks")
    check_digests([block.key for block in blocks], "key of block")
    check_digests([block.parent for block in blocks], "parent of block")
    views = []
    for i, block in enumerate(blocks):
        views.append(check_section_bytes(block.sections, layout, f"block {i}"))
        if block.checksums is not None:
            check_checksums(block.checksums, layout, f"block {i}")
    check_order([(block.key, block.parent) for block in blocks])
    return views


def check_order(blocks: Sequence[tuple[bytes, bytes]]) -> None:
    """`blocks`: key and parent. Raises `BlockOutOfOrder` for a child before its parent."""
    first: dict[bytes, int] = {}
    for i, (key, _) in enumerate(blocks):
        first.setdefault(key, i)
    for i, (_, parent) in enumerate(blocks):
        if first.get(parent, -1) >= i:
            raise BlockOutOfOrder(
                f"block {i} comes before its parent, which is block {first[parent]}; "
                "put a chain from its root on"
            )


def check_checksums(checksums: Sequence[bytes], layout: Layout, where: str) -> None:
    """Raises `InvalidRequest` unless there are 16 bytes per section."""
    if [len(c) for c in checksums] != [wire.CHECKSUM_BYTES] * len(layout.sections):
        raise InvalidRequest(
            f"{where}: {len(layout.sections)} checksums of {wire.CHECKSUM_BYTES} B are needed, "
            f"not {[len(c) for c in checksums]}"
        )


def checksums_of(sections: Sequence[memoryview]) -> tuple[bytes, ...]:
    """xxh3-128 per section, 16 bytes each."""
    return tuple([xxhash.xxh3_128_digest(section) for section in sections])


def with_checksums(block: BlockPut, views: Sequence[memoryview]) -> BlockPut:
    """The block with its sections as bytes and its checksums set."""
    checksums = block.checksums if block.checksums is not None else checksums_of(views)
    return replace(block, sections=views, checksums=checksums)


def blocks_per_batch(
    section_bytes: Sequence[int], message_bytes_max: int | None, batch_bytes: int = BATCH_BYTES
) -> int:
    """How many blocks of these sections to send at a time.

    Raises `MessageTooLarge` where a message does not take one.
    """
    one = (
        sum(section_bytes)
        + len(section_bytes) * wire.SECTION_OVERHEAD_BYTES
        + wire.BLOCK_OVERHEAD_BYTES
    )
    if message_bytes_max is not None:
        room = message_bytes_max - wire.MESSAGE_OVERHEAD_BYTES
        if one > room:
            raise MessageTooLarge(
                f"one block takes {one} B of a message, and the daemon takes {message_bytes_max} B "
                "at a time; raise server.message_bytes_max, or read fewer sections at a time"
            )
        batch_bytes = min(batch_bytes, room)
    return min(max(batch_bytes // one, 1), BATCH_BLOCKS_MAX)


def bulk_blocks(
    section_bytes: Sequence[int], batch_bytes: int, frame_bytes_max: int, message_bytes_max: int
) -> int:
    """How many blocks to move in one frame of the data port, whose message names them. Raises
    `MessageTooLarge`."""
    block_bytes = sum(section_bytes)
    if block_bytes > frame_bytes_max:
        raise MessageTooLarge(
            f"one block has {block_bytes} B, and a frame of the data port {frame_bytes_max} B; "
            "raise server.data_port.frame_bytes_max, or read fewer sections at a time"
        )
    wanted = min(batch_bytes, frame_bytes_max) // max(block_bytes, 1)
    named = (message_bytes_max - wire.MESSAGE_OVERHEAD_BYTES) // (
        wire.BLOCK_OVERHEAD_BYTES + wire.CHECKSUM_BYTES * len(section_bytes)
    )
    return min(max(wanted, 1), named, BATCH_BLOCKS_MAX)


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count` items."""
    for at in range(0, count, size):
        yield slice(at, min(at + size, count))
