"""Index records, byte for byte: what LMDB holds under a key.

Every value ends with the xxh3-64 of key and value, because LMDB checks nothing itself.
`docs/format.md` has the layouts.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.tiers.base import Location
from kvstore.tiers.frame import FixedFields, FrameHeader

ENTRY_VERSION = 1
KEY_BYTES = 32
CHECK_BYTES = 8
_BODY = struct.Struct("<BBBxIIIQIId32s16s")
_LOCATION = struct.Struct("<IQ")
ENTRY_BYTES = _BODY.size + CHECK_BYTES
_HEAD_BYTES = 8
_CHUNK_RECORDS = 1 << 14
ENTRY_DTYPE = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("zero", "u1"),
        ("namespace_no", "<u4"),
        ("depth", "<u4"),
        ("segment", "<u4"),
        ("offset", "<u8"),
        ("stored_length", "<u4"),
        ("payload_length", "<u4"),
        ("created_wall_s", "<f8"),
        ("parent", "V32"),
        ("header_checksum", "V16"),
        ("check", "V8"),
    ]
)
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES
RECORD_BYTES = KEY_BYTES + ENTRY_BYTES
RECORD_DTYPE = np.dtype([("key", f"V{KEY_BYTES}"), *ENTRY_DTYPE.descr])
"""A key and the entry behind it."""


class RecordCorrupt(Exception):
    """An index record does not match its own check."""


def seal(key: bytes, body: bytes) -> bytes:
    """The record's value: `body` and its check."""
    return body + xxhash.xxh3_64_digest(key + body)


def unseal(key: bytes, value: bytes) -> bytes:
    """The body of a record; raises `RecordCorrupt`."""
    body = value[:-CHECK_BYTES]
    if len(value) < CHECK_BYTES or xxhash.xxh3_64_digest(key + body) != value[-CHECK_BYTES:]:
        raise RecordCorrupt(f"the index record of {key.hex()} does not match its check")
    return body


def encode_entry(
    header: FrameHeader | FixedFields, checksum: bytes, namespace_no: int, location: Location
) -> bytes:
    """The index record of a frame at `location`. `checksum`: its header's."""
    body = _BODY.pack(
        ENTRY_VERSION,
        header.kind,
        header.codec,
        namespace_no,
        header.depth,
        location.segment,
        location.offset,
        header.stored_length,
        header.payload_length,
        header.created_wall_s,
        header.parent,
        checksum,
    )
    return seal(header.key, body)


def entry_segment(value: bytes) -> int:
    """The segment that a record points into."""
    segment: int = _BODY.unpack_from(value)[5]
    return segment


def encode_location(key: bytes, location: Location) -> bytes:
    """A sealed record that holds a place in the log."""
    return seal(key, _LOCATION.pack(*location))


def decode_location(key: bytes, value: bytes) -> Location:
    """Inverse of `encode_location`; raises `RecordCorrupt`."""
    body = unseal(key, value)
    if len(body) != _LOCATION.size:
        raise RecordCorrupt(f"{len(body)} B are no place in the log")
    return Location(*_LOCATION.unpack(body))


def decode_entries(values: bytes | npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Packed records as a structured array (`ENTRY_DTYPE`), a view of `values`."""
    return np.frombuffer(values, ENTRY_DTYPE)


def decode_records(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Rows of `RECORD_BYTES` as a structured array (`RECORD_DTYPE`), a view of `rows`."""
    return rows.view(RECORD_DTYPE)[:, 0]


def known_of(rows: npt.NDArray[np.uint8], keys: Sequence[bytes]) -> set[bytes]:
    """Those of `keys` that a record of `decode_records` has, without a look at every key as a
    Python object; others that begin alike may come with them."""
    if not keys:
        return set()
    wanted = np.sort(np.frombuffer(b"".join(key[:_HEAD_BYTES] for key in keys), np.uint64))
    heads = rows[:, :_HEAD_BYTES].view(np.uint64)[:, 0]
    at = np.minimum(np.searchsorted(wanted, heads), len(wanted) - 1)
    known: list[bytes] = decode_records(rows[wanted[at] == heads])["key"].tolist()
    return set(known)


def first_wrong(rows: npt.NDArray[np.uint8]) -> int | None:
    """Position of the first of these records, rows of `RECORD_BYTES`, that does not match its check
    or version."""
    for start in range(0, len(rows), _CHUNK_RECORDS):
        part = rows[start : start + _CHUNK_RECORDS]
        sealed = part[:, :-CHECK_BYTES].view(f"V{RECORD_BYTES - CHECK_BYTES}")[:, 0]
        digests = b"".join(map(xxhash.xxh3_64_digest, sealed.tolist()))
        checks = np.frombuffer(digests, np.uint64)
        wrong = checks != part[:, -CHECK_BYTES:].view(np.uint64)[:, 0]
        wrong |= part[:, KEY_BYTES] != ENTRY_VERSION
        if wrong.any():
            return start + int(wrong.argmax())
    return None
