"""What `import kvstore` promises."""

import ast
import inspect
import re

import pytest

import kvstore
from kvstore import block, client, errors, namespace, prefix_hash

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


def test_a_type_checker_sees_every_export() -> None:
    (seen,) = [n for n in ast.parse(inspect.getsource(kvstore)).body if isinstance(n, ast.If)]
    names = [
        alias.name for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(names) == sorted(kvstore.__all__)


def test_the_tree_of_errors_has_every_error_below_its_parent() -> None:
    tree, above = {}, {}
    for bars, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(bars) // 4
        above[depth] = name
        tree[name] = above.get(depth - 1)
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    bases = {name: cls.__base__.__name__ for name, cls in classes.items()}
    assert tree == bases | {"KVStoreError": None}
