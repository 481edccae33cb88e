"""Reads a whole database of fixed-size records out of an LMDB 0.9 file, a million in a blink, and
checks a file that nobody vouches for before LMDB gets to see it.

LMDB's cursors make two Python objects per record, and `lmdb.verify` many more; here NumPy gathers
records from the leaf pages, and looks at all pages of a level at once. Nobody may write to the file
meanwhile.

The format (data version 1, 64 bit, little-endian; every offset in bytes): a page starts with its
number u64, pad u16, flags u16, `lower` u16, `upper` u16, and (lower − 16) / 2 node offsets u16. A
node is lo u16, hi u16, flags u16, key size u16, key, data: in a leaf lo and hi are the data's size,
in a branch lo, hi and flags are the child's page number, and the first key of a branch means
nothing. Data too large for a leaf lie on pages of their own behind one page header, whose `lower`
and `upper` are the number of pages, u32; the leaf has the first one's number. Pages 0 and 1 are
meta pages, of which the one with the larger transaction number counts. The free list is a tree of
its own: transaction number → count u64 and page numbers u64, descending.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_HEADER_BYTES = 16
_NODE_HEADER_BYTES = 8
_META = struct.Struct("<IIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG, _TREE_INSIDE = 1, 2
_NO_PAGE = (1 << 64) - 1
_METAS = 2
_DEPTH_MAX = 32
_CHUNK_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int64]


class UnexpectedPages(Exception):
    """The file is no sound LMDB file of the kind that this reader knows."""


class _Tree(NamedTuple):
    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Node(NamedTuple):
    key: bytes
    data: bytes
    flags: int


@dataclass(slots=True)
class _Walk:
    """A tree's leaves, left to right, and its separators: per branch level, for every child but the
    first of its page, where the separating key lies and which leaf is the child's first."""

    leaves: Pages
    separators: list[tuple[Pages, Pages]] = field(default_factory=list)


def _require(sound: object, what: str) -> None:
    if not sound:
        raise UnexpectedPages(what)


def _mapped(path: Path) -> Bytes:
    """A file's bytes, all of them mapped at once: a page at a time takes far longer."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    with path.open("rb") as f:
        try:
            return np.frombuffer(mmap.mmap(f.fileno(), 0, flags, mmap.PROT_READ), np.uint8)
        except ValueError:
            raise UnexpectedPages("the file is empty") from None


class _File:
    def __init__(self, path: Path) -> None:
        self.bytes = _mapped(path)
        try:
            metas = [self._meta(0)]
            self.page_bytes = _Tree(*_TREE.unpack(metas[0][4])).pad
            size = self.page_bytes
            _require(256 <= size <= 1 << 16 and not size & (size - 1), f"pages of {size} B")
            metas.append(self._meta(size))
        except struct.error:
            raise UnexpectedPages(f"{len(self.bytes)} B are too few") from None
        self.metas = metas
        self.meta = max(metas, key=lambda m: m[7])
        self.free = _Tree(*_TREE.unpack(self.meta[4]))
        self.main = _Tree(*_TREE.unpack(self.meta[5]))
        whole = len(self.bytes) // size * size
        self.u16 = self.bytes[:whole].view("<u2")
        self.u64 = self.bytes[:whole].view("<u8")
        self.pages = min(whole // size, self.meta[6] + 1)
        self.seen = np.zeros(self.pages, np.bool_)

    def _meta(self, at: int) -> tuple[int, int, int, int, bytes, bytes, int, int]:
        meta: tuple[int, int, int, int, bytes, bytes, int, int]
        meta = _META.unpack_from(self.bytes.data, at + _PAGE_HEADER_BYTES)
        if meta[:2] != (_MAGIC, _DATA_VERSION):
            raise UnexpectedPages(f"LMDB data version {meta[1]}, not {_DATA_VERSION}")
        return meta

    # pages and nodes, many at a time

    def counts(self, pages: Pages) -> Pages:
        """How many nodes each page has."""
        lower = self.u16[pages * (self.page_bytes // 2) + 6].astype(np.int64)
        return np.asarray((lower - _PAGE_HEADER_BYTES) // 2)

    def nodes(self, pages: Pages) -> Pages:
        """Byte offsets of all nodes of these pages, in the order of the keys."""
        start, counts = pages * (self.page_bytes // 2), self.counts(pages)
        columns = np.arange(int(counts.max(initial=0)))
        there = columns < counts[:, None]
        offsets = self.u16[np.where(there, start[:, None] + 8 + columns, 0)].astype(np.int64)
        return np.asarray((offsets + (pages * self.page_bytes)[:, None])[there])

    def pick(self, starts: Pages, length: int) -> Bytes:
        """`length` bytes from each start, a row each. (Rows of plain bytes are copied five times
        as fast as items of a structured type.)"""
        return np.asarray(np.lib.stride_tricks.sliding_window_view(self.bytes, length)[starts])

    def children(self, nodes: Pages) -> Pages:
        """Page numbers that branch nodes point to."""
        at = nodes // 2
        low, high, top = (self.u16[at + i].astype(np.int64) for i in range(3))
        return np.asarray(low | high << 16 | top << 32)

    def check_pages(self, pages: Pages, kind: int) -> None:
        """Pages that a tree points to: each there, for the first time, and what it should be."""
        _require(len(pages) and pages.min() >= _METAS, "a tree points to no page")
        _require(pages.max() < self.pages, "a tree points behind the end of the file")
        before = np.count_nonzero(self.seen)
        self.seen[pages] = True
        once = np.count_nonzero(self.seen) == before + len(pages)
        _require(once, "a page is reached twice")
        _require(
            (self.u64[pages * (self.page_bytes // 8)] == pages.view("u8")).all(), "page number"
        )
        at = pages * (self.page_bytes // 2)
        _require((self.u16[at + 5] == kind).all(), f"a page is not of kind {kind}")
        if kind == _OVERFLOW:
            return
        lower, upper = self.u16[at + 6], self.u16[at + 7]
        sound = (lower >= _PAGE_HEADER_BYTES) & (lower <= upper) & (upper <= self.page_bytes)
        _require(sound.all(), "a page's bounds are off")

    def check_nodes(self, pages: Pages, nodes: Pages, record_bytes: int | None = None) -> None:
        """That each node and its key, or `record_bytes` behind its header, lie in their page,
        behind the offsets."""
        owners = np.repeat(pages, self.counts(pages))
        upper = self.u16[owners * (self.page_bytes // 2) + 7]
        inside = nodes - owners * self.page_bytes
        _require((inside % 2 == 0).all() and (inside >= upper).all(), "a node is out of place")
        _require((inside + _NODE_HEADER_BYTES <= self.page_bytes).all(), "a node leaves its page")
        size = self.u16[nodes // 2 + 3] if record_bytes is None else record_bytes
        ends = inside + _NODE_HEADER_BYTES + size
        _require((ends <= self.page_bytes).all(), "a record leaves its page")

    # trees

    def leaves(self, tree: _Tree) -> Pages:
        """A sound tree's leaves, left to right."""
        if tree.root == _NO_PAGE:
            return np.empty(0, np.int64)
        pages = np.array([tree.root], np.int64)
        for _ in range(tree.depth - 1):
            pages = self.children(self.nodes(pages))
        return pages

    def walk(self, tree: _Tree) -> _Walk:
        """`leaves` of a tree that is checked on the way."""
        if tree.root == _NO_PAGE:
            _require(not any(tree[2:7]), "an empty tree counts pages")
            return _Walk(np.empty(0, np.int64))
        _require(1 <= tree.depth <= _DEPTH_MAX, f"a tree of depth {tree.depth}")
        _require(tree.root < self.pages, "a root lies behind the end of the file")
        pages, levels, branches = np.array([tree.root], np.int64), [], 0
        for _ in range(tree.depth - 1):
            self.check_pages(pages, _BRANCH)
            counts, nodes = self.counts(pages), self.nodes(pages)
            _require((counts > 0).all(), "a branch without children")
            self.check_nodes(pages, nodes)
            levels.append((counts, nodes))
            branches += len(pages)
            pages = self.children(nodes)
        self.check_pages(pages, _LEAF)
        _require((branches, len(pages)) == tree[3:5], "a tree has other pages than it counts")
        return _Walk(pages, self._separators(levels, len(pages)))

    def _separators(
        self, levels: list[tuple[Pages, Pages]], leaves: int
    ) -> list[tuple[Pages, Pages]]:
        separators, first_leaf = [], np.arange(leaves)
        for counts, nodes in reversed(levels):
            starts = np.cumsum(counts) - counts
            inner = np.ones(len(nodes), np.bool_)
            inner[starts] = False
            separators.append((nodes[inner], first_leaf[inner]))
            first_leaf = first_leaf[starts]
        return separators

    def small(self, tree: _Tree) -> Iterator[_Node]:
        """Nodes of a tree with few of them; checked."""
        walk = self.walk(tree)
        nodes = self.nodes(walk.leaves) if len(walk.leaves) else walk.leaves
        if len(nodes):
            self.check_nodes(walk.leaves, nodes)
        overflow = 0
        for at in nodes.tolist():
            low, high, flags, key_bytes = (int(self.u16[at // 2 + i]) for i in range(4))
            size, data = low | high << 16, at + _NODE_HEADER_BYTES + key_bytes
            key = self.bytes[at + _NODE_HEADER_BYTES : data].tobytes()
            room = (at // self.page_bytes + 1) * self.page_bytes - data
            if flags & _BIG:
                _require(room >= 8, "a record leaves its page")
                first = int.from_bytes(self.bytes[data : data + 8].tobytes(), "little")
                pages = self._extent(first, size)
                overflow += len(pages)
                data = first * self.page_bytes + _PAGE_HEADER_BYTES
            else:
                _require(size <= room, "a record leaves its page")
            yield _Node(key, self.bytes[data : data + size].tobytes(), flags)
        _require((overflow, len(nodes)) == tree[5:7], "a tree has other records than it counts")

    def _extent(self, first: int, size: int) -> Pages:
        count = (_PAGE_HEADER_BYTES - 1 + size) // self.page_bytes + 1
        _require(first + count <= self.pages, "a record lies behind the end of the file")
        self.check_pages(np.array([first], np.int64), _OVERFLOW)
        at = first * (self.page_bytes // 2)
        said = int(self.u16[at + 6]) | int(self.u16[at + 7]) << 16
        _require(said == count, f"{said} pages for {size} B")
        _require(not self.seen[first + 1 : first + count].any(), "a page is reached twice")
        self.seen[first + 1 : first + count] = True
        return np.arange(first, first + count)

    def find_tree(self, name: bytes) -> _Tree:
        """The named database's record in the main one."""
        for at in self.nodes(self.leaves(self.main)).tolist():
            key_bytes = int(self.u16[at // 2 + 3])
            key = at + _NODE_HEADER_BYTES
            if self.bytes[key : key + key_bytes].tobytes() == name:
                return _Tree(*_TREE.unpack_from(self.bytes.data, key + key_bytes))
        raise UnexpectedPages(f"there is no database {name!r}")


def read_records(path: Path, name: bytes, key_bytes: int, value_bytes: int) -> Bytes:
    """Database `name` in the order of the keys, from a sound file: a row per record, its key and
    its value.

    Raises `UnexpectedPages` where a record has other sizes.
    """
    file = _File(path)
    tree = file.find_tree(name)
    nodes = file.nodes(file.leaves(tree))
    end = _NODE_HEADER_BYTES + key_bytes + value_bytes
    there = not len(nodes) or int(nodes.max()) + end <= len(file.bytes)
    _require(there, "a record leaves the file")
    return _records(file, tree, nodes, key_bytes, value_bytes)


def _records(file: _File, tree: _Tree, nodes: Pages, key_bytes: int, value_bytes: int) -> Bytes:
    """A row per record, which MUST lie in the file."""
    _require(len(nodes) == tree.entries, f"{len(nodes)} records where LMDB counts {tree.entries}")
    rows = file.pick(nodes, _NODE_HEADER_BYTES + key_bytes + value_bytes)
    expected = struct.pack("<IHH", value_bytes, 0, key_bytes)
    heads = rows[:, :_NODE_HEADER_BYTES].view("<u8")
    same = (heads == int.from_bytes(expected, "little")).all()
    _require(same, "a record has other sizes than all should have")
    return rows[:, _NODE_HEADER_BYTES:]


# checks


def check_file(path: Path, name: bytes, key_bytes: int, value_bytes: int) -> Bytes:
    """Whether LMDB can be given the file: all that its engine relies on in meta pages, trees, free
    list and overflow pages, that every page has exactly one use, and that a search finds each
    record of database `name` (the others are small), whose records it returns as `read_records`
    does. Raises `UnexpectedPages` and `OSError`."""
    with path.open("rb", buffering=0) as f:
        # what can't be read is an error here, and the end of the process through a map
        while f.read(_CHUNK_BYTES):
            pass
    file = _File(path)
    _check_metas(file)
    free = _free_pages(file)
    records: Bytes | None = None
    for node in _in_order(file.small(file.main)):
        _require(node.flags == _TREE_INSIDE and len(node.data) == _TREE.size, "no database")
        tree = _Tree(*_TREE.unpack(node.data))
        _require((tree.pad, tree.flags) == (0, 0), "a database of another kind")
        if node.key == name:
            records = _check_large(file, tree, key_bytes, value_bytes)
        else:
            for inner in _in_order(file.small(tree)):
                _require(inner.flags & ~_BIG == 0, "a record of another kind")
    if records is None:
        raise UnexpectedPages(f"there is no database {name!r}")
    used = np.zeros(len(free), np.bool_)
    used[: file.pages] = file.seen
    _require((used ^ free)[_METAS:].all(), "a page has no use, or two")
    return records


def _in_order(nodes: Iterator[_Node]) -> Iterator[_Node]:
    last: bytes | None = None
    for node in nodes:
        _require(last is None or last < node.key, "keys are out of order")
        last = node.key
        yield node


def _check_metas(file: _File) -> None:
    size = file.page_bytes
    for number, meta in enumerate(file.metas):
        head = file.bytes[number * size : number * size + _PAGE_HEADER_BYTES].tobytes()
        page, _, flags, _, _ = struct.unpack("<QHHHH", head)
        _require(page == number and flags & _META_PAGE, f"meta page {number} is none")
        _require(_Tree(*_TREE.unpack(meta[4])).pad == size, "meta pages disagree")
        _require(not meta[7] or meta[7] % 2 == number, "a transaction number is off")
    _require(file.metas[0][7] != file.metas[1][7] or not file.meta[7], "two meta pages alike")
    _require(file.main.flags == 0 and file.main.pad <= size, "the main tree is of another kind")
    in_file = len(file.bytes) // size
    last = file.meta[6]
    _require(1 <= last < in_file + max(in_file, 1 << 20), f"a last page {last}")


def _free_pages(file: _File) -> npt.NDArray[np.bool_]:
    """Per page up to the last, whether the free list has it."""
    free, last = np.zeros(file.meta[6] + 1, np.bool_), 0
    for node in file.small(file.free):
        transaction = int.from_bytes(node.key, "little")
        _require(len(node.key) == 8 and last < transaction <= file.meta[7], "a free list's number")
        last = transaction
        _require(node.flags & ~_BIG == 0, "a free list of another kind")
        _require(len(node.data) >= 8 and len(node.data) % 8 == 0, "a free list's size")
        count, *_ = numbers = np.frombuffer(node.data, "<u8")
        pages = numbers[1:]
        _require(int(count) == len(pages), "a free list's count")
        _require((pages[1:] < pages[:-1]).all(), "a free list is out of order")
        if len(pages):
            _require(int(pages[0]) < len(free) and pages[-1] >= _METAS, "a free page's number")
        _require(not free[pages].any(), "a page is free twice")
        free[pages] = True
    return free


def _check_large(file: _File, tree: _Tree, key_bytes: int, value_bytes: int) -> Bytes:
    walk = file.walk(tree)
    nodes = walk.leaves
    if len(walk.leaves):
        counts, nodes = file.counts(walk.leaves), file.nodes(walk.leaves)
        _require((counts > 0).all() and not tree.overflow_pages, "a leaf without records")
        file.check_nodes(walk.leaves, nodes, key_bytes + value_bytes)
    records = _records(file, tree, nodes, key_bytes, value_bytes)
    keys = records[:, :key_bytes]
    _require(_rising(keys[:-1], keys[1:]).all(), "keys are out of order")
    for places, leaves in walk.separators:
        _require((file.u16[places // 2 + 3] == key_bytes).all(), "a separator of another size")
        between = file.pick(places + _NODE_HEADER_BYTES, key_bytes)
        at = (np.cumsum(counts) - counts)[leaves]
        _require(_rising(keys[at - 1], between).all(), "a key lies behind its separator")
        _require(not _rising(keys[at], between).any(), "a key lies before its separator")
    return records


def _rising(a: Bytes, b: Bytes) -> npt.NDArray[np.bool_]:
    """Per row, whether the bytes of `a` come before those of `b`."""
    first, second = (keys[:, :8].view(">u8")[:, 0] for keys in (a, b))
    rising: npt.NDArray[np.bool_] = first < second
    alike = np.flatnonzero(first == second)
    alike = alike[(a[alike] != b[alike]).any(axis=1)]
    for i in alike.tolist():
        rising[i] = a[i].tobytes() < b[i].tobytes()
    return rising
