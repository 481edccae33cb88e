import pytest

from kvstore.eviction import POLICIES
from kvstore.testing.eviction import EvictionPolicyContract


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
