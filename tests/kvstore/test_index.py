import hashlib
from random import Random

import numpy as np
import pytest

from kvstore.index import FREE, GHOST, NO_PARENT, READY, RESERVED, ROOT, BlockIndex, BulkRows

SSD = 4


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


def ready_chain(index: BlockIndex, first: int, blocks: int, parent: int = ROOT) -> list[int]:
    rows = []
    for n in range(first, first + blocks):
        depth = 0 if parent == ROOT else index.depth[parent] + 1
        parent = index.insert(key(n), 0, parent, depth, float(n))
        index.make_ready(parent)
        index.tiers[parent] = SSD
        rows.append(parent)
    index.check_integrity()
    return rows


def drop(index: BlockIndex, row: int) -> None:
    index.tiers[row] = 0
    index.forget(row)
    index.check_integrity()


def test_a_row_lives_and_goes():
    index = BlockIndex()
    row = index.insert(key(1), 3, ROOT, 0, 5.0)
    assert index.state[row] == RESERVED
    assert index.find(key(1)) == row
    assert index.find(key(2)) is None
    index.check_integrity()
    index.forget(row)
    assert index.find(key(1)) is None
    assert len(index) == 0
    index.check_integrity()


def test_free_rows_are_used_again():
    index = BlockIndex()
    rows = ready_chain(index, 0, 3)
    for row in reversed(rows):
        drop(index, row)
    assert sorted(ready_chain(index, 10, 3)) == sorted(rows)
    assert index.rows_max == 3


def test_a_prefix_ends_at_the_first_unknown_key():
    index = BlockIndex()
    rows = ready_chain(index, 0, 5)
    asked = [key(0), key(1), key(99), key(2)]
    assert index.find_prefix(asked).tolist() == rows[:2]
    assert index.find_prefix([key(n) for n in range(5)]).tolist() == rows
    assert index.find_prefix([key(99)]).tolist() == []
    assert index.find_prefix([]).tolist() == []


def test_a_parent_that_goes_leaves_a_ghost_until_its_last_child_goes():
    index = BlockIndex()
    a, b, c = ready_chain(index, 0, 3)
    drop(index, b)
    assert index.state[b] == GHOST
    assert index.find(key(1)) == b
    assert index.ghosts == 1
    drop(index, a)
    assert index.state[a] == GHOST
    drop(index, c)
    assert [index.state[row] for row in (a, b, c)] == [FREE] * 3
    assert index.ghosts == len(index) == 0


def test_a_ghost_comes_back_under_its_own_row():
    index = BlockIndex()
    a, b, c = ready_chain(index, 0, 3)
    drop(index, b)
    again = index.insert(key(1), 0, a, 1, 9.0)
    assert again == b
    assert index.state[b] == RESERVED
    assert index.children[b] == 1
    assert index.ghosts == 0
    index.make_ready(b)
    index.tiers[b] = SSD
    index.check_integrity()
    assert list(index.ancestors(c)) == [b, a]


def test_pins_keep_a_row_and_count():
    index = BlockIndex()
    (row,) = ready_chain(index, 0, 1)
    index.pin([row, row])
    drop(index, row)
    assert index.state[row] == GHOST
    index.unpin([row])
    assert index.state[row] == GHOST
    index.unpin([row])
    assert index.state[row] == FREE
    index.check_integrity()


def test_descendants_come_deepest_first():
    index = BlockIndex()
    trunk = ready_chain(index, 0, 4)
    left = ready_chain(index, 10, 5, trunk[1])
    right = ready_chain(index, 20, 1, trunk[1])
    other = ready_chain(index, 30, 6)
    found = index.descendants(trunk[1]).tolist()
    assert set(found) == {*trunk[2:], *left, *right}
    depths = [index.depth[row] for row in found]
    assert depths == sorted(depths, reverse=True)
    assert index.descendants(other[-1]).tolist() == []
    assert set(index.descendants(other[0]).tolist()) == set(other[1:])


def test_rows_of_a_segment_come_in_their_order_there():
    index = BlockIndex()
    rows = ready_chain(index, 0, 6)
    for row, segment, page in zip(rows, (1, 2, 1, 1, 2, 1), (9, 1, 3, 7, 0, 5), strict=True):
        index.segment[row], index.page[row] = segment, page
    drop(index, rows[5])
    assert index.rows_in_segment(1, SSD).tolist() == [rows[2], rows[3], rows[0]]


def packed(keys) -> np.ndarray:
    return np.frombuffer(b"".join(keys), "V32")


def bulk(parents: dict[int, int | None], **columns: list[int]) -> BulkRows:
    """Blocks by number with their parents' numbers; depth follows unless given."""

    def depth(n: int) -> int:
        parent = parents.get(n)
        return 0 if parent is None else 1 + depth(parent)

    count = len(parents)
    at = np.arange(count)
    return BulkRows(
        keys=packed(key(n) for n in parents),
        parents=packed(bytes(32) if p is None else key(p) for p in parents.values()),
        namespace=np.array(columns.get("namespace", [0] * count)),
        depth=np.array(columns.get("depth", [depth(n) for n in parents])),
        segment=at + 1,
        page=at + 2,
        stored_bytes=np.full(count, 4096),
        created_wall_s=at.astype(np.float64),
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_bulk_loading_gives_what_inserting_gives(shuffle):
    index = BlockIndex()
    random = Random(5)
    parents: dict[int, int | None] = {0: None}
    for n in range(1, 500):
        parents[n] = random.choice([None, n - 1, n - 1, *range(max(0, n - 9), n)])
    shuffled = dict(random.sample(list(parents.items()), len(parents)) if shuffle else parents)
    assert index.load(bulk(shuffled), SSD) == []
    index.check_integrity()
    assert len(index) == 500
    assert index.ghosts == 0
    for row, (n, parent) in enumerate(shuffled.items()):
        assert index.find(key(n)) == row
        assert index.state[row] == READY
        assert index.parent_key(row) == (None if parent is None else key(parent))
        assert (index.segment[row], index.page[row]) == (row + 1, row + 2)
    ready_chain(index, 1000, 40, index.find(key(499)) or 0)


def test_a_missing_parent_becomes_a_ghost_and_can_come_back():
    index = BlockIndex()
    assert index.load(bulk({0: None, 2: 1, 3: 2, 4: 1}, depth=[0, 2, 3, 2]), SSD) == []
    index.check_integrity()
    ghost = index.find(key(1))
    assert ghost is not None
    assert index.state[ghost] == GHOST
    assert index.parent[ghost] == NO_PARENT
    assert (index.depth[ghost], index.children[ghost]) == (1, 2)
    root = index.find(key(0))
    assert root is not None
    assert index.insert(key(1), 0, root, 1, 0.0) == ghost
    index.check_integrity()
    assert index.children[root] == 1


@pytest.mark.parametrize(
    ("columns", "refused"),
    [
        ({"depth": [0, 1, 7, 8]}, [2]),
        ({"namespace": [0, 1, 1, 1]}, [1]),
        ({"depth": [0, 2, 2, 3]}, [1, 2]),
        ({"depth": [0, 1, 2, 9], "namespace": [0, 0, 1, 1]}, [2, 3]),
    ],
)
def test_rows_that_contradict_their_chain_are_not_loaded(columns, refused):
    index = BlockIndex()
    parents: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2}
    assert index.load(bulk(parents, **columns), SSD) == refused
    index.check_integrity()
    for n in refused:
        row = index.find(key(n))
        assert row is None or index.state[row] == GHOST


def test_loading_nothing_is_fine():
    index = BlockIndex()
    assert index.load(bulk({}), SSD) == []
    ready_chain(index, 0, 3)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda index, row: index.children.__setitem__(row, 7), "child counts"),
        (lambda index, row: index.depth.__setitem__(row, 7), "depth"),
        (lambda index, row: index.tiers.__setitem__(row, 0), "no tier"),
        (lambda index, row: index.state.__setitem__(row, GHOST), "ghost"),
        (lambda index, row: index.keys.packed.__setitem__(32 * row, 0), "key points"),
        (lambda index, row: index.state.__setitem__(row, FREE), "number"),
        (lambda index, row: index.namespace.__setitem__(row, 5), "namespace"),
    ],
)
def test_the_integrity_check_means_it(damage, says):
    index = BlockIndex()
    rows = ready_chain(index, 0, 3)
    damage(index, rows[1])
    with pytest.raises(AssertionError, match=says):
        index.check_integrity()
