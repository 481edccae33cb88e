"""Records of the index, many at a time."""

import numpy as np
import pytest

from kvstore.testing.tiers_frames import key_of
from kvstore.tiers.ssd import entry


def rows_of(keys):
    packed = b"".join(key + bytes(entry.ENTRY_BYTES) for key in keys)
    return np.frombuffer(packed, np.uint8).reshape(-1, entry.RECORD_BYTES)


@pytest.mark.parametrize("records", [0, 1, 500])
def test_keys_that_a_record_has_are_found(records):
    there = [key_of(i) for i in range(records)]
    others = [key_of(i) for i in range(1000, 1040)]
    asked = [*there[::7], *others]
    assert entry.known_of(rows_of(there), asked) == set(there[::7])
    assert entry.known_of(rows_of(there), []) == set()


def test_a_key_that_begins_like_another_is_told_apart_by_its_end():
    one, other = (bytes(31) + bytes([n]) for n in (1, 2))
    assert other not in entry.known_of(rows_of([one]), [other])


@pytest.mark.parametrize("at", [0, entry.KEY_BYTES + 20, entry.RECORD_BYTES - 1])
def test_the_first_damaged_record_is_named(at):
    body = bytes([entry.ENTRY_VERSION]) + bytes(entry.ENTRY_BYTES - entry.CHECK_BYTES - 1)
    packed = b"".join(key + entry.seal(key, body) for key in map(key_of, range(40_000)))
    rows = np.frombuffer(bytearray(packed), np.uint8).reshape(-1, entry.RECORD_BYTES)
    assert entry.first_wrong(rows) is None
    for wrong in (39_999, 17_000):
        rows[wrong, at] ^= 1
        assert entry.first_wrong(rows) == wrong


def test_a_record_of_another_version_is_wrong():
    key = key_of(1)
    body = bytes([entry.ENTRY_VERSION + 1]) + bytes(entry.ENTRY_BYTES - entry.CHECK_BYTES - 1)
    rows = np.frombuffer(key + entry.seal(key, body), np.uint8).reshape(1, -1)
    assert entry.first_wrong(rows) == 0
