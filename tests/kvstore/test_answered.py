"""What a client tells at the end of an answer, and who goes first then."""

import pytest
from store_harness import HandDrivenStore, store_config

from kvstore.block import Outlook, Tier
from kvstore.eviction import POLICIES
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace

NS = tiny_namespace()
SHARED = [1, 2]


@pytest.fixture(params=sorted(POLICIES))
def store(request):
    return HandDrivenStore(store_config(**{"eviction.policy": request.param}))


def put(store, ns, tokens):
    blocks = chain(ns, TINY_LAYOUT, tokens)
    keys = [block.key for block in blocks]
    store.put(ns, blocks)
    store.flush()
    store.core.release(store.core.acquire(ns, keys, store.now, None)[0])
    store.clock.advance(1.0)
    return keys


def order(store, tier):
    """Keys in the order in which they would leave the store."""
    r, gone = store.core.residency, []
    policy = r.policies.of[tier]
    while (row := policy.victim(r.may_leave_store)) is not None:
        gone.append(store.core.index.keys[row])
        r.drop(row)
    store.core.check_integrity()
    return gone


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_what_an_ended_session_has_for_itself_goes_first(store, tier):
    ns = store.core.open_namespace(NS)
    others = put(store, ns, [*SHARED, 50, 51, 52])
    ended = put(store, ns, [*SHARED, 60, 61, 62])
    store.core.answered(ns, ended, None, Outlook.END_OF_SESSION)
    store.core.check_integrity()
    gone = order(store, tier)
    assert gone[:3] == ended[:1:-1]
    assert set(gone[3:6]) == set(others[2:])
    assert gone[6:] == others[1::-1]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_blocks_that_no_next_turn_can_have_go_first(store, tier):
    ns = store.core.open_namespace(NS)
    other = put(store, ns, [50, 51, 52])
    turn = put(store, ns, [60, 61, 62, 63, 64])
    store.core.answered(ns, turn, 3, Outlook.USER_TURN)
    gone = order(store, tier)
    assert gone[:2] == [turn[4], turn[3]]
    assert set(gone[2:]) == {*other, *turn[:3]}


def test_a_use_takes_the_word_back(store):
    ns = store.core.open_namespace(NS)
    ended = put(store, ns, [60, 61, 62])
    put(store, ns, [50, 51, 52])
    store.core.answered(ns, ended, None, Outlook.END_OF_SESSION)
    store.core.release(store.core.acquire(ns, ended, store.now, None)[0])
    lasting = put(store, ns, [70, 71])
    store.core.answered(ns, lasting, None, Outlook.END_OF_SESSION)
    assert order(store, Tier.SSD)[:2] == lasting[::-1]


def test_other_outlooks_move_nothing_but_what_is_expected(store):
    ns = store.core.open_namespace(NS)
    keys = put(store, ns, [1, 2, 3])
    for outlook in (Outlook.TOOL_CALL, Outlook.USER_TURN, Outlook.UNKNOWN):
        store.core.answered(ns, keys, None, outlook)
        store.core.check_integrity()
    store.core.answered(ns, [b"x" * 32], None, Outlook.END_OF_SESSION)
    assert order(store, Tier.SSD) == keys[::-1]
