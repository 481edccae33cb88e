"""What `import kvstore` promises."""

import pytest

import kvstore
from kvstore import block, client, namespace, prefix_hash

PROMISED = [
    *("connect", "connect_async", "Namespace", "Layout", "SectionSpec", "DS41F_LAYOUT"),
    *("BlockPut", "BlockData", "Match", "Outcome", "PutOutcome", "Durability", "Tier"),
    *("ImageSpan", "block_keys", "snapshot_key", "errors"),
]


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    assert name in kvstore.__all__
    assert name in dir(kvstore)
    assert getattr(kvstore, name) is not None


def test_names_are_those_of_their_homes() -> None:
    assert kvstore.BlockPut is block.BlockPut
    assert kvstore.connect is client.connect
    assert kvstore.DS41F_LAYOUT is namespace.DS41F_LAYOUT
    assert kvstore.block_keys is prefix_hash.block_keys


def test_every_export_resolves() -> None:
    for name in kvstore.__all__:
        getattr(kvstore, name)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = kvstore.conect
