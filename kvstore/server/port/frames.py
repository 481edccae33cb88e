"""Frames of the data port, as both sides read and write them.

A frame is a header of 40 bytes, a protobuf message and a body::

    magic "KVP1" | kind u8 | 0 u8 | method u16 | call u32 | message length u32
    | timeout in ms u32 | 0 u32 | body length u64 | xxh3-64 u64 | message | body

All numbers are little-endian. The checksum covers the header before it and the message. It does
not cover the body, which is block sections with checksums of their own in the message.
`docs/dataplane.md` has the order of frames on a connection.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

from kvstore.server.wire import Parts

MAGIC = b"KVP1"
_FIELDS = struct.Struct("<4sBxHIII4xQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct(_FIELDS.format + "Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
SLOT_BYTES = 16
"""Of a block's place in the arena, in a message."""
PARTS_MAX = 1024
"""Buffers of one vectored send (IOV_MAX)."""

METHODS = (
    "Match",
    "Acquire",
    "Renew",
    "Release",
    "BulkRead",
    "BulkPut",
    "ReportCorrupt",
    "Reserve",
    "Write",
    "Commit",
    "Abort",
    "OpenNamespace",
    "Read",
    "Put",
    "PutWindow",
    "GetWindow",
    "DropWindow",
    "Answered",
)
"""Calls of the data port; a method's number is its place. Everything else is asked over gRPC."""
NUMBER_OF_METHOD = {name: number for number, name in enumerate(METHODS)}


class Kind(IntEnum):
    """What a frame is. A client sends OPEN once and CALL after; ERROR answers either."""

    OPEN = 1
    OPENED = 2
    CALL = 3
    REPLY = 4
    ERROR = 5


_KINDS = {kind.value: kind for kind in Kind}


class Head(NamedTuple):
    """A frame's header. `call`: the client's number for the exchange, which its answer repeats.
    `timeout_ms`: of a CALL, how long the client waits; 0 for the daemon's default."""

    kind: Kind
    method: int
    call: int
    message_bytes: int
    timeout_ms: int
    body_bytes: int
    checksum: int


class MalformedFrame(Exception):
    """The bytes are no frame of ours. Nothing that follows on the connection can be trusted."""


def _checksum(fields: bytes | memoryview, message: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(message, seed=xxhash.xxh3_64_intdigest(fields))


def encode(
    kind: Kind,
    message: bytes,
    body: Sequence[bytes | memoryview] = (),
    *,
    method: int = 0,
    call: int = 0,
    timeout_ms: int = 0,
) -> Parts:
    """A frame as buffers to send one behind the other; the body's are not copied."""
    size = sum(map(len, body))
    fields = _FIELDS.pack(MAGIC, kind, method, call, len(message), timeout_ms, size)
    head = fields + _CHECKSUM.pack(_checksum(fields, message))
    return [head + message, *body]


def parse_head(data: memoryview) -> Head:
    """The header at the start of `data`, which holds all of it. Raises `MalformedFrame`.

    Its checksum can be looked at when the message is there: `check_message`.
    """
    magic, number, *fields = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MalformedFrame(f"no frame starts with {magic!r}")
    kind = _KINDS.get(number)
    if kind is None:
        raise MalformedFrame(f"frame kind {number} is unknown")
    return Head(kind, *fields)


def check_message(data: memoryview, head: Head) -> bytes:
    """The message behind the header at the start of `data`. Raises `MalformedFrame`."""
    message = bytes(data[HEADER_BYTES : HEADER_BYTES + head.message_bytes])
    if _checksum(data[: _FIELDS.size], message) != head.checksum:
        raise MalformedFrame("header and message do not match their checksum")
    return message
