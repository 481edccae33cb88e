"""Rows in a device's memory: out of the store's HBM (simulated), else by way of the host."""

import time

import numpy as np
import pytest
import torch

import kernels
from kvstore import BlockPut, Layout, Namespace, Outcome, PutOutcome, SectionSpec, Tier, connect
from model_adapter.demo.daemon import Daemon
from model_adapter.device_rows import DeviceRows

LAYOUT = Layout(
    (SectionSpec(2, "main", 2, 72), SectionSpec(2, "index", 2, 34), SectionSpec(20, "main", 1, 72)),
    64,
)
BLOCKS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with (
        Daemon(tmp_path_factory.mktemp("rows"), 4 << 20, 256 << 20, hbm_bytes=1 << 20) as daemon,
        connect(f"{daemon.url}?data=shared") as client,
    ):
        assert client.open_hbm() == "simulated"
        ns = client.open_namespace(Namespace("rows", "1", LAYOUT))
        rng = np.random.default_rng(3)
        keys = ns.block_keys(np.arange(BLOCKS * LAYOUT.block_tokens, dtype=np.uint32))
        values = [
            rng.standard_normal((BLOCKS * 64 // s.ratio, 128 if s.role == "main" else 64))
            for s in LAYOUT.sections
        ]
        packed = [
            (kernels.nvfp4_quantize if s.role == "main" else kernels.mxfp4_quantize)(
                v.astype(np.float32)
            )
            for s, v in zip(LAYOUT.sections, values, strict=True)
        ]
        parts = [np.split(p, BLOCKS) for p in packed]
        blocks = [
            BlockPut(key, parent, [part[i] for part in parts])
            for i, (key, parent) in enumerate(zip(keys, [ns.id, *keys], strict=False))
        ]
        assert client.put(ns, blocks) == [PutOutcome.STORED] * BLOCKS
        client.acquire(ns, keys).release()
        ends_s = time.monotonic() + 30
        while not any(t.tier is Tier.HBM and t.objects == BLOCKS for t in client.stat().tiers):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        yield client, ns, keys, packed


def rows_of(packed):
    return [torch.from_numpy(p) for p in packed]


def test_blocks_come_out_of_hbm(store):
    client, ns, keys, packed = store
    rows = DeviceRows(LAYOUT, BLOCKS * 64, "cpu")
    with client.acquire(ns, keys) as lease:
        filled = rows.load(client, lease)
    assert (filled.blocks, filled.tiers) == (BLOCKS, {Tier.HBM: BLOCKS})
    assert all(map(torch.equal, rows.sections, rows_of(packed)))


def test_what_was_outrun_or_is_not_in_hbm_comes_by_the_host(store, monkeypatch):
    client, ns, keys, packed = store
    rows = DeviceRows(LAYOUT, BLOCKS * 64, "cpu")
    outrun = {keys[1], keys[4]}
    view = client.view_hbm

    def shown(lease, wanted, sections=None):
        blocks = view(lease, wanted, sections)
        return [None if block.key == keys[2] else block for block in blocks]

    monkeypatch.setattr(client, "view_hbm", shown)
    monkeypatch.setattr(client, "intact", lambda lease, asked: not outrun & set(asked))
    reads = []
    read = client.read
    monkeypatch.setattr(
        client, "read", lambda lease, wanted: reads.extend(wanted) or read(lease, wanted)
    )
    with client.acquire(ns, keys) as lease:
        filled = rows.load(client, lease)
    assert filled.blocks == BLOCKS
    assert reads == [keys[1], keys[2], keys[4]]
    assert all(map(torch.equal, rows.sections, rows_of(packed)))


def test_it_ends_at_the_first_block_that_is_not_there(store, monkeypatch):
    client, ns, keys, packed = store
    rows = DeviceRows(LAYOUT, BLOCKS * 64, "cpu")
    monkeypatch.setattr(client, "view_hbm", lambda lease, wanted: [None] * len(wanted))
    read = client.read

    def lacking(lease, wanted):
        blocks = read(lease, wanted)
        if wanted == [keys[3]]:
            return [type(blocks[0])(keys[3], Outcome.MISS)]
        return blocks

    monkeypatch.setattr(client, "read", lacking)
    with client.acquire(ns, keys) as lease:
        assert rows.load(client, lease, first=1).blocks == 2
    for mine, theirs, spec in zip(rows.sections, rows_of(packed), LAYOUT.sections, strict=True):
        n = 64 // spec.ratio
        assert torch.equal(mine[n : 3 * n], theirs[n : 3 * n])


@pytest.mark.parametrize("section", [0, 1, 2])
def test_tiles_are_the_values(store, section):
    client, ns, keys, packed = store
    rows = DeviceRows(LAYOUT, BLOCKS * 64, "cpu")
    with client.acquire(ns, keys) as lease:
        rows.load(client, lease)
    kind = kernels.mxfp4_dequantize if section == 1 else kernels.nvfp4_dequantize
    tiles = list(rows.tiles(section, 150, tile_rows=64))
    assert [len(tile) for tile in tiles] == [64, 64, 22]
    np.testing.assert_array_equal(torch.cat(tiles).numpy(), kind(packed[section][:150]))


@pytest.mark.gpu
def test_tiles_on_a_gpu_are_those_of_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    values = np.random.default_rng(0).standard_normal((200, 128)).astype(np.float32)
    packed = kernels.nvfp4_quantize(values)
    rows = DeviceRows(LAYOUT, 200, "cuda")
    rows.sections[2].copy_(torch.from_numpy(packed))
    tiles = torch.cat(list(rows.tiles(2, 200, tile_rows=128)))
    np.testing.assert_array_equal(tiles.cpu().numpy(), kernels.nvfp4_dequantize(packed))
