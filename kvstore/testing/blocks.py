"""Blocks to test with: small layouts, chains, and bytes that tell who wrote them."""

import hashlib
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from kvstore.block import BlockPut
from kvstore.namespace import Layout, Namespace, SectionSpec
from kvstore.prefix_hash import block_keys

TINY_LAYOUT = Layout(
    (
        SectionSpec(2, "main", 2, 288),
        SectionSpec(2, "index", 2, 68),
        SectionSpec(20, "main", 1, 288),
        SectionSpec(20, "index", 1, 68),
    ),
    block_tokens=4,
)
"""The released records in blocks of 4 tokens: 2,136 bytes, one page on every tier."""


def tiny_namespace(name: str = "tiny", tenant: str = "", layout: Layout = TINY_LAYOUT) -> Namespace:
    """A namespace of its own per `name` and `tenant`."""
    return Namespace(model=name, weight_revision="1", layout=layout, tenant=tenant)


def payload(layout: Layout, key: bytes, writer: int = 0) -> list[bytes]:
    """The sections that `writer` computes for `key`: the same every time, different per writer."""
    return [
        hashlib.shake_128(key + bytes([writer, i])).digest(size)
        for i, size in enumerate(layout.section_bytes)
    ]


def chain_keys(namespace_id: bytes, layout: Layout, tokens: Sequence[int]) -> list[bytes]:
    """Keys of a chain whose i-th block consists of the i-th token alone, repeated."""
    ids = np.repeat(np.asarray(tokens, np.uint32), layout.block_tokens)
    return block_keys(namespace_id, ids, layout.block_tokens)


def chain(
    namespace_id: bytes, layout: Layout, tokens: Sequence[int], writer: int = 0, start: int = 0
) -> list[BlockPut]:
    """Blocks of `chain_keys`, from the `start`-th on, as `writer` would put them."""
    keys = [namespace_id, *chain_keys(namespace_id, layout, tokens)]
    return [
        BlockPut(key, parent, payload(layout, key, writer))
        for parent, key in islice(pairwise(keys), start, None)
    ]
