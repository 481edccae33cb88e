"""Reads a whole database of fixed-size records out of an LMDB 0.9 file, a million in a blink.

LMDB's cursors make two Python objects per record; here numpy gathers the records from the leaf
pages instead. Only for files that are known to be sound (`kvstore.tiers.ssd.index`) and that nobody
writes to meanwhile.

The format (data version 1, 64 bit, little-endian; every offset in bytes): a page starts with its
number u64, pad u16, flags u16, `lower` u16, `upper` u16, and (lower − 16) / 2 node offsets u16. A
node is lo u16, hi u16, flags u16, key size u16, key, data: in a leaf lo and hi are the data's size,
in a branch lo, hi and flags are the child's page number. Pages 0 and 1 are meta pages, of which the
one with the larger transaction number counts.
"""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

_PAGE_HEADER_BYTES = 16
_NODE_HEADER_BYTES = 8
_META = struct.Struct("<IIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_DATA_VERSION = 1
_NO_PAGE = (1 << 64) - 1

Bytes = npt.NDArray[np.uint8]


class UnexpectedPages(Exception):
    """The file is no LMDB file of the kind that this reader knows."""


class _File:
    def __init__(self, path: Path) -> None:
        self.bytes: Bytes = np.memmap(path, np.uint8, "r")
        metas = [self._meta(0)]
        self.page_bytes = _TREE.unpack(metas[0][4])[0]
        metas.append(self._meta(self.page_bytes))
        self.main = _TREE.unpack(max(metas, key=lambda m: m[7])[5])
        whole = len(self.bytes) // self.page_bytes * self.page_bytes
        self.u16 = self.bytes[:whole].view("<u2")

    def _meta(self, at: int) -> tuple[int, int, int, int, bytes, bytes, int, int]:
        meta: tuple[int, int, int, int, bytes, bytes, int, int]
        meta = _META.unpack_from(self.bytes.data, at + _PAGE_HEADER_BYTES)
        if meta[1] != _DATA_VERSION:
            raise UnexpectedPages(f"LMDB data version {meta[1]}, not {_DATA_VERSION}")
        return meta

    def nodes(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offsets of all nodes of these pages, in the order of the keys."""
        start = pages * (self.page_bytes // 2)
        counts = (self.u16[start + 6].astype(np.int64) - _PAGE_HEADER_BYTES) // 2
        columns = np.arange(int(counts.max(initial=0)))
        there = columns < counts[:, None]
        offsets = self.u16[np.where(there, start[:, None] + 8 + columns, 0)].astype(np.int64)
        return np.asarray((offsets + (pages * self.page_bytes)[:, None])[there])

    def pick(self, starts: npt.NDArray[np.int64], length: int) -> Bytes:
        """`length` bytes from each start, a row each. (Rows of plain bytes are copied five times
        as fast as items of a structured type.)"""
        return np.asarray(np.lib.stride_tricks.sliding_window_view(self.bytes, length)[starts])

    def children(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Page numbers that branch nodes point to."""
        at = nodes // 2
        low, high, top = (self.u16[at + i].astype(np.int64) for i in range(3))
        return np.asarray(low | high << 16 | top << 32)

    def leaf_nodes(self, tree: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Byte offsets of all nodes in a tree's leaves."""
        depth, root = tree[2], tree[7]
        if root == _NO_PAGE:
            return np.empty(0, np.int64)
        pages = np.array([root], np.int64)
        for _ in range(depth - 1):
            pages = self.children(self.nodes(pages))
        return self.nodes(pages)

    def find_tree(self, name: bytes) -> tuple[int, ...]:
        """The named database's record in the main one."""
        for at in self.leaf_nodes(self.main).tolist():
            key_bytes = int(self.u16[at // 2 + 3])
            key = at + _NODE_HEADER_BYTES
            if self.bytes[key : key + key_bytes].tobytes() == name:
                return _TREE.unpack_from(self.bytes.data, key + key_bytes)
        raise UnexpectedPages(f"there is no database {name!r}")


def read_records(
    path: Path, name: bytes, key_bytes: int, value_bytes: int
) -> tuple[list[bytes], Bytes]:
    """Keys, and values (a row each), of database `name` in the order of the keys.

    Raises `UnexpectedPages` where a record has other sizes.
    """
    file = _File(path)
    tree = file.find_tree(name)
    nodes = file.leaf_nodes(tree)
    if len(nodes) != tree[6]:
        raise UnexpectedPages(f"{len(nodes)} records where LMDB counts {tree[6]}")
    key_at = nodes + _NODE_HEADER_BYTES
    if len(nodes) and int(key_at.max()) + key_bytes + value_bytes > len(file.bytes):
        raise UnexpectedPages("a record reaches past the end of the file")
    expected = struct.pack("<IHH", value_bytes, 0, key_bytes)
    heads = file.pick(nodes, _NODE_HEADER_BYTES)
    if (heads != np.frombuffer(expected, np.uint8)).any():
        raise UnexpectedPages("a record has other sizes than all should have")
    keys: list[bytes] = file.pick(key_at, key_bytes).view(f"V{key_bytes}")[:, 0].tolist()
    return keys, file.pick(key_at + key_bytes, value_bytes)
