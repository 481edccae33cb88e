from functools import cache

import numpy as np
import pytest

from kvstore.bench.belady import Belady
from kvstore.bench.cost import PRESETS, CostModel
from kvstore.bench.report import attribution, replay_figures, trace_figures
from kvstore.bench.simulate import simulate
from kvstore.bench.sweep import blocks_of, maker, sweep
from kvstore.bench.trace import Request, build, with_one_offs
from kvstore.block import TierCost
from kvstore.errors import InvalidRequest
from kvstore.eviction import LRU, POLICIES, Outlook, own_end


def trace_of(*chains, step_s=1.0):
    """A trace of chains given as strings; a letter's block is named by all letters up to it."""
    return build(
        "test",
        4,
        [
            Request(i * step_s, [hash(c[: k + 1]) for k in range(len(c))], 4 * len(c) + 2)
            for i, c in enumerate(chains)
        ],
    )


def random_trace(seed, requests=60, letters="abc", longest=5):
    random = np.random.default_rng(seed)
    return trace_of(
        *(
            "".join(random.choice(list(letters), random.integers(0, longest)))
            for _ in range(requests)
        )
    )


def lru_hits(trace, capacity):
    """LRU over chains as a list of blocks, coldest first; no block without its parent."""
    held, hits = [], []
    for r in range(trace.requests):
        chain = trace.chain(r).tolist()
        n = next((i for i, b in enumerate(chain) if b not in held), len(chain))
        hits.append(n)
        kept = chain[:n]
        for block in chain[n:]:
            if len(held) >= capacity:
                leaves = [b for b in held if not any(trace.parent[c] == b for c in held)]
                victims = [b for b in leaves if b not in chain]
                if not victims:
                    break
                held.remove(victims[0])
            held.append(block)
            kept.append(block)
        for block in reversed(kept):
            held.remove(block)
            held.append(block)
    return hits


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_lru_is_lru(seed, capacity):
    trace = random_trace(seed)
    assert simulate(trace, LRU, capacity).hit_store.tolist() == lru_hits(trace, capacity)


def most_hits(trace, capacity):
    """The optimum by trying everything: any prefix-closed set of blocks that a request leaves."""
    children = {}
    for block, parent in enumerate(trace.parent.tolist()):
        children.setdefault(parent, []).append(block)

    def smaller(state):
        found, new = {state}, {state}
        while new:
            leaves = {
                s - {b} for s in new for b in s if not any(c in s for c in children.get(b, []))
            }
            new = leaves - found
            found |= new
        return found

    @cache
    def best(r, state):
        if r == trace.requests:
            return 0
        chain = trace.chain(r).tolist()
        hit = next((i for i, b in enumerate(chain) if b not in state), len(chain))
        after = smaller(frozenset(state | set(chain)))
        return hit + max(best(r + 1, s) for s in after if len(s) <= capacity)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_belady_is_the_optimum(seed, capacity):
    trace = random_trace(seed, requests=9, letters="ab", longest=4)
    replay = simulate(trace, lambda surroundings: Belady(trace), capacity)
    assert replay.hit_store.sum() == most_hits(trace, capacity)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_optimum_or_misses_with_room_for_all(name, seed):
    trace = random_trace(seed, requests=300, letters="abcd", longest=7)
    for capacity in (5, 40):
        best = simulate(trace, lambda surroundings: Belady(trace), capacity)
        replay = simulate(trace, POLICIES[name], capacity, hints=True)
        assert replay.hit_store.sum() <= best.hit_store.sum()
    everything = simulate(trace, POLICIES[name], trace.unique)
    assert everything.hit_rate == pytest.approx(trace.unbounded_hit_rate())
    assert everything.evicted == everything.refused == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_replay_is_repeatable_and_its_policy_sound(name):
    trace = random_trace(5, requests=400, letters="abcde", longest=8)
    made = []

    def make(surroundings):
        made.append(POLICIES[name](surroundings))
        return made[-1]

    first, second = (simulate(trace, make, 30, hints=True) for _ in range(2))
    assert first.hit_store.tolist() == second.hit_store.tolist()
    for policy in made:
        policy.check_integrity()
        assert len(policy) <= 30


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_shares_of_all_tiers_sum_to_one(name):
    trace = random_trace(1, requests=200, letters="abcd", longest=7)
    replay = simulate(trace, POLICIES[name], 60, name=name, dram_capacity=20)
    alone = simulate(trace, POLICIES[name], 60, name=name)
    assert (replay.hit_dram + replay.hit_store).tolist() == alone.hit_store.tolist()
    assert 0 < replay.hit_dram.sum() < alone.hit_store.sum()
    figures = replay_figures(replay, PRESETS["h100"])
    assert sum(figures["hits"].values()) == pytest.approx(1)
    assert figures["hits"].keys() == {"dram", "ssd", "miss"}
    over_time = attribution(replay)
    assert max(np.add(over_time["dram"], over_time["store"])) <= 1
    assert replay.promoted > 20


def test_one_offs_are_a_share_of_the_requests_and_never_hit():
    trace = random_trace(2, requests=700, letters="abcd", longest=6)
    mixed = with_one_offs(trace, 0.3, seed=1)
    assert mixed.requests == 1000
    assert (np.diff(mixed.time_s) >= 0).all()
    replay = simulate(mixed, LRU, mixed.unique)
    assert replay.hit_store.sum() == simulate(trace, LRU, trace.unique).hit_store.sum()
    assert not np.array_equal(with_one_offs(trace, 0.3, seed=2).start, mixed.start)


def test_time_to_first_token_is_what_the_model_says():
    trace = trace_of("abcd", "abcd", "abcd")
    cost = CostModel(
        "test", 100.0, TierCost(0.01, 1e6), TierCost(0.1, 1e3), bytes_per_token=10, replay_tokens=1
    )
    replay = simulate(trace, LRU, 10, dram_capacity=2)
    assert replay.hit_dram.tolist() == [0, 2, 2]
    assert replay.hit_store.tolist() == [0, 2, 2]
    cold = 18 / 100
    hit = 0.01 + 80 / 1e6 + 0.1 + 80 / 1e3 + (2 + 1) / 100
    # the slow tier would cost more than computing, so the hit is not taken
    assert cost.ttft_s(replay).tolist() == pytest.approx([cold, min(cold, hit), min(cold, hit)])
    assert hit > cold
    alone = simulate(trace, LRU, 10)
    fast = 0.01 + 160 / 1e6 + (2 + 1) / 100
    assert cost.ttft_s(alone).tolist() == pytest.approx([cold, fast, fast])
    assert cost.with_rate(1e9).ttft_s(alone)[1] < 1e-7


def test_a_hint_frees_the_room_of_a_session_that_ended():
    sessions = [(1, 0), (2, Outlook.END_OF_SESSION), (3, 0), (1, 0)]
    requests = [
        Request(float(i), [s * 10 + k for k in range(4)], 16, outlook=Outlook(outlook))
        for i, (s, outlook) in enumerate(sessions)
    ]
    trace = build("test", 4, requests)
    assert simulate(trace, LRU, 8).hit_store.tolist() == [0, 0, 0, 0]
    assert simulate(trace, LRU, 8, hints=True).hit_store.tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize(
    ("chains", "ended", "useless"),
    [
        (["abcd"], "abcd", "dcba"),
        (["abcd", "abxy"], "abcd", "dc"),
        (["abcd", "abxy", "abcz"], "abcd", "d"),
        # another chain goes on from its very end
        (["abcd", "abcde"], "abcd", ""),
        ([], "", ""),
    ],
)
def test_the_end_of_a_session_makes_its_own_blocks_useless(chains, ended, useless):
    names = sorted({c[:n] for c in chains for n in range(1, len(c) + 1)})
    children = [sum(len(o) == len(n) + 1 and o.startswith(n) for o in names) for n in names]
    chain = np.array([names.index(ended[:n]) for n in range(1, len(ended) + 1)], np.int64)
    assert "".join(names[row][-1] for row in own_end(chain, children)) == useless


def test_the_end_of_a_session_leaves_what_others_share():
    """Two sessions share their first blocks; of the one that goes on only those still fit."""
    shared = [1, 2]
    requests = [
        Request(0.0, [*shared, 13, 14], 16),
        Request(1.0, [*shared, 23, 24], 16, outlook=Outlook.END_OF_SESSION),
        Request(2.0, [31, 32], 8),
        Request(3.0, [*shared, 13, 14], 16),
    ]
    trace = build("test", 4, requests)
    assert simulate(trace, LRU, 6, hints=True).hit_store.tolist() == [0, 2, 0, 4]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_recency_is_the_same_in_a_log_that_gains_a_place_at_a_time(seed, capacity):
    trace = random_trace(seed, requests=200)
    logged, plain = (simulate(trace, LRU, capacity, log_step=step) for step in (1, 0))
    assert logged.hit_store.tolist() == plain.hit_store.tolist()
    assert (logged.added, logged.evicted) == (plain.added, plain.evicted)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("step", [1, 4, 50])
def test_a_log_keeps_its_books_under_every_policy(name, step):
    trace = random_trace(step, requests=300, letters="abcd", longest=7)
    made = []

    def make(surroundings):
        made.append(POLICIES[name](surroundings))
        return made[-1]

    replay = simulate(trace, make, 30, dram_capacity=10, hints=True, log_step=step)
    best = simulate(trace, lambda surroundings: Belady(trace), 30)
    assert 0 < (replay.hit_store + replay.hit_dram).sum() <= best.hit_store.sum()
    assert replay.added - replay.evicted == len(made[0]) <= 30
    asked = np.diff(trace.start) - replay.hit_store - replay.hit_dram
    assert replay.added + replay.refused == asked.sum()
    for policy in made:
        policy.check_integrity()


def test_sweeping_names_what_is_unknown():
    trace = trace_of("ab")
    with pytest.raises(InvalidRequest, match="no policy 'mru'"):
        maker("mru", trace)
    with pytest.raises(InvalidRequest, match="not above 0"):
        blocks_of(0, trace)
    assert [blocks_of(c, trace) for c in (0.5, 1, 7, 0.01)] == [1, 1, 7, 1]
    seen = []
    replays = list(
        sweep(trace, ["lru", "gittins+hints", "optimum"], [1, 2], 0.5, lambda w, n: seen.append(n))
    )
    assert [(r.policy, r.capacity) for r in replays] == [
        (name, size) for name in ("lru", "gittins+hints", "optimum") for size in (1, 2)
    ]
    assert seen == sorted(seen)
    assert seen[-1] == 6


def test_figures_of_a_trace():
    facts = trace_figures(trace_of("ab", "abc"))
    assert facts["requests"] == 2
    assert facts["block_accesses"] == 5
    assert facts["unique_blocks"] == 3
    assert facts["used_once"] == pytest.approx(1 / 3)
    assert facts["unbounded_hit_rate"] == pytest.approx(2 / 5)
