"""Key → row, without a Python object per key.

All keys lie in one piece of memory, 32 bytes per row; an open-addressing hash table holds row
numbers, and a 32-bit piece of each key's hash lies beside them, so that growing and removing need
not hash again. A million keys cost 44 to 52 MB; in a dictionary they are 155 MB and as many
objects. Many keys are looked up at once in NumPy, which is as fast as a dictionary.

The hash is Python's own of `bytes`: keyed per process, so that nobody can choose keys that collide.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

KEY_BYTES: Final = 32
_EMPTY: Final = -1
_SLOTS_MIN: Final = 1024
_HASH_MASK: Final = 0xFFFF_FFFF
_CHUNK_ROWS: Final = 1 << 12
_UNUSED: Final = bytes(KEY_BYTES)
_AT_ONCE_MIN: Final = 24
"""From so many keys on NumPy is the faster way."""

Rows = npt.NDArray[np.int64]


class KeyTable:
    """Keys by row, and rows by key. `table[row]` is the key of a row in use, zeros otherwise.

    `len` is one past the highest row ever used. The caller says which rows are in use.
    """

    def __init__(self) -> None:
        self.packed = bytearray()
        self._hashes = array("I")
        self._slots = array("i", [_EMPTY]) * _SLOTS_MIN
        self._mask = _SLOTS_MIN - 1
        self.used = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, row: int) -> bytes:
        return bytes(self.packed[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        return (self[row] for row in range(len(self)))

    # one key

    def find(self, key: bytes) -> int | None:
        """The row of a key, or None."""
        slots, packed, mask = self._slots, self.packed, self._mask
        at = hash(key) & mask
        while (row := slots[at]) >= 0:
            if packed[row * KEY_BYTES : (row + 1) * KEY_BYTES] == key:
                return row
            at = (at + 1) & mask
        return None

    def new_row(self) -> int:
        """One more row, not in use."""
        self.packed += bytes(KEY_BYTES)
        self._hashes.append(0)
        return len(self._hashes) - 1

    def add(self, row: int, key: bytes) -> None:
        """Bring a row into use. `key`: 32 bytes that no other row has."""
        self.packed[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._hashes[row] = hash(key) & _HASH_MASK
        at = self._hashes[row] & self._mask
        while self._slots[at] >= 0:
            at = (at + 1) & self._mask
        self._slots[at] = row
        self.used += 1
        if 2 * self.used > len(self._slots):
            self._grow()

    def remove(self, row: int) -> None:
        """Take a row out of use."""
        slots, mask = self._slots, self._mask
        hole = self._slot_of(row)
        at = (hole + 1) & mask
        # what was pushed past the hole moves up, so that no search ends there too early
        while (other := slots[at]) >= 0:
            home = self._hashes[other] & mask
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = other
                hole = at
            at = (at + 1) & mask
        slots[hole] = _EMPTY
        self.packed[row * KEY_BYTES : (row + 1) * KEY_BYTES] = bytes(KEY_BYTES)
        self.used -= 1

    def _slot_of(self, row: int) -> int:
        at = self._hashes[row] & self._mask
        while self._slots[at] != row:
            assert self._slots[at] >= 0, f"row {row} is not in use"
            at = (at + 1) & self._mask
        return at

    # many keys

    def heads(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of the keys of these rows."""
        return np.asarray(self._words()[rows, 0])

    def find_all(self, keys: Sequence[bytes]) -> Rows:
        """The row per key, −1 where it is not known."""
        n = len(keys)
        joined = b"".join(keys) if n >= _AT_ONCE_MIN else b""
        if len(joined) != n * KEY_BYTES or not n:
            found = map(self.find, keys)
            return np.fromiter((-1 if row is None else row for row in found), np.int64, n)
        start = self.find(keys[0])
        if start is not None and self._holds(start, joined):
            return np.arange(start, start + n)
        wanted = np.frombuffer(joined, np.uint64).reshape(n, -1)
        rows = np.full(n, -1, np.int64)
        done = self._run(keys[0], wanted, rows)
        if done < n:
            rest = keys[done:] if done else keys
            hashes = np.fromiter(map(hash, rest), np.int64, n - done)
            rows[done:] = self._probe((hashes & _HASH_MASK).astype(np.uint32), wanted[done:])
        return rows

    def _holds(self, row: int, joined: bytes) -> bool:
        """Whether keys lie from a row on one behind the other, as a chain's often do."""
        # an unused row is all zeros
        return _UNUSED not in joined and self.packed.startswith(joined, row * KEY_BYTES)

    def find_packed(self, keys: npt.NDArray[np.void]) -> Rows:
        """`find_all` of an array of dtype V32."""
        return self.find_all(keys.tolist())

    def _run(self, first: bytes, wanted: npt.NDArray[np.uint64], rows: Rows) -> int:
        """A chain often lies in rows one behind the other: how many of `wanted` do so."""
        row = self.find(first)
        if row is None:
            return 0
        there = self._words()[row : row + len(wanted)]
        same = (there == wanted[: len(there)]).all(axis=1) & wanted[: len(there)].any(axis=1)
        done = len(same) if same.all() else int(same.argmin())
        rows[:done] = np.arange(row, row + done)
        return done

    def _words(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self.packed, np.uint64).reshape(-1, KEY_BYTES // 8)

    def _probe(self, hashes: npt.NDArray[np.uint32], wanted: npt.NDArray[np.uint64]) -> Rows:
        slots, words = np.frombuffer(self._slots, np.int32), self._words()
        ours = np.frombuffer(self._hashes, np.uint32)
        rows = np.full(len(hashes), -1, np.int64)
        asked = np.arange(len(hashes))
        at = hashes & np.uint32(self._mask)
        while len(asked):
            found = slots[at]
            filled = found >= 0
            asked, at, found = asked[filled], at[filled], found[filled]
            hit = ours[found] == hashes[asked]
            hit[hit] = (words[found[hit]] == wanted[asked[hit]]).all(axis=1)
            rows[asked[hit]] = found[hit]
            asked, at = asked[~hit], (at[~hit] + np.uint32(1)) & np.uint32(self._mask)
        return rows

    def load(self, keys: npt.NDArray[np.void]) -> None:
        """Fill an empty table: row i gets key i, all of them different."""
        assert not self.used, "loading needs an empty table"
        self.packed = bytearray(np.ascontiguousarray(keys).view(np.uint8).data)
        hashes = np.empty(len(keys), np.uint32)
        for start in range(0, len(keys), _CHUNK_ROWS):
            chunk = keys[start : start + _CHUNK_ROWS].tolist()
            signed = np.fromiter(map(hash, chunk), np.int64, len(chunk))
            hashes[start : start + _CHUNK_ROWS] = signed & _HASH_MASK
        self._hashes = array("I")
        self._hashes.frombytes(hashes.data.cast("B"))
        self.used = len(keys)
        self._place(np.arange(len(keys), dtype=np.int32), len(self._slots))

    def _grow(self) -> None:
        slots = np.frombuffer(self._slots, np.int32)
        self._place(slots[slots >= 0], 2 * len(slots))

    def _place(self, rows: npt.NDArray[np.int32], slots_min: int) -> None:
        """A new table of these rows, of at least so many slots."""
        size = slots_min
        while size < 2 * len(rows):
            size *= 2
        self._mask = size - 1
        slots = np.full(size, _EMPTY, np.int32)
        at = np.frombuffer(self._hashes, np.uint32)[rows] & np.uint32(self._mask)
        slots[at] = rows
        while True:
            left = slots[at] != rows
            rows, at = rows[left], (at[left] + np.uint32(1)) & np.uint32(self._mask)
            if not len(rows):
                break
            free = slots[at] == _EMPTY
            slots[at[free]] = rows[free]
        self._slots = array("i")
        self._slots.frombytes(slots.data.cast("B"))

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the rows in use can't all be found."""
        slots: npt.NDArray[Any] = np.frombuffer(self._slots, np.int32)
        rows = slots[slots != _EMPTY].tolist()
        assert len(set(rows)) == len(rows) == self.used, "slots of the table are off"
        for row in rows:
            assert self.find(self[row]) == row, f"row {row} is not where its key points"
