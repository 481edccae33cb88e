"""Chains of blocks in the tiny layout, for tests of the core and of the engine."""

from collections.abc import Iterable

from kvstore.block import BlockPut
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace

NS = tiny_namespace()


def blocks_of(namespace_id: bytes, tokens: Iterable[int], **more) -> list[BlockPut]:
    """One block per token; `more` as `kvstore.testing.blocks.chain` has it."""
    return chain(namespace_id, TINY_LAYOUT, list(tokens), **more)


def keys_of(blocks: list[BlockPut]) -> list[bytes]:
    return [block.key for block in blocks]


def names_of(blocks: list[BlockPut]) -> list[tuple[bytes, bytes]]:
    """What a reservation asks for."""
    return [(block.key, block.parent) for block in blocks]
