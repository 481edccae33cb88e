"""The contract of eviction policies as tests: subclass `EvictionPolicyContract`."""

import numpy as np
import pytest

from kvstore.eviction import EvictionPolicy


def _any(row: int) -> bool:
    return True


def drain(policy: EvictionPolicy) -> list[int]:
    """All rows in the order in which they go."""
    order = []
    while (row := policy.victim(_any)) is not None:
        policy.remove(row)
        order.append(row)
    return order


class EvictionPolicyContract:
    """Tests that every policy passes; `make` gives an empty one."""

    def make(self) -> EvictionPolicy:
        """An empty policy."""
        raise NotImplementedError

    def filled(self, rows: int) -> EvictionPolicy:
        """A policy with rows 0, 1, … added in this order."""
        policy = self.make()
        for row in range(rows):
            policy.add(row)
        return policy

    def test_an_empty_policy_has_no_victim(self) -> None:
        policy = self.make()
        assert policy.victim(_any) is None
        assert len(policy) == 0
        assert 0 not in policy

    def test_every_row_goes_exactly_once(self) -> None:
        policy = self.filled(100)
        policy.check_integrity()
        assert len(policy) == 100
        assert sorted(drain(policy)) == list(range(100))
        policy.check_integrity()
        assert len(policy) == 0

    def test_a_victim_stays_until_it_is_removed(self) -> None:
        policy = self.filled(5)
        row = policy.victim(_any)
        assert row is not None
        assert policy.victim(_any) == row
        assert row in policy
        policy.remove(row)
        assert row not in policy
        assert policy.victim(_any) not in (row, None)

    def test_rows_may_come_again(self) -> None:
        policy = self.filled(3)
        policy.remove(1)
        policy.add(1)
        policy.check_integrity()
        assert sorted(drain(policy)) == [0, 1, 2]

    def test_a_chain_goes_leaf_first(self) -> None:
        policy = self.filled(8)
        policy.touch([0, 1, 2, 3, 4, 5, 6, 7])
        assert drain(policy) == [7, 6, 5, 4, 3, 2, 1, 0]

    def test_foreseen_rows_may_come_in_pieces(self) -> None:
        policy, chain = self.make(), list(range(12))
        policy.foresee(chain[:8], 0)
        for end in (3, 4, 8):
            for row in chain[:end]:
                if row not in policy:
                    policy.add(row)
            policy.arrived(chain[:end])
            policy.check_integrity()
        policy.continued(chain, 8)
        for row in (8, 9):
            policy.add(row)
        policy.foresee([20, 21], 0)
        policy.arrived(chain[:10])
        policy.add(10)
        policy.arrived(chain[:11])
        policy.check_integrity()
        assert sorted(drain(policy)) == chain[:11]

    def test_rows_added_together_go_as_those_added_one_by_one(self) -> None:
        random, together, singly = np.random.default_rng(1), self.make(), self.make()
        chain: list[int] = []
        for _ in range(50):
            if random.random() < 0.3:
                chain = []
            held, start = len(chain), len(together)
            chain = [*chain, *range(start, start + int(random.integers(1, 9)))]
            how, early = random.integers(3), int(random.integers(len(chain) - held))
            for policy in (together, singly):
                if how:
                    (policy.foresee if how == 1 or not held else policy.continued)(chain, held)
                for row in chain[held : held + early]:
                    policy.add(row)
                if policy is together:
                    policy.add_all(chain[held + early :])
                else:
                    for row in chain[held + early :]:
                        policy.add(row)
                policy.arrived(chain)
                policy.check_integrity()
        assert drain(together) == drain(singly)

    def test_useless_rows_go_first_in_the_order_given(self) -> None:
        policy = self.filled(10)
        policy.cool([7, 2, 99])
        policy.cool([5])
        order = drain(policy)
        assert order.index(7) < order.index(2)
        assert set(order[:3]) == {7, 2, 5}

    def test_refused_rows_are_passed_over_but_not_for_ever(self) -> None:
        policy = self.filled(50)
        for _ in range(3):
            assert policy.victim(lambda row: False) is None
        assert policy.victim(lambda row: row == 33) == 33
        assert len(drain(policy)) == 50

    def test_a_reconsidered_row_keeps_its_turn(self) -> None:
        policy = self.filled(6)
        policy.touch([0, 1, 2, 3, 4, 5])
        assert policy.victim(lambda row: row != 5) == 4
        policy.reconsider(5)
        policy.reconsider(77)
        assert policy.victim(_any) == 5

    def test_rows_that_are_not_in_are_passed_over(self) -> None:
        policy = self.filled(3)
        policy.touch([1, 1000, 2])
        policy.cool([4000])
        policy.reconsider(4000)
        assert sorted(drain(policy)) == [0, 1, 2]

    def test_loading_keeps_the_order_given(self) -> None:
        policy = self.make()
        order = np.random.default_rng(1).permutation(20_000)[:9_000]
        policy.load(order)
        policy.check_integrity()
        assert len(policy) == 9_000
        assert drain(policy) == order.tolist()

    def test_loading_nothing_is_fine(self) -> None:
        policy = self.make()
        policy.load(np.zeros(0, np.int64))
        policy.add(3)
        assert drain(policy) == [3]

    @pytest.mark.parametrize("misuse", ["add", "remove"])
    def test_misuse_is_noticed(self, misuse: str) -> None:
        policy = self.filled(2)
        with pytest.raises(AssertionError):
            policy.add(1) if misuse == "add" else policy.remove(2)
