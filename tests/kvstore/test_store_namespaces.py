"""The core driven by hand: namespaces, and the limits of one call."""

import pytest
from store_harness import HandDrivenStore, store_config
from tiny_blocks import NS, blocks_of, keys_of

from kvstore.errors import InvalidRequest, MessageTooLarge, UnknownNamespace
from kvstore.namespace import Layout, SectionSpec
from kvstore.testing.blocks import tiny_namespace


@pytest.mark.parametrize("what", ["match", "acquire", "reserve"])
def test_an_unknown_namespace_is_an_error(store, what):
    calls = {
        "match": lambda: store.core.match(b"x" * 32, []),
        "acquire": lambda: store.core.acquire(b"x" * 32, [], 0.0, None),
        "reserve": lambda: store.reserve(b"x" * 32, []),
    }
    with pytest.raises(UnknownNamespace, match="787878"):
        calls[what]()


def test_keys_have_32_bytes(store, ns):
    with pytest.raises(InvalidRequest, match="32"):
        store.reserve(ns, [(b"short", ns)])


def test_one_call_has_its_limits():
    store = HandDrivenStore(store_config(**{"limits.keys_per_call_max": 3}))
    ns = store.core.open_namespace(NS)
    with pytest.raises(MessageTooLarge, match="keys_per_call_max"):
        store.core.match(ns, [bytes(32)] * 4)
    with pytest.raises(MessageTooLarge, match="keys_per_call_max"):
        store.reserve(ns, [(bytes([i] * 32), ns) for i in range(4)])


def test_namespaces_do_not_share(store, ns):
    other_namespace = tiny_namespace("other")
    other = store.core.open_namespace(other_namespace)
    blocks = blocks_of(ns, range(3))
    store.put(ns, blocks)
    assert store.core.match(other, keys_of(blocks)).hit_blocks == 0
    assert store.read(other_namespace, other, blocks[0].key) is None
    with pytest.raises(InvalidRequest, match="another namespace"):
        store.reserve(other, [(blocks[0].key, other)])
    assert store.core.evict(other, None, None) == 0


def test_there_is_a_most_of_namespaces():
    store = HandDrivenStore(store_config(**{"limits.namespaces_max": 2}))
    for name in "ab":
        store.core.open_namespace(tiny_namespace(name))
    store.core.open_namespace(tiny_namespace("a"))
    with pytest.raises(InvalidRequest, match="namespaces_max"):
        store.core.open_namespace(tiny_namespace("c"))


def test_a_block_has_to_fit_every_tier():
    layout = Layout((SectionSpec(0, "main", 1, 1 << 18),), 1)
    store = HandDrivenStore(store_config())
    with pytest.raises(InvalidRequest, match="segment_bytes"):
        store.core.open_namespace(tiny_namespace(layout=layout))
