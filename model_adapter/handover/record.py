"""What the two sides tell each other, as bytes (docs/handover.md).

The announcement carries the prompt, so that the decode side can name its blocks while they are
computed, and start anew should the rest never come. The record carries what only a finished prefill
knows.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import ImageSpan
from model_adapter.decoding import SamplingParams
from model_adapter.errors import SnapshotError

VERSION = 1
PROMPT_SUFFIX = "/prompt"
"""Behind a request's name: where its announcement is."""
_ANNOUNCEMENT = b"DS41FPRM"
_RECORD = b"DS41FHND"
_PROMPT_HEAD = struct.Struct("<8sIIQddQ")
_RECORD_HEAD = struct.Struct("<8sIIIIQddQQ32s")
_IMAGE = struct.Struct("<QQ32s")
_CHECKSUM_BYTES = 16
RECORD_HEAD_BYTES = _RECORD_HEAD.size + _CHECKSUM_BYTES

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the request's tokens are drawn. `seed`: below 2⁶⁴, the one in use."""

    temperature: float
    top_p: float
    seed: int

    def params(self, max_tokens: int) -> SamplingParams:
        """The same for so many tokens. Raises `InputError` for values out of range."""
        return SamplingParams(max_tokens, self.temperature, self.top_p, self.seed)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A prompt whose prefill has begun. `token_ids`: uint32 [S]."""

    token_ids: npt.NDArray[np.uint32]
    images: tuple[ImageSpan, ...]
    sampling: Sampling

    def to_bytes(self) -> bytes:
        """As the store keeps it."""
        s = self.sampling
        head = _PROMPT_HEAD.pack(
            *(_ANNOUNCEMENT, VERSION, len(self.images), len(self.token_ids)),
            *(s.temperature, s.top_p, s.seed),
        )
        body = np.ascontiguousarray(self.token_ids, "<u4").tobytes()
        body += b"".join(_IMAGE.pack(*image) for image in self.images)
        return head + xxhash.xxh3_128_digest(head + body) + body

    @classmethod
    def from_bytes(cls, payload: Buffer) -> "Announcement":
        """Raises `SnapshotError` for whatever `to_bytes` did not make."""
        view = memoryview(payload)
        fields = _head(view, _PROMPT_HEAD, _ANNOUNCEMENT, "an announced prompt")
        _, _, images, tokens, temperature, top_p, seed = fields
        at = _PROMPT_HEAD.size + _CHECKSUM_BYTES
        if len(view) != at + 4 * tokens + _IMAGE.size * images:
            raise SnapshotError(
                f"an announced prompt of {tokens} tokens and {images} images in {len(view)} bytes"
            )
        _check(view, _PROMPT_HEAD.size, whole=True)
        ids = np.frombuffer(view, "<u4", tokens, at).astype(np.uint32)
        spans = _IMAGE.iter_unpack(view[at + 4 * tokens :])
        return cls(
            ids, tuple(ImageSpan(*span) for span in spans), Sampling(temperature, top_p, seed)
        )


@dataclass(frozen=True, slots=True)
class HandoverRecord:
    """The state behind a prompt, and how it goes on.

    `prompt_key`: the snapshot key of the whole prompt, which says in what namespace and behind
    which tokens and pixels it is. `first_token`: drawn, not run. `drawn`: tokens drawn so far.
    `snapshot`: see `model_adapter.snapshot`.
    """

    prompt_key: bytes
    prompt_tokens: int
    first_token: int
    drawn: int
    sampling: Sampling
    snapshot: Buffer

    def to_bytes(self) -> bytes:
        """As the store keeps it."""
        s = self.sampling
        head = _RECORD_HEAD.pack(
            *(_RECORD, VERSION, self.first_token, self.drawn, 0, self.prompt_tokens),
            *(s.temperature, s.top_p, s.seed, len(self.snapshot), self.prompt_key),
        )
        return head + xxhash.xxh3_128_digest(head) + bytes(self.snapshot)

    @classmethod
    def from_bytes(cls, payload: Buffer) -> "HandoverRecord":
        """Raises `SnapshotError` for whatever `to_bytes` did not make; the snapshot in it is not
        looked at."""
        view = memoryview(payload)
        fields = _head(view, _RECORD_HEAD, _RECORD, "a hand-over record")
        _, _, first, drawn, _, tokens, temperature, top_p, seed, size, key = fields
        if len(view) != RECORD_HEAD_BYTES + size:
            raise SnapshotError(
                f"a hand-over record with a snapshot of {size} bytes in {len(view)} bytes"
            )
        _check(view, _RECORD_HEAD.size, whole=False)
        sampling = Sampling(temperature, top_p, seed)
        return cls(key, tokens, first, drawn, sampling, view[RECORD_HEAD_BYTES:])


def _head(view: memoryview, head: struct.Struct, magic: bytes, what: str) -> tuple[Any, ...]:
    if len(view) < head.size + _CHECKSUM_BYTES or bytes(view[: len(magic)]) != magic:
        raise SnapshotError(f"{len(view)} bytes are not {what}: they don't begin like one")
    fields = head.unpack_from(view)
    if fields[1] != VERSION:
        raise SnapshotError(f"{what} of format {fields[1]}; this program reads format {VERSION}")
    if not all(map(math.isfinite, (f for f in fields if isinstance(f, float)))):
        raise SnapshotError(f"{what} with numbers that are none")
    return fields


def _check(view: memoryview, head_bytes: int, whole: bool) -> None:
    body = head_bytes + _CHECKSUM_BYTES
    digest = xxhash.xxh3_128(view[:head_bytes])
    if whole:
        digest.update(view[body:])
    if digest.digest() != bytes(view[head_bytes:body]):
        raise SnapshotError(
            f"{len(view)} bytes of a hand-over do not match their checksum: damaged"
        )
