"""The check of an LMDB file passes what LMDB writes, and nothing that `lmdb.verify` objects to."""

import hashlib
from pathlib import Path
from random import Random

import lmdb
import lmdb.verify
import pytest

from kvstore.tiers.ssd.lmdb_pages import UnexpectedPages, check_file, read_records

KEY, VALUE = 32, 96
SEEDS = range(4)
DAMAGES = 40
DAMAGES_LONG = 1000


def key_of(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


def check(path: Path) -> None:
    check_file(path / "data.mdb", b"blocks", KEY, VALUE)


def live(path: Path, random: Random, commits: int) -> set[bytes]:
    """A life of an index: what is in `blocks` in the end."""
    there: set[bytes] = set()
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=3, lock=False, sync=False) as env:
        blocks, namespaces = (env.open_db(name) for name in (b"blocks", b"namespaces"))
        env.open_db(b"meta")
        for n in range(commits):
            with env.begin(write=True, db=blocks) as txn:
                for i in range(random.choice([1, 5, 120])):
                    txn.put(key := key_of(n << 20 | i), random.randbytes(VALUE))
                    there.add(key)
                for key in random.sample(sorted(there), random.choice([0, 2, len(there) // 2])):
                    txn.delete(key)
                    there.remove(key)
                number = random.randrange(6).to_bytes(4, "big")
                size = random.choice([50, 3000, 20_000])
                txn.put(number, random.randbytes(size), db=namespaces)
    return there


@pytest.mark.parametrize("seed", SEEDS)
def test_what_lmdb_writes_passes(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    there: set[bytes] = set()
    for commits in (0, 1, 2, 30):
        folder = tmp_path / str(commits)
        folder.mkdir()
        there = live(folder, random, commits)
        assert lmdb.verify.verify(str(folder)) == []
        checked = check_file(folder / "data.mdb", b"blocks", KEY, VALUE)
        rows = read_records(folder / "data.mdb", b"blocks", KEY, VALUE)
        assert {row[:KEY].tobytes() for row in rows} == there
        assert rows.shape == (len(there), KEY + VALUE)
        assert checked.tobytes() == rows.tobytes()


def damage(data: bytearray, random: Random) -> None:
    """Mostly where it hurts: headers, offsets and nodes, not stored values."""
    pages = len(data) // 4096
    page = random.randrange(pages) * 4096
    kind = random.randrange(7)
    if kind == 0:
        data[page + random.randrange(16)] ^= 1 << random.randrange(8)
    elif kind == 1:
        data[page + 16 + random.randrange(120)] ^= 1 << random.randrange(8)
    elif kind == 2:
        data[random.randrange(2) * 4096 + random.randrange(168)] ^= 1 << random.randrange(8)
    elif kind == 3:
        other = random.randrange(pages) * 4096
        data[page : page + 4096] = data[other : other + 4096]
    elif kind == 4:
        data[page : page + 4096] = bytes(4096)
    elif kind == 5:
        del data[random.randrange(len(data)) :]
    else:
        at = random.randrange(len(data) - 8)
        data[at : at + 8] = random.randbytes(8)


def objects(folder: Path) -> bool:
    """Whether the independent verifier finds anything."""
    try:
        return bool(lmdb.verify.verify(str(folder)))
    except lmdb.verify.VerifyError:
        return True


def passes(folder: Path) -> bool:
    try:
        check(folder)
    except UnexpectedPages:
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_what_another_verifier_objects_to_does_not_pass(
    tmp_path: Path, seed: int, long: bool
) -> None:
    random = Random(seed)
    live(tmp_path, random, 25)
    path = tmp_path / "data.mdb"
    sound = path.read_bytes()
    wrong = stricter = 0
    for n in range(DAMAGES_LONG if long else DAMAGES):
        data = bytearray(sound)
        damage(data, random)
        path.write_bytes(data)
        if not data:
            continue
        bad, good = objects(tmp_path), passes(tmp_path)
        assert not (bad and good), f"damage {n} of seed {seed} passes"
        wrong += bad
        stricter += not bad and not good
        if good:
            # LMDB takes it: reads all of it, and writes
            with lmdb.open(str(tmp_path), max_dbs=3, lock=False, map_size=1 << 26) as env:
                blocks = env.open_db(b"blocks")
                with env.begin(write=True, db=blocks) as txn:
                    assert len(list(txn.cursor())) == txn.stat()["entries"]
                    txn.put(key_of(1 << 40), bytes(VALUE))
    assert wrong > (DAMAGES_LONG if long else DAMAGES) / 8
    print(f"seed {seed}: {wrong} files were wrong, {stricter} more did not pass")


def test_a_separator_that_misleads_a_search_does_not_pass(tmp_path: Path) -> None:
    there = live(tmp_path, Random(3), 40)
    path = tmp_path / "data.mdb"
    data, found = bytearray(path.read_bytes()), 0
    for page in range(2, len(data) // 4096):
        at = page * 4096
        if int.from_bytes(data[at + 10 : at + 12], "little") != 1:
            continue
        node = at + int.from_bytes(data[at + 18 : at + 20], "little")
        if data[node + 6 : node + 8] != b"\x20\0" or bytes(data[node + 8 : node + 40]) not in there:
            continue
        changed = bytearray(data)
        changed[node + 39] ^= 0xFF
        path.write_bytes(changed)
        found += not passes(tmp_path)
    assert found > 0


def test_keys_that_differ_in_their_last_bytes_alone_are_known_to_be_in_order(
    tmp_path: Path,
) -> None:
    keys = [bytes(KEY - 2) + n.to_bytes(2, "big") for n in range(1000)]
    with lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=3, lock=False, sync=False) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as txn:
            for key in keys:
                txn.put(key, bytes(VALUE))
    assert passes(tmp_path)
    path, aside = tmp_path / "data.mdb", b"\xff" * KEY
    data = path.read_bytes()
    one, other = keys[700:702]
    path.write_bytes(data.replace(one, aside).replace(other, one).replace(aside, other))
    assert not passes(tmp_path)
