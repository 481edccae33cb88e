"""The adapter on a simulated CUDA device: the bytes and tokens of the CPU, and nothing off it."""

import numpy as np
import pytest
import torch
from cache_bytes import assert_same, cache_bytes
from golden_model import DIRECTORY
from tensors_on_device import CUDA, DeviceTensor, host_kernels, simulate

from kernels import gpu
from model_adapter import attention, indexer, records
from model_adapter.devices import device_of
from model_adapter.errors import InputError
from model_adapter.golden import Status, check_golden
from model_adapter.golden.drafts import draft
from model_adapter.golden.end_to_end import Comparison
from model_adapter.golden.images import image_prompt
from model_adapter.golden.tolerance import TOLERANCES
from model_adapter.golden.vectors import Vectors
from model_adapter.model import Model
from model_adapter.rope import rotations
from model_adapter.snapshot import Computed, read_snapshot

IDS = np.random.default_rng(0).integers(11, 500, 70)
BLOCK = 16
COMPUTED = Computed(torch.float32, "bounded")


@pytest.fixture
def cuda(request):
    with simulate(host_kernels(request.config)) as simulated:
        yield simulated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "channels"),
    [("nvfp4", 64), ("nvfp4", 16), ("nvfp4", 512), ("mxfp4", 32), ("mxfp4", 128), ("fp8", 64)],
)
def test_records_have_the_bytes_of_the_cpu(cuda, kind, channels, dtype):
    values = torch.randn(5, 3, channels, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = records.pack(kind, values)
    on_device = records.pack(kind, values.to(CUDA))
    assert isinstance(on_device, DeviceTensor)
    assert torch.equal(on_device.on_host, packed)
    for part in (on_device, on_device[1:], on_device[:, 1]):
        back = records.unpack(kind, part)
        assert isinstance(back, DeviceTensor)
        assert torch.equal(back.on_host, records.unpack(kind, part.on_host))


@pytest.fixture(scope="module")
def expected():
    """Logits and cache of a prefill and two decoded tokens, on the CPU."""
    model = Model.load(DIRECTORY)
    cache = model.new_cache()
    logits = [model.prefill(cache, IDS, chunk_tokens=32)]
    logits += [model.decode(cache, token) for token in (7, 8)]
    return logits, cache_bytes(cache)


LOADING = {"checkpoint", "quantized", "weights", "rope"}
TOKENS = {"cache", "cache_rows", "engram", "model", "records"}
COUNTS = {"moe"}
"""Modules that touch the host: for weights, for token ids, and to learn how many tokens an expert
has, which decides what is launched."""


def test_a_forward_pass_leaves_what_it_leaves_on_the_cpu(cuda, expected, monkeypatch):
    for codecs in ("_QUANTIZE", "_DEQUANTIZE"):
        monkeypatch.setattr(records, codecs, {})
    model = Model.load(DIRECTORY, device=CUDA)
    cache = model.new_cache()
    logits = [model.prefill(cache, IDS, chunk_tokens=32)]
    logits += [model.decode(cache, token) for token in (7, 8)]
    assert set(cuda.on_host) <= LOADING | TOKENS | COUNTS
    assert set(cuda.crossings) <= {"weights", "model"} | COUNTS
    for mine, theirs in zip(logits, expected[0], strict=True):
        assert isinstance(mine, DeviceTensor)
        assert torch.equal(mine.on_host, theirs)
    assert_same(cache_bytes(cache), expected[1])


def test_a_mistake_of_devices_is_seen(cuda):
    there = torch.zeros(3, device=CUDA)
    with pytest.raises(RuntimeError, match="on cpu, not on cuda:0"):
        there + torch.zeros(3)
    with pytest.raises(RuntimeError, match="on cpu, not on cuda:0"):
        there.index_select(0, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    cuda.on_host.clear()
    rotations(torch.arange(3), torch.ones(2))
    assert cuda.on_host["rope"] > 0


@pytest.mark.parametrize("group", [draft, image_prompt])
def test_drafts_and_images_agree_with_the_vectors(cuda, group):
    model = Model.load(DIRECTORY, device=CUDA)
    results = list(group(Comparison(model, Vectors(DIRECTORY, "float32"), TOLERANCES["float32"])))
    assert len(results) > 1
    assert {r.status for r in results} == {Status.OK}


@pytest.fixture(scope="module")
def snapshots():
    """Sequences on the CPU: token ids, blocks, the state behind them, a next token, its logits."""
    model = Model.load(DIRECTORY)
    ids = np.random.default_rng(1).integers(11, 500, 401)
    made = []
    for count in (200, 400):
        cache = model.new_cache()
        model.prefill(cache, ids[:count])
        blocks = [[s.copy() for s in cache.block_sections(i, BLOCK)] for i in range(count // BLOCK)]
        payload = cache.to_snapshot(BLOCK, COMPUTED)
        token = int(ids[count])
        made.append((ids[:count], blocks, bytes(payload), token, model.decode(cache, token)))
    return made


def taken_up(model, ids, blocks, payload):
    """A cache that goes on where a snapshot stands."""
    cache = model.new_cache()
    for i, sections in enumerate(blocks):
        cache.load_block(i, BLOCK, sections)
    cache.from_snapshot(read_snapshot(payload, model.config, COMPUTED), ids)
    return cache


def test_blocks_and_snapshots_come_to_the_device_and_back(cuda, snapshots):
    model = Model.load(DIRECTORY, device=CUDA)
    ids, blocks, payload, _, _ = snapshots[0]
    cache = taken_up(model, ids, blocks, payload)
    assert bytes(cache.to_snapshot(BLOCK, COMPUTED)) == payload
    for i, sections in enumerate(blocks):
        assert all(map(np.array_equal, cache.block_sections(i, BLOCK), sections))
    before = cache_bytes(cache)
    model.decode(cache, 7)
    cache.truncate(len(ids))
    assert_same(cache_bytes(cache), before)


def test_what_a_step_makes_does_not_grow_with_the_sequence(cuda, snapshots, monkeypatch):
    bound = 8 << 10
    model = Model.load(DIRECTORY, device=CUDA)
    monkeypatch.setattr(attention, "GATHER_BYTES_MAX", bound)
    monkeypatch.setattr(indexer, "SCAN_TILE_BYTES_MAX", bound)
    made = []
    for ids, blocks, payload, token, expected in snapshots:
        cache = taken_up(model, ids, blocks, payload)
        cuda.largest.clear()
        logits = model.decode(cache, token)
        assert float((logits.on_host - expected).norm() / expected.norm()) < 1e-4
        made.append(dict(cuda.largest))
    rows = min(len(cache.main(layer)) for layer in model.config.kv_sources)
    assert rows * model.config.head_dim * 4 > 4 * bound
    # the kernels take index keys of 32 channels as 128
    assert made[0]["records"] <= 4 * bound
    del made[0]["cache_rows"], made[1]["cache_rows"]
    assert made[0] == made[1]


def test_devices_that_can_not_be_had(monkeypatch):
    assert device_of("cpu") == torch.device("cpu")
    for name in ("meta", "tpu", "cuda:x"):
        with pytest.raises(InputError, match=f"'{name}' is unknown; use cpu, cuda or cuda:N"):
            device_of(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees no CUDA device here"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="'cuda:2': torch sees 2 CUDA devices"):
        device_of("cuda:2")
    monkeypatch.setattr(gpu, "check", lambda: None)
    assert device_of("cuda") == torch.device("cuda", 0)
    assert device_of("cuda:1") == torch.device("cuda", 1)

    def missing():
        raise gpu.GpuUnavailableError("CuPy can't be imported")

    monkeypatch.setattr(gpu, "check", missing)
    with pytest.raises(InputError, match="the record kernels can't run: CuPy can't be imported"):
        device_of("cuda")


@pytest.mark.gpu
def test_the_golden_vectors_on_a_gpu():
    try:
        device = device_of("cuda")
    except InputError as e:
        pytest.skip(str(e))
    assert check_golden(DIRECTORY, "float32", device).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "channels"), [("nvfp4", 512), ("mxfp4", 32), ("fp8", 64)])
def test_records_on_a_gpu_have_the_bytes_of_the_cpu(kind, channels):
    try:
        device = device_of("cuda")
    except InputError as e:
        pytest.skip(str(e))
    values = torch.randn(300, channels, generator=torch.Generator().manual_seed(0))
    packed = records.pack(kind, values)
    on_device = records.pack(kind, values.to(device))
    assert torch.equal(on_device.cpu(), packed)
    assert torch.equal(records.unpack(kind, on_device[1:]).cpu(), records.unpack(kind, packed[1:]))
