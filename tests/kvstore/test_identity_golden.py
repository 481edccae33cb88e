"""The examples of docs/identity.md, computed a second time with nothing but hashlib and struct."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import NamespaceHandle
from kvstore.namespace import DS41F_LAYOUT, Namespace, namespace_id
from kvstore.prefix_hash import ImageSpan, block_keys, snapshot_key

DOCUMENT = (Path(__file__).parents[2] / "docs" / "identity.md").read_text()
SECRET = bytes(range(32))
GOLDEN = {
    "namespace": "58498a367346e4a30ed49ee17661d4288d914139174080e93e705c13d55c80c5",
    "tenant": "2b2400c4c2406cb1536c50cfcb1b45fed5fb018bb53b835bab353e8ccbda60ea",
    "block 0": "0b7f4c023dcc24824bc342489859fc8aac42993b6d2e1d9cfdabbec56123b491",
    "block 1": "af44cae7c7b770c9030e5aae2f1a54a21ef1848bbe681184a15bb92fcba1df98",
    "image block 0": "601c2dab14a53c0ad68c3c5bde7815a0504c31708810faa47ec40366400822e2",
    "image block 1": "2b56db33353c28a72d2b1b5430309fe4f29a9a018e42b6099fe497291ae6a025",
    "snapshot": "80e370df3c8a32125ffb59062deb11a17d6053c6f8380498703574e01779e1bd",
    "short snapshot": "4e73f905c4b1814a1e6a8a05b8b68f99098270553dd5e8c904c87ee7b3912355",
    "image snapshot": "7c089c07560046be3e56f5fd70d859e2e6c2246e4bfd000e826bdcef1baa8f77",
    "empty snapshot": "0c96052bf9b40d5727498e6de6e45f74bc4318984b56bdc5de4eaa4bd4858f34",
}
PICTURE = hashlib.sha256(b"the pixels of a picture").digest()


def independent() -> dict[str, str]:
    def digest(use: str, *parts: bytes) -> bytes:
        h = hashlib.new("sha256")
        for part in (b"ds41-kvstore/v1/", use.encode("ascii"), b"\x00", *parts):
            h.update(part)
        return h.digest()

    def hmac(key: bytes, message: bytes) -> bytes:
        padded = key + b"\x00" * (64 - len(key))
        inner = hashlib.sha256(bytes(b ^ 0x36 for b in padded) + message).digest()
        return hashlib.sha256(bytes(b ^ 0x5C for b in padded) + inner).digest()

    sections = [
        f'{{"layer":{layer},"ratio":{ratio},"role":"{role}","row_bytes":{size}}}'
        for layer, ratio in [(2, 2), (8, 2), (14, 2), (20, 1)]
        for role, size in [("main", 288), ("index", 68)]
    ]

    def descriptor(tenant: str) -> bytes:
        text = (
            '{"block_tokens":256,"format":1,"layout":[' + ",".join(sections) + "],"
            '"model":"DeepSeek-V4.1-Flash","tenant":"' + tenant + '","weight_revision":"2026-10"}'
        )
        return text.encode("utf-8")

    def tokens(first: int, last: int) -> bytes:
        return struct.pack(f"<{last - first}I", *range(first, last))

    def shown(first: int, last: int) -> bytes:
        ids = [129264 if 100 <= i < 400 else i for i in range(first, last)]
        return struct.pack(f"<{last - first}I", *ids)

    ns = digest("namespace", descriptor(""))
    tenant = hmac(SECRET, b"ds41-kvstore/v1/tenant\x00" + digest("namespace", descriptor("café")))
    block_0 = digest("block", ns, tokens(0, 256))
    block_1 = digest("block", block_0, tokens(256, 512))
    image_0 = digest("block", ns, shown(0, 256), PICTURE, struct.pack("<q", -100))
    image_1 = digest("block", image_0, shown(256, 512), PICTURE, struct.pack("<q", 156))
    snapshot = digest("snapshot", block_1, struct.pack("<Q", 28), tokens(512, 519))
    short = digest("snapshot", ns, struct.pack("<Q", 28), tokens(0, 7))
    picture = (PICTURE, struct.pack("<q", 156))
    behind = digest("snapshot", image_0, struct.pack("<Q", 616), shown(256, 410), *picture)
    empty = digest("snapshot", block_1, struct.pack("<Q", 0))
    names = (ns, tenant, block_0, block_1, image_0, image_1, snapshot, short, behind, empty)
    return {use: name.hex() for use, name in zip(GOLDEN, names, strict=True)}


def ours() -> dict[str, str]:
    plain = Namespace("DeepSeek-V4.1-Flash", "2026-10", DS41F_LAYOUT)
    secret = Namespace("DeepSeek-V4.1-Flash", "2026-10", DS41F_LAYOUT, "café")
    ns = namespace_id(plain)
    ids = np.arange(519)
    blocks = block_keys(ns, ids, 256)
    shown = np.where((ids >= 100) & (ids < 400), 129264, ids)
    images = block_keys(ns, shown[:512], 256, [ImageSpan(100, 300, PICTURE)])
    names = (
        ns,
        namespace_id(secret, SECRET),
        *blocks,
        *images,
        snapshot_key(blocks[1], ids[512:], 512),
        snapshot_key(ns, ids[:7]),
        snapshot_key(images[0], shown[256:410], 256, [ImageSpan(100, 300, PICTURE)]),
        snapshot_key(blocks[1], [], 512),
    )
    return {use: name.hex() for use, name in zip(GOLDEN, names, strict=True)}


def test_the_package_gives_the_golden_names():
    assert ours() == GOLDEN


def test_a_handle_derives_them_from_all_the_tokens():
    plain = Namespace("DeepSeek-V4.1-Flash", "2026-10", DS41F_LAYOUT)
    handle, ids = NamespaceHandle(namespace_id(plain), plain), np.arange(519)
    shown = np.where((ids >= 100) & (ids < 400), 129264, ids)
    picture = [ImageSpan(100, 300, PICTURE)]
    assert {
        "snapshot": handle.snapshot_key(ids).hex(),
        "short snapshot": handle.snapshot_key(ids[:7]).hex(),
        "image snapshot": handle.snapshot_key(shown[:410], picture).hex(),
        "empty snapshot": handle.snapshot_key(ids[:512]).hex(),
    }.items() <= GOLDEN.items()


def test_the_page_alone_gives_the_golden_names():
    assert independent() == GOLDEN


@pytest.mark.parametrize("use", GOLDEN)
def test_the_page_shows_them(use):
    assert f"`{GOLDEN[use]}`" in DOCUMENT
