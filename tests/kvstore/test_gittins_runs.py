"""Gittins' books: runs under random use, and the way that takes rows in and out many at a time."""

from itertools import count

import numpy as np
import pytest

from kvstore.bench.simulate import simulate
from kvstore.bench.trace import Request, build
from kvstore.eviction import EvictionPolicy, Gittins, Outlook, Surroundings
from kvstore.eviction.block_classes import is_new
from kvstore.eviction.remembered import Record
from kvstore.eviction.runs import NONE, Runs, row_array
from kvstore.testing.clock import ManualClock


def tree_chains(random, blocks=400, branching=0.15):
    """Chains of a random tree: per block the path from its root."""
    paths = []
    for block in range(blocks):
        if not paths or random.random() < 0.03:
            paths.append([block])
        else:
            at = len(paths) - 1 if random.random() > branching else random.integers(len(paths))
            paths.append([*paths[at], block])
    return paths


class Model:
    """A tier's side of the contract, on a policy that is checked after every step."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.paths = tree_chains(self.random)
        self.now = 0.0
        self.held: set[int] = set()
        self.pinned: set[int] = set()
        self.policy = Gittins(
            Surroundings(now_s=lambda: self.now, capacity_rows=lambda: 60),
        )

    def may_go(self, row):
        return row in self.held and row not in self.pinned and not self.children(row)

    def children(self, row):
        return any(len(p) > 1 and p[-2] == row and p[-1] in self.held for p in self.paths)

    def leave(self, rows):
        for i, row in enumerate(rows):
            if not self.may_go(row):
                return i
            self.held.discard(row)
            above = self.paths[row][-2:-1]
            if above and not self.children(above[0]):
                self.policy.reconsider(above[0])
        return len(rows)

    def request(self, one_by_one):
        path = self.paths[self.random.integers(len(self.paths))]
        there = [row for row in path if row in self.held]
        new = [row for row in path if row not in self.held]
        self.pinned = set(path)
        self.policy.foresee(np.array(there + new, np.int64), len(there))
        # a block was lost out of the middle: then they come back one by one
        gap = path != there + new
        how = EvictionPolicy.exchange if one_by_one or gap else Gittins.exchange
        added = 0
        if new:
            rows, free = np.array(new, np.int64), 60 - len(self.held)
            added = how(self.policy, rows, free, self.may_go, self.leave)
        self.held.update(new[:added])
        self.policy.touch([row for row in path if row in self.held])
        self.pinned = set()
        return np.array(path, np.int64)

    def check(self):
        self.policy.check_integrity()
        assert len(self.policy) == len(self.held) <= 60
        assert all(row in self.policy for row in self.held)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_the_books(seed):
    model = Model(seed)
    for _ in range(150):
        model.now += float(model.random.exponential(5.0))
        kind = model.random.random()
        chain = model.request(one_by_one=bool(model.random.random() < 0.3))
        if kind < 0.2:
            model.policy.answered(chain, Outlook(int(model.random.integers(4))))
        elif kind < 0.3 and model.held:
            row = int(model.random.choice(sorted(model.held)))
            model.policy.remove(row)
            model.held.discard(row)
        elif kind < 0.4:
            model.policy.arrived(chain)
        elif kind < 0.5:
            model.policy.cool(chain[::-1])
        elif kind < 0.6:
            there = sum(row in model.held for row in chain.tolist())
            model.policy.continued(chain, min(there, len(chain) - 1))
        model.check()
    order = []
    while (row := model.policy.victim(lambda row: True)) is not None:
        model.policy.remove(row)
        order.append(row)
    assert sorted(order) == sorted(model.held)


@pytest.mark.parametrize("seed", range(4))
def test_chains_take_apart_what_a_start_took_for_one(seed):
    """Rows of all chains are loaded in one order, coldest first, and every use says how they are
    really linked."""
    random = np.random.default_rng(seed)
    paths, now = tree_chains(random, blocks=150, branching=0.4), [0.0]
    policy = Gittins(Surroundings(now_s=lambda: now[0], capacity_rows=lambda: 200))
    order = random.permutation(150)
    policy.load(order.astype(np.int64))
    for _ in range(60):
        now[0] += float(random.choice([0.0, 3.0]))
        path = paths[random.integers(len(paths))]
        policy.foresee(np.array(path, np.int64), len(path))
        policy.touch(path)
        policy.check_integrity()
    assert sorted(row for run in policy._runs.rows for row in run) == list(range(150))


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_at_a_time_are_as_good_as_one_by_one(seed):
    class OneByOne(Gittins):
        exchange = EvictionPolicy.exchange

    random = np.random.default_rng(seed)
    paths = tree_chains(random, 200)
    times = np.cumsum(random.exponential(3.0, 250))
    trace = build("t", 4, [Request(float(t), paths[random.integers(200)], 4) for t in times])
    many, few = (simulate(trace, make, 20 + 30 * seed) for make in (Gittins, OneByOne))
    # the ends of chains are valued anew at other moments
    assert many.hit_rate == pytest.approx(few.hit_rate, abs=0.02)
    assert many.added == pytest.approx(few.added, rel=0.1)
    assert many.evicted
    assert many.hit_rate > 0.2


def test_runs_split_where_chains_part_and_join_again():
    policy = Gittins(Surroundings(now_s=lambda: 0.0))
    for row in range(6):
        policy.add(row)
    policy.touch([0, 1, 2, 3, 4, 5])
    runs = policy._runs
    assert len({runs.run_of[row] for row in range(6)}) == 1
    policy.touch([0, 1, 2])
    assert len({runs.run_of[row] for row in range(6)}) == 2
    top, tail = runs.run_of[0], runs.run_of[5]
    assert (runs.after[top], runs.above[tail]) == (tail, 2)
    assert (runs.rows[top].tolist(), runs.rows[tail].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert (runs.depth[top], runs.depth[tail]) == (0, 3)
    policy.check_integrity()


def test_foreseen_rows_may_arrive_in_several_pieces():
    policy = Gittins(Surroundings(now_s=lambda: 0.0))
    policy.foresee([0], 0)
    policy.add(0)
    policy.arrived([0])
    policy.continued([0, 1, 2, 3, 4], 1)
    for new in ([1], [2, 3], [4]):
        for row in new:
            policy.add(row)
        policy.arrived(list(range(new[-1] + 1)))
        policy.check_integrity()
    assert [policy._runs.run_of[row] for row in range(5)].count(NONE) == 0
    for row in (4, 3, 2, 1, 0):
        policy.remove(row)
        policy.check_integrity()


@pytest.mark.parametrize("between", ["arrived", "touch"])
def test_foreseen_rows_may_come_in_pieces(between):
    policy = Gittins(Surroundings(now_s=lambda: 0.0))
    policy.foresee(range(6), 0)
    for n in range(6):
        if n == 3:
            policy.continued(range(6), 3)
        policy.add(n)
        getattr(policy, between)(list(range(n + 1)))
        policy.check_integrity()
    assert [policy._runs.run_of[row] >= 0 for row in range(6)] == [True] * 6
    order = []
    while (row := policy.victim(lambda row: True)) is not None:
        policy.remove(row)
        order.append(row)
    assert order == [5, 4, 3, 2, 1, 0]


def test_a_run_that_ends_tells_what_it_continued():
    runs = Runs()
    runs.reserve_rows(10)
    run = runs.make(row_array([1, 2, 3]), Record(0.0, 0.0, 0, 0.0, 1))
    top = runs.split(run, 1)
    assert runs.ending_at(1) == top
    del runs.rows[run][:]
    runs.run_of[2] = runs.run_of[3] = NONE
    assert runs.drop(run) == top
    assert runs.after[top] == NONE
    runs.check_integrity()


def test_the_wait_for_the_next_request_is_timed_from_the_end_of_the_answer():
    """Answers take any time, tools always the same after them: of two chains that were used at the
    same time, the one whose answer ended first is overdue when the other is about to come."""
    random = np.random.default_rng(0)
    now = [0.0]
    policy = Gittins(Surroundings(now_s=lambda: now[0]))

    def request(row):
        policy.foresee([row], int(row in policy))
        if row not in policy:
            policy.add(row)
        policy.touch([row])

    for _ in range(400):
        request(0)
        now[0] += float(random.exponential(20.0))
        policy.answered([0], Outlook.TOOL_CALL)
        now[0] += 20.0
    for row in (1, 2):
        request(row)
    now[0] += 20.0
    for row in (1, 2):
        request(row)
    # in the other order than they were used
    for row in (2, 1):
        policy.answered([row], Outlook.TOOL_CALL)
        now[0] += 15.0
    request(0)
    now[0] += 1.0
    assert policy.victim(lambda row: row != 0) == 2


def told_at_once(policy, rows, held, pieces):
    """As the simulator tells a request."""
    policy.foresee(rows, held)
    for row in rows[held:]:
        policy.add(row)
    policy.touch(rows)


def told_in_pieces(policy, rows, held, pieces):
    """As a store tells it: what was found is used, and the rest comes as it is written."""
    policy.foresee(rows[:held], held)
    policy.touch(rows[:held])
    for n in pieces:
        policy.continued(rows[: held + n], held)
        for row in rows[held : held + n]:
            policy.add(row)
        policy.arrived(rows[: held + n])
        held += n


@pytest.mark.parametrize("pieces", [[1], [2], [1, 1], [9], [4, 1, 4]])
@pytest.mark.parametrize("outlook", [None, Outlook.TOOL_CALL])
def test_a_request_grew_however_it_was_told(pieces, outlook):
    kinds, started = [], []
    for tell in (told_at_once, told_in_pieces):
        clock = ManualClock()
        policy = Gittins(Surroundings(now_s=clock.monotonic_s))
        rows = list(range(6))
        tell(policy, rows, 0, [6])
        for _ in range(2):
            clock.advance(7.0)
            if outlook is not None:
                policy.answered(rows, outlook)
            held = len(rows)
            rows = [*rows, *range(held, held + sum(pieces))]
            tell(policy, rows, held, pieces)
        policy.check_integrity()
        runs = policy._runs
        kinds.append([runs.kind[runs.run_of[row]] for row in rows])
        started.append(np.round(policy._times._started, 6).nonzero()[0].tolist())
    assert kinds[0] == kinds[1]
    assert started[0] == started[1]
    assert [is_new(kind) for kind in kinds[0]] == [row >= held for row in rows]


def test_what_a_request_brought_tells_whether_it_comes_back():
    """Sessions whose second request adds a block come back, those that bring a text do not."""
    clock, number = ManualClock(), count()
    policy = Gittins(Surroundings(now_s=clock.monotonic_s))

    def rows_of(n):
        return [next(number) for _ in range(n)]

    def request(held, n):
        rows = [*held, *rows_of(n)]
        told_at_once(policy, rows, len(held), [])
        return rows

    def two_sessions():
        # the deeper would go first at equal worth
        asks, reads = request([], 30), request([], 10)
        clock.advance(20.0)
        return request(asks, 1), request(reads, 9)

    for _ in range(100):
        asks, reads = two_sessions()
        for _ in range(3):
            clock.advance(20.0)
            asks = request(asks, 1)
        for row in [*asks[::-1], *reads[::-1]]:
            policy.remove(row)
    asks, reads = two_sessions()
    clock.advance(5.0)
    going = policy.victim(lambda row: True)
    assert going in reads
