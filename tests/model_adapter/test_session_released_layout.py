"""Blocks of the released layout through a real store: 227,840 bytes for 256 tokens, 890.0 each."""

import numpy as np
import pytest

import kvstore
from kvstore import DS41F_LAYOUT, BlockPut, Namespace, Outcome, PutOutcome, Tier

BLOCKS = 12
BLOCK_BYTES = 227_840
FRAME_BYTES = 229_376
"""A block, a header of 512 bytes, and what fills the last 4 KiB page."""


@pytest.fixture
def blocks():
    rng = np.random.default_rng(5)
    return [[rng.bytes(n) for n in DS41F_LAYOUT.section_bytes] for _ in range(BLOCKS)]


def put_all(client, namespace, blocks):
    handle = client.open_namespace(namespace)
    keys = handle.block_keys(np.arange(BLOCKS * 256, dtype=np.uint32))
    puts = [
        BlockPut(key, parent, sections)
        for key, parent, sections in zip(keys, [handle.id, *keys], blocks, strict=False)
    ]
    assert client.put(handle, puts) == [PutOutcome.STORED] * BLOCKS
    client.flush()
    return handle, keys


def test_layout_says_890_bytes_per_token():
    assert DS41F_LAYOUT.block_bytes == BLOCK_BYTES
    assert DS41F_LAYOUT.bytes_per_token == 890.0
    assert DS41F_LAYOUT.section_bytes == (36_864, 8_704) * 3 + (73_728, 17_408)


def test_stored_blocks_have_their_true_size(tmp_path, blocks):
    namespace = Namespace("ds41f", "released", DS41F_LAYOUT)
    settings = {
        "dram": {"budget_bytes": "16MiB"},
        "ssd": {"budget_bytes": "64MiB", "segment_bytes": "8MiB", "free_floor_bytes": 0},
    }
    with kvstore.connect(f"file://{tmp_path}", **settings) as client:
        handle, keys = put_all(client, namespace, blocks)
        tiers = {t.tier: t for t in client.stat().tiers}
        for tier in (Tier.DRAM, Tier.SSD):
            assert tiers[tier].objects == BLOCKS
            assert tiers[tier].payload_bytes == BLOCKS * BLOCK_BYTES
            assert tiers[tier].payload_bytes / (BLOCKS * 256) == 890.0
        assert tiers[Tier.DRAM].used_bytes == BLOCKS * FRAME_BYTES
        infos = client.ls(handle)
        assert {info.payload_bytes for info in infos} == {BLOCK_BYTES}
        on_disk = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.seg"))
        # one page of segment header at most, besides the frames
        assert BLOCKS * FRAME_BYTES <= on_disk <= BLOCKS * FRAME_BYTES + 4096
        assert tiers[Tier.SSD].used_bytes >= on_disk
    with kvstore.connect(f"file://{tmp_path}", **settings) as client:
        handle = client.open_namespace(namespace)
        with client.acquire(handle, keys) as lease:
            assert lease.blocks == BLOCKS
            data = client.read(lease, keys)
        assert {d.tier for d in data} == {Tier.SSD}
        assert {d.outcome for d in data} == {Outcome.HIT}
        assert [[bytes(s) for s in d.sections] for d in data] == blocks
        assert client.verify().clean
