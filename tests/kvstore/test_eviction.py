import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import EvictionConfig
from kvstore.eviction import LRU, POLICIES
from kvstore.testing.eviction import EvictionPolicyContract, drain


class TestLRU(EvictionPolicyContract):
    def make(self):
        return LRU()

    def test_the_least_recently_used_goes_first(self):
        policy = self.filled(5)
        policy.touch([0])
        policy.touch([3])
        assert drain(policy) == [1, 2, 4, 0, 3]

    def test_touching_after_the_cold_end_was_looked_at_counts(self):
        policy = self.filled(5)
        assert policy.victim(lambda row: True) == 0
        policy.touch([0])
        assert policy.victim(lambda row: True) == 1


def test_every_policy_is_configurable():
    for name in POLICIES:
        assert EvictionConfig(policy=name).policy == name


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "cool", "victim", "refuse"]),
        st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
    ),
    max_size=80,
)


class Model:
    """LRU as a list, coldest first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def add(self, row: int) -> None:
        self.order.append(row)

    def touch(self, rows: list[int]) -> None:
        present = [row for row in rows if row in self.order]
        self.order = [row for row in self.order if row not in present] + present[::-1]

    def cool(self, rows: list[int]) -> None:
        present = [row for row in rows if row in self.order]
        self.order = present + [row for row in self.order if row not in present]


def play(steps, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.eviction.lru._BATCH_ROWS", batch)
    policy, model = LRU(), Model()
    refused: set[int] = set()
    for what, rows in steps:
        row = rows[0]
        if what == "add" and row not in policy:
            policy.add(row)
            model.add(row)
        elif what == "touch":
            policy.touch(rows)
            model.touch(rows)
            refused -= set(rows)
        elif what == "remove" and row in policy:
            policy.remove(row)
            model.order.remove(row)
        elif what == "cool":
            policy.cool(rows)
            model.cool(rows)
        elif what == "refuse":
            policy.victim(lambda row, bad=frozenset(rows): row not in bad)
            for row in rows:
                policy.reconsider(row)
        elif what == "victim":
            expected = model.order[0] if model.order else None
            assert policy.victim(lambda row: True) == expected
        policy.check_integrity()
        assert len(policy) == len(model.order)
    assert drain(policy) == model.order


@given(steps=steps)
def test_lru_is_a_list(steps):
    with pytest.MonkeyPatch.context() as monkeypatch:
        play(steps, 4096, monkeypatch)


@given(steps=steps, batch=st.integers(1, 5))
def test_lru_is_a_list_however_little_of_the_cold_end_it_takes(steps, batch):
    with pytest.MonkeyPatch.context() as monkeypatch:
        play(steps, batch, monkeypatch)
