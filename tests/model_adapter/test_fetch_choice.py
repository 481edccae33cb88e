"""How much of a hit is taken: the arithmetic, and a whole request over a slow disk."""

import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import BLOCK_TOKENS

from kvstore import Client, Tier
from kvstore.client.embedded import EmbeddedTransport, ThreadRunner
from kvstore.client.transport import run_now
from kvstore.config import StoreConfig, build_config
from kvstore.store import Engine
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import OsFileSystem
from model_adapter.session import CachedSession, PrefixOutcome, StoreBlocks
from model_adapter.session.fetch_choice import FetchChoice

READ_S = 3.0
"""What every read of the slow disk takes: far more than computing the prompts here."""


def choice(token_s=None, beyond=()):
    made = FetchChoice()
    if token_s is not None:
        made.computed(1000, 1000 * token_s)
    for seconds in beyond:
        made.fetched(1, 0.0, seconds)
    return made


def test_every_hit_is_taken_until_something_was_computed():
    assert choice().blocks(1000, 3, 256, [0, 9e9, 9e9, 9e9], 128) == 3
    assert choice().exact_pays(500, 1, 1000, [0, 9e9])


def test_without_estimates_every_hit_is_taken():
    assert choice(1e-3).blocks(1000, 3, 256, (), 128) == 3


@pytest.mark.parametrize(
    ("fetch_s", "blocks"),
    [
        ([0, 0.01, 0.02, 0.03], 3),
        # the third block is dearer than computing it
        ([0, 0.01, 0.02, 0.9], 2),
        # latency alone eats the gain of one block, not of three
        ([0, 0.3, 0.3, 0.3], 3),
        ([0, 2.0, 2.0, 2.0], 0),
    ],
)
def test_the_length_that_gives_the_first_token_soonest_is_taken(fetch_s, blocks):
    assert choice(1e-3).blocks(1000, 3, 256, fetch_s, 128) == blocks


def test_what_is_no_longer_than_the_replay_is_worth_nothing():
    assert choice(1e-3).blocks(1000, 1, 128, [0, 0.0], 128) == 0
    seconds = choice(1e-3).seconds(1000, 2, 128, [0, 0.1, 0.1], 128)
    assert np.isinf(seconds[1])
    assert seconds[2] == pytest.approx(0.1 + (1000 - 256 + 128) * 1e-3)


def test_fetching_that_takes_longer_than_estimated_counts_but_no_hiccup_does():
    estimates = [0, 0.01, 0.02, 0.03]
    assert choice(1e-3, [5.0]).blocks(1000, 3, 256, estimates, 128) == 3
    assert choice(1e-3, [0.0, 0.0, 5.0]).blocks(1000, 3, 256, estimates, 128) == 3
    assert choice(1e-3, [5.0] * 3).blocks(1000, 3, 256, estimates, 128) == 0
    assert not choice(1e-3, [5.0] * 3).exact_pays(700, 2, 1000, estimates)


def test_the_rate_is_a_moving_mean():
    made = choice(1e-3)
    for _ in range(30):
        made.computed(100, 1.0)
    assert made.token_s == pytest.approx(1e-2, rel=0.01)
    made.computed(0, 1.0)
    made.computed(10, 0.0)
    assert made.token_s == pytest.approx(1e-2, rel=0.01)


class SlowDisk(OsFileSystem):
    """The machine's files; reads take `read_s` longer."""

    read_s = 0.0

    def preadv(self, *args):
        time.sleep(self.read_s)
        return super().preadv(*args)


@contextmanager
def slow_store(folder):
    """A client of a store in this process, and its disk."""
    disk, runner = SlowDisk(), ThreadRunner()
    settings = {"dir": folder, "ssd": {"lifetime_min_s": 0}, "migration": {"cost_refresh_s": 0.1}}
    config = build_config(StoreConfig, settings, {"dram.budget_bytes": "16MiB"})
    opening = Engine.open(config, open_log=partial(SsdTier.open, files=disk))
    engine = run_now(runner.run(opening, 60.0))
    with Client(EmbeddedTransport(engine, runner, config)) as client:
        yield client, disk
        disk.read_s = 0.0


def ssd_cost(client):
    return next(tier.cost for tier in client.stat().tiers if tier.tier is Tier.SSD)


def grow_slow(client, disk):
    """Let reads take `READ_S`, until the store has noticed by itself."""
    client.flush()
    disk.read_s = READ_S
    deadline = time.monotonic() + 60
    while ssd_cost(client).latency_s < READ_S / 2:
        assert time.monotonic() < deadline, "the store never noticed that its disk is slow"
        time.sleep(0.05)


@pytest.mark.parametrize("snapshots", [False, True])
def test_over_a_slow_disk_a_request_costs_the_lookup_and_no_more(tmp_path, snapshots):
    ids = tiny.prompt(150)
    with slow_store(tmp_path / "store") as (client, disk):
        source = StoreBlocks(client, tiny.namespace())
        session = CachedSession(tiny.model(), source, snapshots=snapshots)
        cold = session.generate(ids, 4)
        assert cold.report.outcome is PrefixOutcome.MISS
        grow_slow(client, disk)
        client.evict(tier=Tier.DRAM)
        read = client.stat().counters["read_ssd_blocks"]
        slow = session.generate(ids, 4)
        assert slow.report.outcome is PrefixOutcome.DECLINED
        assert slow.report.hit_tokens == slow.report.fetched_bytes == 0
        assert slow.report.fetch_s < READ_S, "it waited for the disk"
        assert slow.token_ids == cold.token_ids
        assert client.stat().counters["read_ssd_blocks"] == read
        assert slow.report.stored_blocks == slow.report.present_blocks == 0
        assert slow.report.encoder_positions == cold.report.encoder_positions


def test_only_the_blocks_behind_a_slow_disk_are_declined(tmp_path):
    ids = tiny.prompt(150)
    with slow_store(tmp_path / "store") as (client, disk):
        source = StoreBlocks(client, tiny.namespace())
        session = CachedSession(tiny.model(), source, snapshots=False)
        session.generate(ids, 1)
        grow_slow(client, disk)
        handle = client.open_namespace(tiny.namespace())
        client.evict(handle, handle.block_keys(ids)[3:], Tier.DRAM)
        report = session.generate(ids, 1).report
    assert report.outcome is PrefixOutcome.HIT
    assert report.hit_tokens == 3 * BLOCK_TOKENS
    assert report.hit_blocks == {Tier.DRAM: 3}
    assert report.fetch_s < READ_S
