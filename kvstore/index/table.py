"""The index: a table from key to row (`kvstore.index.keys`), and one array per column.

A million blocks are ordinary here, so a row owns no Python object: keys and their table cost 44 to
52 bytes per block, the columns 48. Single cells are read from `array.array` (three times faster
than from NumPy); whole columns through `view`, which lends the same memory to NumPy and MUST be
dropped before a row is inserted.

A row is RESERVED (a writer holds it), READY (all sections are in at least one tier) or GHOST: the
block is gone from every tier but is still somebody's parent, or pinned. A ghost is a miss to every
caller; it keeps the chain's shape until its key is put again or its last child and pin go.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.index.keys import KeyTable

FREE: Final = 0
RESERVED: Final = 1
READY: Final = 2
GHOST: Final = 3

ROOT: Final = -1
"""Parent of a first block: the namespace itself."""
NO_PARENT: Final = -2
"""Parent of a ghost that nobody knows more about than that it has children."""

Rows = npt.NDArray[np.int64]

_COLUMNS: Final = {
    "state": "B",
    "tiers": "B",
    "namespace": "H",
    "parent": "i",
    "children": "I",
    "depth": "I",
    "slot": "I",
    "hbm_slot": "I",
    "segment": "I",
    "page": "I",
    "stored_bytes": "I",
    "pins": "I",
    "created_wall_s": "d",
}
_GROWTH_ROWS_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class BulkRows:
    """READY rows to load at once, all on one tier; one entry per block in every column.

    `keys`: unique, 32 bytes each (dtype V32). `parents`: their parents' keys; quickest where most
    blocks come right behind their parent. `namespace` (numbers),
    `depth`, `segment`, `page` (4 KiB pages into the segment), `stored_bytes`: integers.
    `created_wall_s`: seconds since the epoch.
    """

    keys: npt.NDArray[np.void]
    parents: npt.NDArray[np.void]
    namespace: npt.NDArray[Any]
    depth: npt.NDArray[Any]
    segment: npt.NDArray[Any]
    page: npt.NDArray[Any]
    stored_bytes: npt.NDArray[Any]
    created_wall_s: npt.NDArray[np.float64]


def leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true from the first on. Shape (n,)."""
    # for some dozens of them several times as fast as NumPy's reductions
    at = flags.tobytes().find(0)
    return len(flags) if at < 0 else at


class BlockIndex:
    """All rows. The columns are public and read freely; `state`, `parent`, `children`, `pins` and
    the membership of a key change through methods only, `tiers` and the places (`slot`, `hbm_slot`,
    `segment`, `page`, `stored_bytes`) through whoever moves blocks between tiers."""

    def __init__(self) -> None:
        self.state = array("B")
        self.tiers = array("B")
        self.namespace = array("H")
        self.parent = array("i")
        self.children = array("I")
        self.depth = array("I")
        self.slot = array("I")
        self.hbm_slot = array("I")
        self.segment = array("I")
        self.page = array("I")
        self.stored_bytes = array("I")
        self.pins = array("I")
        self.created_wall_s = array("d")
        self.keys = KeyTable()
        self._free = array("I")
        self.ghosts = 0

    def __len__(self) -> int:
        """Rows in use, ghosts included."""
        return self.keys.used

    @property
    def rows_max(self) -> int:
        """One past the highest row number ever used."""
        return len(self.keys)

    def find(self, key: bytes) -> int | None:
        """The row of a key in any state, or None."""
        return self.keys.find(key)

    def find_prefix(self, keys: Sequence[bytes]) -> Rows:
        """Rows of the leading keys that are known in any state; shorter than `keys` where one is
        not."""
        rows = self.keys.find_all(keys)
        return rows[: leading(rows >= 0)]

    def view(self, column: str) -> npt.NDArray[Any]:
        """A column as NumPy sees it, without a copy. Drop it before anything is inserted."""
        return np.frombuffer(getattr(self, column), dtype=np.dtype(_COLUMNS[column]))

    def insert(
        self, key: bytes, namespace: int, parent: int, depth: int, created_wall_s: float
    ) -> int:
        """A new RESERVED row. The caller guarantees that `key` has no row, or a GHOST's."""
        row = self.keys.find(key)
        if row is None:
            row = self._free.pop() if self._free else self._grow()
            self.keys.add(row, key)
            self.pins[row] = self.children[row] = 0
        else:
            assert self.state[row] == GHOST, "a live key was inserted again"
            self.ghosts -= 1
            self._unlink(row)
        self.state[row] = RESERVED
        self.tiers[row] = 0
        self.namespace[row] = namespace
        self.parent[row] = parent
        self.depth[row] = depth
        self.created_wall_s[row] = created_wall_s
        if parent >= 0:
            self.children[parent] += 1
        return row

    def make_ready(self, row: int) -> None:
        """RESERVED → READY."""
        assert self.state[row] == RESERVED
        self.state[row] = READY

    def forget(self, row: int) -> None:
        """The block is gone from every tier: free its row, or leave a ghost where it has children
        or pins. A ghost above it that held on for this row alone goes too."""
        assert self.tiers[row] == 0, "a block was forgotten that a tier still holds"
        if self.state[row] != GHOST:
            self.state[row] = GHOST
            self.ghosts += 1
        while row >= 0 and self.state[row] == GHOST:
            if self.children[row] or self.pins[row]:
                return
            parent = self._unlink(row)
            self.ghosts -= 1
            self.state[row] = FREE
            self.keys.remove(row)
            self._free.append(row)
            row = parent

    def _unlink(self, row: int) -> int:
        parent = self.parent[row]
        if parent >= 0:
            self.children[parent] -= 1
        return parent

    def pin(self, rows: Sequence[int]) -> None:
        """Hold rows; each counts once per occurrence."""
        pins = self.pins
        for row in rows:
            pins[row] += 1

    def unpin(self, rows: Sequence[int]) -> None:
        """Undo `pin`; ghosts that were held by nothing else go."""
        pins, state = self.pins, self.state
        for row in rows:
            pins[row] -= 1
        for row in rows:
            if not pins[row] and state[row] == GHOST:
                self.forget(row)

    def ancestors(self, row: int) -> Iterator[int]:
        """The rows above `row`, nearest first."""
        parent = self.parent
        row = parent[row]
        while row >= 0:
            yield row
            row = parent[row]

    def parent_key(self, row: int) -> bytes | None:
        """Key of the block before it; None for a first block and where it is not known."""
        parent = self.parent[row]
        return self.keys[parent] if parent >= 0 else None

    def descendants(self, row: int) -> Rows:
        """All rows below `row`, deepest first. Looks at the whole index: for rare events."""
        parent = self.view("parent")
        marked = np.zeros(len(parent), dtype=bool)
        marked[row] = True
        above = np.where(parent >= 0, parent, np.arange(len(parent)))
        # doubling the distance looked up each round: as many rounds as the depth has bits
        for _ in range(int(self.view("depth").max()).bit_length() + 1):
            marked |= marked[above]
            above = above[above]
        marked[row] = False
        found = np.flatnonzero(marked & (self.view("state") != FREE))
        return found[np.argsort(-self.view("depth")[found].astype(np.int64), kind="stable")]

    def rows_on(self, tier: int) -> Rows:
        """Rows that a tier holds, by row number."""
        return np.flatnonzero(self.view("tiers") & tier)

    def rows_in_segment(self, segment: int, tier: int) -> Rows:
        """Rows that `tier` holds in one segment, in their order there."""
        found = np.flatnonzero((self.view("segment") == segment) & (self.view("tiers") & tier != 0))
        return found[np.argsort(self.view("page")[found], kind="stable")]

    def rows_in_use(self) -> Rows:
        """Rows in any state but FREE, by row number."""
        return np.flatnonzero(self.view("state"))

    def load(self, rows: BulkRows, tier: int) -> list[int]:
        """Fill an empty index with READY rows that `tier` holds; row i is entry i of `rows`.

        Parents that are missing from `rows` become ghosts. Returns the entries that contradict
        their chain (another namespace or depth than the parent's): those have no row.
        """
        assert not len(self), "bulk loading needs an empty index"
        n = len(rows.keys)
        self.keys.load(rows.keys)
        parent = self._parents(rows)
        self._set_columns(
            n,
            state=READY,
            tiers=tier,
            namespace=rows.namespace,
            parent=parent,
            children=np.bincount(parent[parent >= 0], minlength=n),
            depth=rows.depth,
            slot=0,
            hbm_slot=0,
            segment=rows.segment,
            page=rows.page,
            stored_bytes=rows.stored_bytes,
            pins=0,
            created_wall_s=rows.created_wall_s,
        )
        for row in np.flatnonzero(parent == NO_PARENT).tolist():
            self.parent[row] = self._ghost_parent(row, rows.parents[row].tobytes())
        return self._drop_contradictions()

    def _parents(self, rows: BulkRows) -> npt.NDArray[np.int32]:
        n = len(rows.keys)
        parent = np.arange(-1, n - 1, dtype=np.int32)
        parent[rows.depth == 0] = ROOT
        keys, parents = rows.keys.view("<u8"), rows.parents.view("<u8")
        behind = (keys.reshape(n, 4)[:-1] == parents.reshape(n, 4)[1:]).all(axis=1)
        elsewhere = np.flatnonzero((rows.depth > 0) & ~np.concatenate(([False], behind))[:n])
        found = self.keys.find_packed(rows.parents[elsewhere])
        parent[elsewhere] = np.where(found < 0, NO_PARENT, found)
        return parent

    def _set_columns(self, rows: int, **columns: npt.NDArray[Any] | int) -> None:
        assert columns.keys() == _COLUMNS.keys()
        for name, values in columns.items():
            code = _COLUMNS[name]
            if isinstance(values, int):
                column = array(code, [values]) * rows
            else:
                column = array(code)
                column.frombytes(np.ascontiguousarray(values, np.dtype(code)).data.cast("B"))
            setattr(self, name, column)

    def _ghost_parent(self, child: int, key: bytes) -> int:
        row = self.keys.find(key)
        if row is None:
            depth = max(self.depth[child] - 1, 0)
            created = self.created_wall_s[child]
            row = self.insert(key, self.namespace[child], NO_PARENT, depth, created)
            self.state[row] = GHOST
            self.ghosts += 1
        self.children[row] += 1
        return row

    def _drop_contradictions(self) -> list[int]:
        parent = self.view("parent")
        child = np.flatnonzero((parent >= 0) & (self.view("state") != FREE))
        above = parent[child]
        depth, namespace = self.view("depth"), self.view("namespace")
        wrong = (depth[above] + 1 != depth[child]) | (namespace[above] != namespace[child])
        rows: list[int] = child[wrong].tolist()
        del parent, depth, namespace
        for row in rows:
            self.tiers[row] = 0
            above_row = self._unlink(row)
            self.parent[row] = NO_PARENT
            self.forget(row)
            if self.state[above_row] == GHOST:
                self.forget(above_row)
        return rows

    def _grow(self) -> int:
        row = self.keys.new_row()
        if row == len(self.state):
            more = max(_GROWTH_ROWS_MIN, row // 8)
            for name, code in _COLUMNS.items():
                column = getattr(self, name)
                column.frombytes(bytes(more * array(code).itemsize))
        return row

    def check_integrity(self) -> None:
        """Raise `AssertionError` where rows, links, counts and the dictionary disagree."""
        used = self.rows_in_use()
        self.keys.check_integrity()
        assert len(used) == len(self), "rows in use and keys differ in number"
        assert len(used) + len(self._free) == len(self.keys), "rows were lost"
        state, parent = self.view("state"), self.view("parent")
        children = np.bincount(parent[used][parent[used] >= 0], minlength=len(state))
        assert np.array_equal(children[used], self.view("children")[used]), "child counts are off"
        assert int((state == GHOST).sum()) == self.ghosts, "ghosts are miscounted"
        for row in used.tolist():
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        parent, state = self.parent[row], self.state[row]
        if parent >= 0:
            assert self.state[parent] != FREE, f"row {row} hangs under a free row"
            assert self.namespace[parent] == self.namespace[row], f"row {row} changes namespace"
            assert self.depth[parent] + 1 == self.depth[row], f"row {row} has a wrong depth"
        elif parent == ROOT:
            assert self.depth[row] == 0, f"first block in row {row} has depth {self.depth[row]}"
        else:
            assert state == GHOST, f"row {row} has no known parent and is no ghost"
        if state == GHOST:
            assert self.children[row] or self.pins[row], f"ghost {row} holds on for nothing"
            assert not self.tiers[row], f"ghost {row} is on a tier"
        elif state == READY:
            assert self.tiers[row], f"READY row {row} is on no tier"
