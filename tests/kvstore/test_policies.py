from dataclasses import replace

import numpy as np
import pytest

from kvstore.bench.belady import Belady
from kvstore.bench.simulate import simulate
from kvstore.bench.trace import Request, build, with_one_offs
from kvstore.eviction import POLICIES, Arc, S3Fifo, Sieve, Surroundings, WTinyLfu
from kvstore.eviction.remembered import UNKNOWN, Record, Remembered
from kvstore.eviction.reuse_times import ReuseTimes
from kvstore.testing.eviction import EvictionPolicyContract, drain


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestEveryPolicy:
    """The contract suite on each policy that the configuration knows."""

    @pytest.mark.parametrize(
        "rule", [n for n in dir(EvictionPolicyContract) if n.startswith("test_")]
    )
    def test_contract(self, name, rule):
        contract = EvictionPolicyContract()
        contract.make = POLICIES[name]
        check = getattr(contract, rule)
        if rule == "test_misuse_is_noticed":
            check("add")
            check("remove")
        else:
            check()


def sessions(count, turns, gap_s, blocks, new_blocks, start_s=0.0):
    """Requests of sessions that grow turn by turn; each has its own time between turns."""
    for s in range(count):
        for turn in range(turns):
            n = blocks + turn * new_blocks
            keys = [s * 10_000 + k for k in range(n)]
            yield Request(start_s + turn * gap_s[s % len(gap_s)], keys, n * 16, session=str(s))


def in_order(requests):
    return build("test", 16, sorted(requests, key=lambda r: r.time_s))


def hits(trace, name, capacity):
    return simulate(trace, POLICIES[name], capacity).hit_rate


def test_gittins_keeps_brisk_sessions_whole_where_lru_keeps_none():
    trace = in_order(sessions(10, 60, [10.0], 20, 1))
    capacity = trace.unique // 3
    assert hits(trace, "lru", capacity) < 0.5
    assert hits(trace, "gittins", capacity) > hits(trace, "lru", capacity) + 0.1


def test_gittins_prefers_sessions_that_come_back_soon():
    brisk = list(sessions(4, 200, [5.0], 20, 0))
    slow = [replace(r, keys=[k + 10**6 for k in r.keys]) for r in sessions(8, 10, [100.0], 20, 0)]
    trace = in_order(brisk + slow)
    best = simulate(trace, lambda s: Belady(trace), 100).hit_rate
    assert hits(trace, "gittins", 100) > best - 0.05


def test_gittins_lets_go_of_a_branch_that_was_left():
    """Every turn replaces what the turn before had added behind the common part (reasoning that
    the next prompt leaves out)."""
    requests = []
    for s in range(6):
        for turn in range(80):
            kept = [s * 10**6 + k for k in range(10 + turn)]
            dropped = [s * 10**6 + 10_000 + turn * 10 + k for k in range(8)]
            at = turn * 10.0 + s
            requests.append(Request(at, kept + dropped, 1))
            requests.append(Request(at + 1, kept + dropped, 1))
    trace = in_order(requests)
    for capacity in (150, 300):
        assert hits(trace, "gittins", capacity) > hits(trace, "lru", capacity)


@pytest.mark.parametrize("seed", range(3))
def test_one_off_prompts_do_not_flush_what_gittins_keeps(seed):
    trace = in_order(sessions(12, 60, [7.0, 11.0, 23.0], 30, 1))
    mixed = with_one_offs(trace, 0.3, seed)
    # room for the sessions and little more
    capacity = 12 * 95
    regular = trace.accesses / mixed.accesses
    alone, scanned = (hits(t, "gittins", capacity) for t in (trace, mixed))
    assert scanned / regular > alone - 0.01
    assert scanned >= hits(mixed, "lru", capacity)


def record_of(start):
    return Record(float(start), start + 0.5, start % 7, 0.5, 1 + start % 8)


def remember(memory, names, number):
    memory.remember(memory.cells(names), names, number)


def recall(memory, names):
    return memory.recall(memory.cells(names), names)


def test_gittins_remembers_within_bounds():
    memory = Remembered(1000)
    names = np.arange(10**6, dtype=np.uint64)
    for start in range(0, 10**6, 1000):
        some = names[start : start + 1000]
        remember(memory, some, memory.note(record_of(start)))
    numbers = recall(memory, names)
    known = np.flatnonzero(numbers != UNKNOWN)
    assert 0 < len(known) <= 1 << 16
    for i in known[::997].tolist():
        assert memory.record(int(numbers[i])) == record_of(i - i % 1000)
    assert (recall(memory, names + np.uint64(10**7)) == UNKNOWN).all()


def test_records_that_were_overwritten_are_unknown():
    memory = Remembered(0)
    names = np.arange(2, dtype=np.uint64)
    remember(memory, names[:1], memory.note(Record(1.0, 1.0, 1, 0.0, 1)))
    for _ in range((1 << 16) - 1):
        last = memory.note(Record(2.0, 2.0, 2, 0.0, 2))
    remember(memory, names[1:], last)
    assert (recall(memory, names) != UNKNOWN).all()
    memory.note(Record(3.0, 3.0, 3, 0.0, 3))
    assert (recall(memory, names) == UNKNOWN).tolist() == [True, False]


def test_the_index_is_high_before_a_use_is_due_and_low_when_it_is_overdue():
    times = ReuseTimes(np.zeros(1, np.int64))
    for _ in range(5000):
        times.request(1)
        times.started(0, 1)
        times.returned(0, 10.0, 1)
    early, due, late = (times.worth(0, age) for age in (1.0, 8.1, 200.0))
    assert due > early > 10 * late
    assert early == pytest.approx(1 / 9, rel=0.3)
    ages = np.array([1.0, 8.1, 200.0])
    assert times.worths(np.zeros(3, np.int64), ages).tolist() == [early, due, late]


def test_s3_fifo_lets_scans_pass_and_remembers_them():
    policy = S3Fifo(Surroundings(capacity_rows=lambda: 20))
    for row in range(10):
        policy.add(row)
        policy.touch([row])
    for _ in range(3):
        policy.touch(range(5))
    for row in range(100, 160):
        while len(policy) >= 20:
            policy.remove(policy.victim(lambda r: True))
        policy.add(row)
        policy.touch([row])
    assert all(row in policy for row in range(5))


def test_sieve_gives_used_rows_one_more_round():
    policy = Sieve()
    for row in range(4):
        policy.add(row)
        policy.touch([row])
    policy.touch([0])
    assert drain(policy) == [1, 2, 3, 0]


def test_arc_adapts_to_what_comes_back():
    policy = Arc(Surroundings(capacity_rows=lambda: 4))

    def use(row):
        if row not in policy:
            while len(policy) >= 4:
                policy.remove(policy.victim(lambda r: True))
            policy.add(row)
        policy.touch([row])

    for row in (0, 1, 0, 1, 2, 3, 4, 5, 6):
        use(row)
    assert 0 in policy
    assert 1 in policy
    use(4)
    assert 4 in policy
    policy.check_integrity()


def test_w_tinylfu_refuses_what_is_asked_for_less_often():
    policy = WTinyLfu(Surroundings(capacity_rows=lambda: 10))
    for row in range(10):
        policy.add(row)
        policy.touch([row])
    for _ in range(5):
        policy.touch(list(range(10)))
    policy.foresee([50, 51, 52], 0)
    victim = policy.victim(lambda r: True)
    policy.remove(victim)
    policy.add(50)
    assert not policy.admits(51, policy.victim(lambda r: r != 50))
