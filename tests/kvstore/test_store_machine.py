"""The core against a model that is nothing but dictionaries, with crashes among the rules.

`StoreMachine` never runs out of anything, so the model knows every outcome exactly. `TightStore`
has room for a few dozen blocks, so blocks leave as its policy likes, each policy in turn; the model
then holds the store to what it promises: pinned blocks stay, no block stays without its parent,
bytes are right, and what was made durable is lost to eviction only.
"""

from hypothesis import settings
from store_machine import EXAMPLES, StoreMachine, TightStore

from kvstore.eviction import POLICIES

TestRoomyStore = StoreMachine.TestCase
TestRoomyStore.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)


def tight_under(policy: str) -> type:
    """The test of a store without room, under one policy."""
    machine = type(f"TightStoreUnder{policy}", (TightStore,), {"policy": policy})
    test = machine.TestCase
    test.settings = settings(max_examples=EXAMPLES // 3, stateful_step_count=60)
    return test


TestTightStoreUnderArc = tight_under("arc")
TestTightStoreUnderGittins = tight_under("gittins")
TestTightStoreUnderLRU = tight_under("lru")
TestTightStoreUnderS3Fifo = tight_under("s3_fifo")
TestTightStoreUnderSieve = tight_under("sieve")
TestTightStoreUnderWTinyLfu = tight_under("w_tinylfu")


def test_the_machine_runs_under_every_policy():
    tests = [test for name, test in globals().items() if name.startswith("TestTightStoreUnder")]
    assert len(tests) == len(POLICIES)
