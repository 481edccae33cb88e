"""Blocks by what people type: the first digits of a key; and what lies behind a block."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.namespace import DIGEST_BYTES
from kvstore.store.types import BlockInfo

_PAGE_BLOCKS = 10_000
_SHOWN_MAX = 5


def listed(client: Client, namespace_id: bytes | None = None) -> Iterator[BlockInfo]:
    """All blocks of a store, or of a namespace."""
    after = None
    while blocks := client.ls(namespace_id, _PAGE_BLOCKS, after):
        yield from blocks
        after = blocks[-1].key


def check_prefix(text: str) -> str:
    """The digits in lower case. Raises `InvalidRequest` where it can't begin a key."""
    digits = text.lower()
    if not digits or set(digits) - set("0123456789abcdef") or len(digits) > 2 * DIGEST_BYTES:
        raise InvalidRequest(
            f"key {text!r} is not 64 hex digits, nor the first of them; `kvstore ls` shows keys"
        )
    return digits


def find(client: Client, prefixes: Iterable[str], namespace_id: bytes | None) -> dict[bytes, bytes]:
    """The namespace of each block that a prefix means, by its key. Raises `InvalidRequest` where
    one is no block's or several blocks'."""
    given = [check_prefix(p) for p in prefixes]
    found: dict[str, list[BlockInfo]] = {p: [] for p in given}
    for block in listed(client, namespace_id):
        digits = block.key.hex()
        for p in given:
            if digits.startswith(p):
                found[p].append(block)
    return {block.key: block.namespace_id for p in given for block in [_only(p, found[p])]}


def _only(prefix: str, found: list[BlockInfo]) -> BlockInfo:
    if not found:
        raise InvalidRequest(f"no block's key begins with {prefix}")
    if len(found) > 1:
        some = ", ".join(b.key.hex() for b in found[:_SHOWN_MAX])
        more = " …" if len(found) > _SHOWN_MAX else ""
        raise InvalidRequest(f"{len(found)} blocks' keys begin with {prefix}: {some}{more}")
    return found[0]


def behind(client: Client, of: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The blocks that continue those of `of`, however far, without these; as `find` returns."""
    found: dict[bytes, bytes] = {}
    for namespace_id in set(of.values()):
        children: dict[bytes, list[bytes]] = defaultdict(list)
        for block in listed(client, namespace_id):
            children[block.parent].append(block.key)
        queue = [key for key, where in of.items() if where == namespace_id]
        while queue:
            new = [key for key in children[queue.pop()] if key not in found]
            found.update(dict.fromkeys(new, namespace_id))
            queue += new
    return {key: where for key, where in found.items() if key not in of}
