"""What fetching costs: moving estimates, the arithmetic of a lookup, the look at the disk."""

import asyncio

import pytest
from engine_harness import engine_config, engine_test, opened
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import Match, Outcome, Tier, TierCost, fastest
from kvstore.store.costs import CostEstimate
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace


def cost_of(estimate, size):
    cost = estimate.cost()
    return cost.latency_s + size / cost.bytes_per_s


def test_what_nobody_measured_is_assumed():
    estimate = CostEstimate(1e-3, 1e9)
    assert estimate.cost() == TierCost(1e-3, pytest.approx(1e9), measured=False)
    estimate.observe(4096, 1e-3)
    assert estimate.cost().measured


@pytest.mark.parametrize("size", [4096, 1 << 20, 64 << 20])
@pytest.mark.parametrize("factor", [0.01, 50.0, 1e4])
def test_the_first_read_sets_the_scale(size, factor):
    estimate = CostEstimate(1e-3, 1e9)
    seconds = factor * (1e-3 + size / 1e9)
    estimate.observe(size, seconds)
    assert cost_of(estimate, size) == pytest.approx(seconds)


def test_reads_of_two_sizes_tell_latency_from_bandwidth():
    estimate = CostEstimate(300e-6, 1e9)
    for _ in range(60):
        for size in (4096, 8 << 20):
            estimate.observe(size, 5e-3 + size / 2e8)
    cost = estimate.cost()
    assert cost.latency_s == pytest.approx(5e-3, rel=0.1)
    assert cost.bytes_per_s == pytest.approx(2e8, rel=0.1)


@pytest.mark.parametrize("size", [4096, 229_376, 8 << 20])
def test_a_few_reads_tell_of_a_change(size):
    estimate = CostEstimate(300e-6, 1e9)
    for _ in range(50):
        estimate.observe(size, 300e-6 + size / 1e9)
    for _ in range(4):
        estimate.observe(size, 5.0)
    assert cost_of(estimate, size) > 2.5
    for _ in range(30):
        estimate.observe(size, 300e-6 + size / 1e9)
    assert cost_of(estimate, size) < 0.01


def test_a_read_that_took_no_time_breaks_nothing():
    estimate = CostEstimate(300e-6, 1e9)
    for _ in range(2000):
        estimate.observe(4096, 0.0)
    assert cost_of(estimate, 4096) >= 0
    estimate.observe(4096, 1e9)
    assert cost_of(estimate, 4096) > 1e3


residencies = st.lists(st.integers(1, 7).map(Tier), max_size=30)
costs = st.dictionaries(
    st.sampled_from([Tier.HBM, Tier.DRAM, Tier.SSD]),
    st.builds(TierCost, st.floats(0, 1), st.floats(1e3, 1e12)),
)


@given(residencies, costs, st.integers(0, 3))
def test_every_prefix_costs_each_tiers_latency_once_and_its_bytes(residency, costs, misses):
    outcomes = (Outcome.HIT,) * len(residency) + (Outcome.MISS,) * misses
    places = (*residency, *[Tier.NONE] * misses)
    match = Match(len(residency), outcomes, places, 1000, costs)
    seconds = match.fetch_costs_s()
    assert len(seconds) == len(residency) + 1
    for n in range(len(residency) + 1):
        expected = 0.0
        for tier, cost in costs.items():
            held = [t for t in residency[:n] if fastest(t) is tier]
            expected += bool(held) * cost.latency_s + len(held) * 1000 / cost.bytes_per_s
        assert seconds[n] == pytest.approx(expected)
        assert match.fetch_cost_s(n) == seconds[n]
    assert match.fetch_cost_s() == match.fetch_cost_s(99) == seconds[-1]


@engine_test
async def test_the_store_finds_out_by_itself_what_its_disk_costs(tmp_path):
    config = engine_config(tmp_path)
    for _ in range(2):
        async with opened(config) as engine:
            ns = engine.open_namespace(tiny_namespace())
            blocks = chain(ns, TINY_LAYOUT, range(8))
            await engine.put(ns, blocks)
            await engine.flush()
            async with asyncio.timeout(60):
                while not engine.stat().tiers[-1].cost.measured:
                    await asyncio.sleep(0.01)
            match = engine.match(ns, [b.key for b in blocks])
            assert match.costs[Tier.SSD].measured
            assert not match.costs[Tier.DRAM].measured
            assert engine.stat().counters["read_ssd_blocks"] == 0
            engine.check_integrity()
