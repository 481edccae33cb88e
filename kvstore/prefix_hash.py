"""The chained 32-byte names of blocks: equal names, equal history.

`key_i = SHA-256(context ‖ key_{i-1} ‖ token ids as u32le ‖ images)`, with `key_{-1}` the namespace
id and, for every image that touches the block in order of position, its 32-byte content digest and
`block start − image start` in tokens as i64le. `docs/identity.md` has the format byte for byte;
SHA-256 because SHA-NI makes it the fastest wide digest of the standard library.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.namespace import DIGEST_BYTES

_BLOCK_CONTEXT = b"ds41-kvstore/v1/block\0"
_SNAPSHOT_CONTEXT = b"ds41-kvstore/v1/snapshot\0"

TokenIds = npt.NDArray[np.integer] | Sequence[int] | bytes | bytearray | memoryview


class ImageSpan(NamedTuple):
    """An image's place in the prompt.

    `start`, `length`: tokens, START and END included. `digest`: 32 bytes over the pixels and the
    grid, whatever decides the image's embeddings.
    """

    start: int
    length: int
    digest: bytes


def token_buffer(token_ids: TokenIds) -> memoryview:
    """Token ids as little-endian u32 bytes, without a copy where they lie so already.

    A bytes-like argument is taken as u32le. Raises `InvalidRequest` for ids that a u32 can't hold,
    for arrays of other than one dimension and for a byte length that 4 does not divide.
    """
    if isinstance(token_ids, bytes | bytearray | memoryview):
        view = memoryview(token_ids).cast("B")
        if len(view) % 4:
            raise InvalidRequest(f"{len(view)} bytes are no whole number of u32 token ids")
        return view
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError) as e:
        raise InvalidRequest(f"token ids are not integers: {e}") from e
    if ids.size == 0:
        return memoryview(b"")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids must be one row of integers, not {ids.dtype}{ids.shape}")
    if ids.dtype != np.uint32 and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise InvalidRequest(f"token ids {ids.min()} … {ids.max()} do not fit a u32")
    return np.ascontiguousarray(ids, dtype="<u4").data.cast("B")


def _check_images(images: Sequence[ImageSpan], tokens: int) -> None:
    end = 0
    for image in images:
        if len(image.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"an image digest has {DIGEST_BYTES} B, not {len(image.digest)}")
        if image.length < 1 or image.start < end or image.start + image.length > tokens:
            raise InvalidRequest(
                f"image at {image.start}+{image.length} overlaps another or leaves the prompt "
                f"of {tokens} tokens"
            )
        end = image.start + image.length


def _image_bytes(images: Sequence[ImageSpan], start: int, stop: int) -> bytes:
    return b"".join(
        image.digest + (start - image.start).to_bytes(8, "little", signed=True)
        for image in images
        if image.start < stop and image.start + image.length > start
    )


def block_keys(
    parent: bytes,
    token_ids: TokenIds,
    block_tokens: int,
    images: Sequence[ImageSpan] = (),
) -> list[bytes]:
    """Names of the full blocks of a prompt; tokens behind the last full block name nothing.

    `parent`: the namespace id. `images`: in order of position. One million tokens take a few
    milliseconds as an array; a list of ints takes longer to convert than to hash.
    """
    if len(parent) != DIGEST_BYTES:
        raise InvalidRequest(f"parent must have {DIGEST_BYTES} B, not {len(parent)}")
    if block_tokens < 1:
        raise InvalidRequest(f"block_tokens must be ≥ 1, not {block_tokens}")
    data = token_buffer(token_ids)
    _check_images(images, len(data) // 4)
    sha256, step = hashlib.sha256, 4 * block_tokens
    keys: list[bytes] = []
    for at in range(0, len(data) - step + 1, step):
        h = sha256(_BLOCK_CONTEXT + parent)
        h.update(data[at : at + step])
        if images:
            first = at // 4
            h.update(_image_bytes(images, first, first + block_tokens))
        parent = h.digest()
        keys.append(parent)
    return keys


def snapshot_key(
    last_block_key: bytes,
    remaining_ids: TokenIds,
    start: int = 0,
    images: Sequence[ImageSpan] = (),
) -> bytes:
    """Name of the window snapshot behind the last full block and `remaining_ids`.

    `last_block_key`: the namespace id where the prompt has no full block. `start`: position of the
    first remaining token, which places `images`.
    """
    data = token_buffer(remaining_ids)
    stop = start + len(data) // 4
    h = hashlib.sha256(_SNAPSHOT_CONTEXT + last_block_key)
    h.update(len(data).to_bytes(8, "little"))
    h.update(data)
    h.update(_image_bytes(images, start, stop))
    return h.digest()
