"""An open namespace, as a client holds it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.block import Match, SnapshotPlace, SnapshotRef
from kvstore.errors import InvalidRequest
from kvstore.namespace import Layout, Namespace
from kvstore.prefix_hash import ImageSpan, TokenIds, block_keys, snapshot_key, token_buffer

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class NamespaceHandle:
    """What `open_namespace` returns. `id`: 32 bytes, parent of every chain's first block."""

    id: bytes
    namespace: Namespace

    @property
    def layout(self) -> Layout:
        """The record layout of its blocks."""
        return self.namespace.layout

    def block_keys(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> list[bytes]:
        """Names of the full blocks of a prompt; see `kvstore.prefix_hash.block_keys`."""
        return block_keys(self.id, token_ids, self.layout.block_tokens, images)

    def snapshot_key(self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> bytes:
        """Name of the window snapshot behind exactly these tokens. Raises `InvalidRequest` where
        there is none of them."""
        return self.snapshot_name(token_ids, images)[0]

    def snapshot_name(
        self, token_ids: TokenIds, images: Sequence[ImageSpan] = ()
    ) -> tuple[bytes, SnapshotPlace]:
        """`snapshot_key`, and where the snapshot lies."""
        data = token_buffer(token_ids)
        if not len(data):
            raise InvalidRequest("no tokens: a snapshot lies behind at least one")
        keys = self.block_keys(data, images)
        start = len(keys) * self.layout.block_tokens
        tail = data[start * _TOKEN_BYTES :]
        parent = keys[-1] if keys else self.id
        place = SnapshotPlace(parent, len(keys), len(tail) // _TOKEN_BYTES)
        return snapshot_key(parent, tail, start, images), place

    def longest_snapshot(
        self, match: Match, token_ids: TokenIds, images: Sequence[ImageSpan] = ()
    ) -> SnapshotRef | None:
        """The deepest of a lookup's snapshots that lies on these tokens, with at least one of them
        behind it and all its full blocks among the hits; None where none does."""
        data = token_buffer(token_ids)
        tokens, step = len(data) // _TOKEN_BYTES, self.layout.block_tokens
        keys: list[bytes] | None = None
        for ref in match.snapshots:
            start = ref.blocks * step
            stop = start + ref.tail_tokens
            if ref.blocks > match.hit_blocks or stop >= tokens:
                continue
            if keys is None:
                keys = self.block_keys(data, images)
            parent = keys[ref.blocks - 1] if ref.blocks else self.id
            tail = data[start * _TOKEN_BYTES : stop * _TOKEN_BYTES]
            if snapshot_key(parent, tail, start, images) == ref.key:
                return ref
        return None
