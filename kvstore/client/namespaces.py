"""An open namespace, as a client holds it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.namespace import Layout, Namespace
from kvstore.prefix_hash import ImageSpan, TokenIds, block_keys


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
