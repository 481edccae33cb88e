"""The key table against a dictionary, its growth and its removals included."""

import hashlib
from random import Random

import numpy as np
import pytest

from kvstore.index.keys import KeyTable


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_what_a_dictionary_finds(seed: int) -> None:
    random, table, model = Random(seed), KeyTable(), {}
    free: list[int] = []
    for step in range(6000):
        if model and random.random() < (0.25 if step < 3500 else 0.6):
            gone = random.choice(list(model)) if step % 50 == 0 else next(iter(model))
            row = model.pop(gone)
            table.remove(row)
            free.append(row)
        else:
            row = free.pop() if free and random.random() < 0.7 else table.new_row()
            model[key(step)] = row
            table.add(row, key(step))
        if step % 1500 == 0:
            table.check_integrity()
    table.check_integrity()
    assert table.used == len(model)
    asked = [key(n) for n in random.sample(range(9000), 4000)]
    expected = [model.get(k, -1) for k in asked]
    assert table.find_all(asked).tolist() == expected
    assert [table.find(k) for k in asked] == [None if r < 0 else r for r in expected]
    rows = np.array(list(model.values()))
    assert table.heads(rows).tobytes() == b"".join(k[:8] for k in model)


def test_what_was_loaded_is_found_and_can_go() -> None:
    keys = [key(n) for n in range(5000)]
    table = KeyTable()
    table.load(np.frombuffer(b"".join(keys), "V32"))
    table.check_integrity()
    assert table.find_all(keys).tolist() == list(range(5000))
    assert list(table)[4999] == keys[4999]
    for row in range(0, 5000, 2):
        table.remove(row)
    table.check_integrity()
    found = table.find_all(keys).tolist()
    assert found == [row if row % 2 else -1 for row in range(5000)]


def test_a_chain_in_neighbouring_rows_ends_where_they_do() -> None:
    table = KeyTable()
    keys = [key(n) for n in range(100)]
    table.load(np.frombuffer(b"".join(keys), "V32"))
    asked = [*keys[40:], key(1000), *keys[3:30]]
    assert table.find_all(asked).tolist() == [*range(40, 100), -1, *range(3, 30)]
    table.remove(60)
    zeros = [*keys[50:60], bytes(32), *keys[61:90]]
    assert table.find_all(zeros).tolist() == [*range(50, 60), -1, *range(61, 90)]


def test_the_zeros_of_an_unused_row_are_no_key() -> None:
    table = KeyTable()
    keys = [key(n) for n in range(40)]
    table.load(np.frombuffer(b"".join(keys), "V32"))
    table.remove(20)
    keys[20] = bytes(32)
    assert table.find_all(keys).tolist() == [*range(20), -1, *range(21, 40)]


def test_keys_of_another_size_are_not_there() -> None:
    table = KeyTable()
    assert table.find_all([key(1)] * 30).tolist() == [-1] * 30
    table.add(table.new_row(), key(1))
    for odd in (b"", b"x", key(1) + b"x", key(1)[:31]):
        assert table.find(odd) is None
        assert table.find_all([odd] * 30).tolist() == [-1] * 30
    assert table.find_all([key(1)[:31], key(1) + b"x"] * 15).tolist() == [-1] * 30
    assert table.find_all([]).tolist() == []


def test_it_knows_when_it_is_wrong() -> None:
    table = KeyTable()
    for n in range(10):
        table.add(table.new_row(), key(n))
    table.packed[32 * 4] ^= 1
    with pytest.raises(AssertionError, match="row 4 is not where its key points"):
        table.check_integrity()
