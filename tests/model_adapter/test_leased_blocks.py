"""Blocks into a cache: out of the store's HBM (simulated) where it has them, else by the host."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tiny_checkpoint as tiny
import torch
from cache_bytes import assert_same, cache_bytes
from tensors_on_device import CUDA, DeviceTensor, host_kernels, simulate
from tiny_checkpoint import BLOCK_TOKENS

from kvstore import BlockData, Outcome, Tier
from model_adapter.cache import SequenceCache
from model_adapter.devices import device_of
from model_adapter.errors import InputError, SectionsLost
from model_adapter.model import Model
from model_adapter.session import CachedSession, StoreBlocks, leased_blocks
from model_adapter.session.leased_blocks import LeasedBlocks

IDS = tiny.prompt(150)
BLOCKS = 4
TOKENS = 6
WAIT_S = 30.0
CPU = torch.device("cpu")


def wait_for_promotion(client) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not any(t.tier is Tier.HBM and t.objects == BLOCKS for t in client.stat().tiers):
        assert time.monotonic() < ends_s, "they were not promoted in time"
        time.sleep(0.01)


@pytest.fixture
def client(tmp_path):
    """A store with the blocks of `IDS`, all in HBM."""
    with tiny.store(tmp_path, hbm={"device": "simulated", "budget_bytes": "1MiB"}) as client:
        assert client.open_hbm() == "simulated"
        tiny.session(client, snapshots=False).generate(IDS, 1)
        ns = client.open_namespace(tiny.namespace())
        client.acquire(ns, ns.block_keys(IDS)).release()
        wait_for_promotion(client)
        yield client


@pytest.fixture
def keys(client):
    return client.open_namespace(tiny.namespace()).block_keys(IDS)


@pytest.fixture(scope="module")
def expected():
    return [[bytes(s) for s in sections] for sections in tiny.rows_of(IDS)]


def watch(monkeypatch, client) -> list[bytes]:
    """The keys of every read by way of the host."""
    read, asked = client.read, []

    def watched(lease, keys, *args):
        asked.extend(keys)
        return read(lease, keys, *args)

    monkeypatch.setattr(client, "read", watched)
    return asked


def hide(monkeypatch, client, hidden) -> None:
    """Blocks that are not in HBM when they are looked at."""
    view = client.view_hbm

    def shown(lease, keys, sections=None):
        blocks = view(lease, keys, sections)
        return [None if block.key in hidden else block for block in blocks]

    monkeypatch.setattr(client, "view_hbm", shown)


def overtake(monkeypatch, client, outrun) -> None:
    """Blocks whose slots become others' while they are copied: what is copied is wrong."""
    view = client.view_hbm

    def shown(lease, keys, sections=None):
        return [
            replace(block, sections=tuple(np.zeros_like(s) for s in block.sections))
            if block is not None and block.key in outrun
            else block
            for block in view(lease, keys, sections)
        ]

    monkeypatch.setattr(client, "view_hbm", shown)
    monkeypatch.setattr(client, "intact", lambda lease, keys: not outrun & set(keys))


def load(client, keys, device=CPU) -> tuple[SequenceCache, list[Tier]]:
    """All blocks in one batch."""
    cache = SequenceCache(tiny.model().config, device)
    leased = LeasedBlocks(client, BLOCK_TOKENS, device)
    with client.acquire(client.open_namespace(tiny.namespace()), keys) as lease:
        return cache, leased.load(lease, keys, cache, 0)


def assert_holds(cache, expected) -> None:
    assert cache.loaded_tokens == len(expected) * BLOCK_TOKENS
    for i, sections in enumerate(expected):
        assert [bytes(s) for s in cache.block_sections(i, BLOCK_TOKENS)] == sections


def test_blocks_come_out_of_hbm_and_nothing_by_the_host(client, keys, expected, monkeypatch):
    asked = watch(monkeypatch, client)
    cache, tiers = load(client, keys)
    assert tiers == [Tier.HBM] * BLOCKS
    assert asked == []
    assert_holds(cache, expected)


@pytest.mark.parametrize("hidden", [{0}, {1, 2}, {3}, {0, 2}])
def test_what_is_not_in_hbm_comes_by_the_host(client, keys, expected, monkeypatch, hidden):
    hide(monkeypatch, client, {keys[i] for i in hidden})
    asked = watch(monkeypatch, client)
    cache, tiers = load(client, keys)
    assert len(tiers) == BLOCKS
    assert asked == [keys[i] for i in sorted(hidden)]
    assert_holds(cache, expected)


@pytest.mark.parametrize("outrun", [{0}, {2}, {1, 3}])
def test_what_was_overtaken_comes_by_the_host(client, keys, expected, monkeypatch, outrun):
    overtake(monkeypatch, client, {keys[i] for i in outrun})
    asked = watch(monkeypatch, client)
    cache, tiers = load(client, keys)
    assert len(tiers) == BLOCKS
    assert asked == list(keys[min(outrun) :])
    assert_holds(cache, expected)


def test_it_ends_at_the_first_block_that_is_not_there(client, keys, expected, monkeypatch):
    hide(monkeypatch, client, {keys[2]})
    monkeypatch.setattr(
        client, "read", lambda lease, keys: [BlockData(key, Outcome.MISS) for key in keys]
    )
    cache, tiers = load(client, keys)
    assert tiers == [Tier.HBM] * 2
    assert_holds(cache, expected[:2])


@pytest.mark.parametrize(("hidden", "outrun"), [(set(), {1}), ({0, 3}, set()), ({0, 1}, {3})])
def test_sections_read_ahead_come_from_both(client, keys, expected, monkeypatch, hidden, outrun):
    hide(monkeypatch, client, {keys[i] for i in hidden})
    overtake(monkeypatch, client, {keys[i] for i in outrun})
    asked = watch(monkeypatch, client)
    ns = client.open_namespace(tiny.namespace())
    leased = LeasedBlocks(client, BLOCK_TOKENS, CPU)
    cache = SequenceCache(tiny.model().config)
    promises = cache.promise_blocks(BLOCKS, BLOCK_TOKENS)
    with client.acquire(ns, keys) as lease:
        for number, promise in enumerate(promises):
            leased.load_section(lease, keys, number, 0, promise.rows)
            promise.done.set_result(None)
    assert asked == [keys[i] for i in sorted(hidden | outrun)] * len(promises)
    assert_holds(cache, expected)


def test_a_section_that_is_missing_is_named(client, keys, monkeypatch):
    hide(monkeypatch, client, {keys[1], keys[2]})
    monkeypatch.setattr(
        client,
        "read",
        lambda lease, wanted, sections, into: [BlockData(wanted[0], Outcome.MISS)] * len(wanted),
    )
    cache = SequenceCache(tiny.model().config)
    promise = cache.promise_blocks(BLOCKS, BLOCK_TOKENS)[0]
    leased = LeasedBlocks(client, BLOCK_TOKENS, CPU)
    with (
        client.acquire(client.open_namespace(tiny.namespace()), keys) as lease,
        pytest.raises(SectionsLost, match="section 0 of block 1 is not there"),
    ):
        leased.load_section(lease, keys, 0, 0, promise.rows)


def test_another_kind_of_device_is_read_by_the_host(client, keys, expected, monkeypatch):
    monkeypatch.setitem(leased_blocks._KIND_OF, "cpu", "cuda")
    asked = watch(monkeypatch, client)
    cache, tiers = load(client, keys)
    assert len(tiers) == BLOCKS
    assert asked == list(keys)
    assert_holds(cache, expected)


@pytest.mark.parametrize("read_ahead_bytes_min", [None, 0])
def test_a_request_takes_its_hit_from_hbm(client, monkeypatch, read_ahead_bytes_min):
    answer = tiny.replayed(IDS, tiny.rows_of(IDS), TOKENS)
    asked = watch(monkeypatch, client)
    source = StoreBlocks(client, tiny.namespace(), read_ahead_bytes_min=read_ahead_bytes_min)
    generation = CachedSession(tiny.model(), source, snapshots=False).generate(IDS, TOKENS)
    assert generation.token_ids == answer
    assert generation.report.hit_blocks == Counter({Tier.HBM: BLOCKS})
    assert asked == []
    # there was nothing to wait for, so that nothing was read beside the computation
    assert generation.report.read_ahead_s == 0


class OnDevice:
    """Stands for the store's client on a GPU: HBM is on the simulated CUDA device."""

    def __init__(self, monkeypatch, client):
        self.opened = 0
        view, self._copies = client.view_hbm, {}
        monkeypatch.setattr(client, "open_hbm", self._open)
        monkeypatch.setattr(torch, "from_dlpack", lambda section: section)
        monkeypatch.setattr(
            client,
            "view_hbm",
            lambda lease, keys, sections=None: [
                None if block is None else self._moved(block)
                for block in view(lease, keys, sections)
            ],
        )

    def _open(self):
        self.opened += 1
        return "cuda"

    def _moved(self, block):
        sections = tuple(DeviceTensor(torch.from_numpy(s.copy())) for s in block.sections)
        return replace(block, kind="cuda", sections=sections)


@pytest.fixture
def cuda(request):
    with simulate(host_kernels(request.config)) as simulated:
        yield simulated


def test_on_a_device_hbm_does_not_pass_the_host(client, keys, expected, monkeypatch, cuda):
    OnDevice(monkeypatch, client)
    asked = watch(monkeypatch, client)
    cuda.crossings.clear()
    cache, tiers = load(client, keys, CUDA)
    assert tiers == [Tier.HBM] * BLOCKS
    assert asked == []
    assert not cuda.crossings
    assert isinstance(cache.main(2).rows, DeviceTensor)
    assert_holds(cache, expected)


@pytest.mark.parametrize("in_hbm", [True, False])
@pytest.mark.parametrize("read_ahead_bytes_min", [None, 0])
def test_a_request_on_a_device(client, keys, monkeypatch, cuda, in_hbm, read_ahead_bytes_min):
    plain = tiny.model().new_cache()
    for i, sections in enumerate(tiny.rows_of(IDS)):
        plain.load_block(i, BLOCK_TOKENS, sections)
    expected = tiny.model().resume(plain, IDS, BLOCKS * BLOCK_TOKENS)
    on_device = OnDevice(monkeypatch, client)
    hidden = set() if in_hbm else {keys[0], keys[2]}
    hide(monkeypatch, client, hidden)
    asked = watch(monkeypatch, client)
    model = Model.load(tiny.checkpoint(), device=CUDA)
    source = StoreBlocks(client, tiny.namespace(), read_ahead_bytes_min=read_ahead_bytes_min)
    request = CachedSession(model, source, snapshots=False).request(IDS, TOKENS)
    logits = request.prefill()
    report = request.report()
    assert torch.equal(logits.on_host, expected)
    assert_same(cache_bytes(request.cache), cache_bytes(plain))
    assert on_device.opened
    assert set(asked) == hidden
    assert report.hit_tokens == BLOCKS * BLOCK_TOKENS
    assert (report.read_ahead_s > 0) == (not in_hbm and read_ahead_bytes_min is not None)


@pytest.mark.gpu
def test_a_request_on_a_gpu_takes_its_hit_from_hbm(tmp_path, monkeypatch):
    try:
        device = device_of("cuda")
    except InputError as e:
        pytest.skip(str(e))
    model = Model.load(tiny.checkpoint(), device=device)
    with tiny.store(tmp_path, hbm={"device": "cupy", "budget_bytes": "1MiB"}) as client:
        session = CachedSession(model, StoreBlocks(client, tiny.namespace()), snapshots=False)
        session.generate(IDS, 1)
        session.generate(IDS, 1)
        wait_for_promotion(client)
        asked = watch(monkeypatch, client)
        report = session.generate(IDS, TOKENS).report
    assert asked == []
    assert report.hit_blocks == Counter({Tier.HBM: BLOCKS})
