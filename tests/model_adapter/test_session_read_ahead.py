"""Sections come in the order in which the model needs them, while it computes already."""

import threading

import numpy as np
import pytest
import tiny_checkpoint as tiny
from cache_bytes import assert_same, cache_bytes
from drafting import drafter
from tiny_checkpoint import BLOCK_TOKENS, WINDOW

from kvstore import BlockData, Outcome
from kvstore.errors import Unavailable
from model_adapter.decoding import SamplingParams, generate
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import CacheError, SectionsLost
from model_adapter.session import CachedSession, PrefixOutcome, SnapshotOutcome, StoreBlocks

IDS = tiny.prompt(150)
TOKENS = 6
WAIT_S = 30


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


def ahead(client, **options) -> StoreBlocks:
    return StoreBlocks(client, tiny.namespace(), read_ahead_bytes_min=0, **options)


def loaded(source, blocks=4):
    """A cache with blocks in it or on their way to it."""
    cache = tiny.model().new_cache()
    cache.reserve(len(IDS))
    return cache, source.load(source.find(IDS), blocks, cache)


@pytest.mark.parametrize("batch_bytes_max", [1, 8 << 20])
def test_what_comes_so_is_what_comes_otherwise(client, batch_bytes_max):
    tiny.session(client).generate(IDS, 1)
    one, first = loaded(ahead(client, batch_bytes_max=batch_bytes_max))
    other, second = loaded(StoreBlocks(client, tiny.namespace()))
    assert first.reading.join().complete
    assert second.reading is None
    assert (first.blocks, first.payload_bytes, first.tiers) == (
        *(second.blocks, second.payload_bytes),
        second.tiers,
    )
    assert_same(cache_bytes(one), cache_bytes(other))
    assert first.reading._promises == (), "keeps the cache's memory"
    logits = [tiny.model().resume(cache, IDS, 4 * BLOCK_TOKENS) for cache in (one, other)]
    assert np.array_equal(*logits)
    assert_same(cache_bytes(one), cache_bytes(other))


def test_a_layer_runs_before_the_sections_of_later_ones_have_come(client, monkeypatch):
    tiny.session(client).generate(IDS, 1)
    sources = list(tiny.model().config.kv_sources)
    ran = {layer: threading.Event() for layer in sources}
    order = []
    read = client.read

    def read_late(lease, keys, sections, into):
        (number,) = sections
        layer = sources[number // 2]
        for before in sources[: sources.index(layer)]:
            assert ran[before].wait(WAIT_S), f"layer {before} waits for layer {layer}'s sections"
        order.append(number)
        return read(lease, keys, sections, into)

    monkeypatch.setattr(client, "read", read_late)
    cache, result = loaded(ahead(client))

    def observer(stage, layer, tensor):
        if stage == "selection" and layer in ran:
            ran[layer].set()

    logits = tiny.model().resume(cache, IDS, 4 * BLOCK_TOKENS, observer=observer)
    assert order == list(range(6))
    assert result.reading.join().complete
    monkeypatch.undo()
    plain, _ = loaded(StoreBlocks(client, tiny.namespace()))
    assert np.array_equal(logits, tiny.model().resume(plain, IDS, 4 * BLOCK_TOKENS))


def test_a_snapshot_goes_on_while_its_blocks_come(client, monkeypatch):
    tiny.session(client).generate(IDS[:101], 1)
    cache = tiny.model().new_cache()
    tiny.model().prefill(cache, IDS[:101])
    expected = tiny.model().prefill(cache, IDS[101:])
    gate = threading.Event()
    read = client.read

    def read_late(*args):
        assert gate.wait(WAIT_S)
        return read(*args)

    monkeypatch.setattr(client, "read", read_late)
    session = CachedSession(tiny.model(), ahead(client))
    request = session.request(IDS, TOKENS)
    prefill = tiny.model().prefill

    def prefill_opens(*args, **options):
        gate.set()
        return prefill(*args, **options)

    monkeypatch.setattr(tiny.model(), "prefill", prefill_opens)
    logits = request.prefill()
    report = request.report()
    monkeypatch.undo()
    assert np.array_equal(logits, expected)
    assert_same(cache_bytes(request.cache), cache_bytes(cache))
    assert (report.snapshot, report.hit_tokens) == (SnapshotOutcome.HIT, 101)
    assert report.read_ahead_s > 0


def missing(client, monkeypatch, section: int, block: int) -> list[int]:
    """One section of one block is not there any more, for as long as reads are by section."""
    read = client.read
    asked = []

    def read_some(lease, keys, sections=None, into=None):
        found = read(lease, keys, sections, into)
        asked.append(sections)
        if sections == [section]:
            found[block] = BlockData(found[block].key, Outcome.MISS)
        if sections is None:
            found[block:] = [BlockData(f.key, Outcome.MISS) for f in found[block:]]
        return found

    monkeypatch.setattr(client, "read", read_some)
    return asked


@pytest.mark.parametrize(("section", "block"), [(0, 2), (3, 3), (5, 0)])
def test_a_section_that_is_missing_starts_the_request_over(client, monkeypatch, section, block):
    tiny.session(client).generate(IDS, 1)
    rows = tiny.rows_of(IDS)[:block]
    expected = tiny.replayed(IDS, rows, TOKENS) if block else tiny.plain(IDS, TOKENS)
    asked = missing(client, monkeypatch, section, block)
    drafts = SequenceDrafts(drafter(tiny.model()), verify_threshold=0)

    def decode(model, cache, logits, max_tokens, stop_ids):
        yield from generate(model, cache, logits, SamplingParams(max_tokens), stop_ids, drafts)

    session = CachedSession(tiny.model(), ahead(client))
    answer = session.generate(IDS, TOKENS, decode=decode, drafts=drafts)
    assert asked == [*([n] for n in range(section + 1)), None]
    assert answer.token_ids == expected
    assert answer.report.hit_tokens == block * BLOCK_TOKENS
    assert answer.report.replayed_tokens == (WINDOW if block else 0)
    assert answer.report.store_error is None
    monkeypatch.undo()
    # the next request reads ahead again
    assert session.generate(IDS, 1).report.read_ahead_s > 0


@pytest.mark.parametrize("nth", [1, 6])
def test_a_store_that_is_lost_meanwhile_costs_the_hit(client, monkeypatch, nth):
    tiny.session(client).generate(IDS, 1)
    expected = tiny.plain(IDS, TOKENS)
    read, calls = client.read, []

    def read_lost(*args):
        calls.append(args)
        if len(calls) >= nth:
            raise Unavailable("gone")
        return read(*args)

    monkeypatch.setattr(client, "read", read_lost)
    for name in ("put", "match", "put_snapshot"):
        inner = getattr(client, name)

        def watched(*args, _name=name, _inner=inner, **options):
            assert len(calls) < nth, f"{_name} was called on a store that is lost"
            return _inner(*args, **options)

        monkeypatch.setattr(client, name, watched)
    answer = CachedSession(tiny.model(), ahead(client)).generate(IDS, TOKENS)
    assert len(calls) == nth
    assert answer.token_ids == expected
    assert answer.report.outcome is PrefixOutcome.LOST
    assert answer.report.hit_tokens == 0
    assert "gone" in answer.report.store_error


def test_short_hits_and_what_lies_on_ssd_alone_are_read_before(tmp_path):
    with tiny.store(tmp_path) as client:
        tiny.session(client).generate(IDS, 1)
        size = 4 * tiny.namespace().layout.block_bytes
        for least, is_ahead in ((size + 1, False), (size, True), (None, False)):
            source = StoreBlocks(client, tiny.namespace(), read_ahead_bytes_min=least)
            assert (loaded(source)[1].reading is not None) == is_ahead
    with tiny.store(tmp_path) as client:
        cache, result = loaded(ahead(client, read_ahead_ssd_bytes_max=size - 1))
        assert (result.blocks, result.reading) == (4, None)
        assert cache.loaded_tokens == 4 * BLOCK_TOKENS
    with tiny.store(tmp_path) as client:
        result = loaded(ahead(client, read_ahead_ssd_bytes_max=size))[1]
        assert result.reading.join().complete


def test_the_lease_is_renewed_on_long_reads(client, monkeypatch):
    tiny.session(client).generate(IDS, 1)
    acquire, renewed = client.acquire, []

    def acquire_short(*args):
        lease = acquire(*args)
        monkeypatch.setattr(type(lease), "ttl_s", 0.0)
        monkeypatch.setattr(lease, "renew", lambda: renewed.append(1))
        return lease

    monkeypatch.setattr(client, "acquire", acquire_short)
    assert loaded(ahead(client, batch_bytes_max=1))[1].reading.join().complete
    assert len(renewed) == 6 * 4


def test_a_cache_waits_for_what_is_asked_for_and_nothing_else():
    cache = tiny.model().new_cache()
    cache.reserve(3 * BLOCK_TOKENS)
    promises = cache.promise_blocks(2, BLOCK_TOKENS)
    assert cache.loaded_tokens == 2 * BLOCK_TOKENS
    specs = tiny.model().config.global_caches
    for spec, promise in zip(specs, promises, strict=True):
        assert promise.rows.shape == (2 * BLOCK_TOKENS // spec.ratio, spec.row_bytes)
    promises[0].rows[:] = 7
    promises[0].done.set_result(None)
    assert (cache.main(specs[0].layer).rows == 7).all()
    promises[1].done.set_exception(SectionsLost("gone"))
    with pytest.raises(SectionsLost, match="gone"):
        cache.index(specs[1].layer)
    with pytest.raises(CacheError, match="to an empty cache only"):
        cache.promise_blocks(1, BLOCK_TOKENS)
    # memory that is being filled can't move
    late = threading.Timer(0.2, lambda: [p.done.set_result(None) for p in promises[2:]])
    late.start()
    with pytest.raises(SectionsLost):
        cache.reserve(10 * BLOCK_TOKENS)
    cache.rows(specs[2])
    assert cache.waited_s > 0.05
