import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.prefix_hash import ImageSpan, block_keys, snapshot_key
from kvstore.testing.strategies import image_spans, token_ids

NS = bytes(range(32))
PICTURE = ImageSpan(3, 6, b"p" * 32)


@given(token_ids, st.integers(1, 9))
def test_every_kind_of_buffer_names_the_same(ids, block_tokens):
    keys = block_keys(NS, ids, block_tokens)
    assert len(keys) == len(ids) // block_tokens
    as_array = np.array(ids, np.uint32)
    assert block_keys(NS, as_array, block_tokens) == keys
    assert block_keys(NS, as_array.astype(np.int64), block_tokens) == keys
    assert block_keys(NS, as_array.astype(">u4"), block_tokens) == keys
    assert block_keys(NS, as_array.tobytes(), block_tokens) == keys
    assert block_keys(NS, array.array("I", ids), block_tokens) == keys
    assert block_keys(NS, np.repeat(as_array, 2)[::2], block_tokens) == keys


@given(token_ids, st.integers(1, 9), st.data())
def test_a_change_changes_every_key_from_there_on_and_none_before(ids, block_tokens, data):
    keys = block_keys(NS, ids, block_tokens)
    if not keys:
        return
    at = data.draw(st.integers(0, len(keys) * block_tokens - 1))
    other = list(ids)
    other[at] ^= 1
    changed = block_keys(NS, other, block_tokens)
    block = at // block_tokens
    assert changed[:block] == keys[:block]
    assert not set(changed[block:]) & set(keys)


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), image_spans(n))))
def test_keys_of_a_prompt_are_a_prefix_of_a_longer_ones(case):
    tokens, images = case
    ids = np.zeros(tokens, np.uint32)
    keys = block_keys(NS, ids, 4, images)
    assert len(set(keys)) == len(keys)
    longer = block_keys(NS, np.zeros(tokens + 9, np.uint32), 4, images)
    whole = tokens // 4
    assert longer[:whole] == keys


def test_only_the_pixels_differ():
    ids = np.full(16, 7)
    one = block_keys(NS, ids, 4, [ImageSpan(5, 6, b"a" * 32)])
    two = block_keys(NS, ids, 4, [ImageSpan(5, 6, b"b" * 32)])
    none = block_keys(NS, ids, 4)
    assert one[0] == two[0] == none[0]
    assert not set(one[1:]) & set(two[1:])
    assert not set(one[1:]) & set(none[1:])


def test_the_same_image_elsewhere_in_the_block_is_another_block():
    ids = np.full(8, 7)
    keys = {block_keys(NS, ids, 8, [ImageSpan(at, 2, b"a" * 32)])[0] for at in range(7)}
    assert len(keys) == 7


def test_which_part_of_an_image_a_block_holds_matters():
    ids = np.full(12, 7)
    keys = block_keys(NS, ids, 4, [ImageSpan(0, 12, b"a" * 32)])
    shorter = block_keys(NS, ids, 4, [ImageSpan(0, 9, b"a" * 32)])
    assert shorter == keys, "the image's end is in its digest, not in the block"


def test_two_namespaces_share_nothing():
    ids = np.arange(64)
    assert not set(block_keys(NS, ids, 4)) & set(block_keys(bytes(32), ids, 4))


def test_snapshots_are_no_blocks_and_tell_positions_apart():
    ids = np.arange(8)
    names = [snapshot_key(NS, ids[:n]) for n in range(9)]
    assert len(set(names)) == 9
    assert block_keys(NS, ids, 8)[0] not in names
    assert snapshot_key(NS, ids, 4, [PICTURE]) != snapshot_key(NS, ids, 4)
    assert snapshot_key(NS, ids, 9, [PICTURE]) == snapshot_key(NS, ids, 9)


def test_a_chain_goes_on_from_any_of_its_keys():
    ids = np.arange(40)
    keys = block_keys(NS, ids, 4)
    assert block_keys(keys[4], ids[20:], 4) == keys[5:]
    assert all(a != b for a, b in pairwise(keys))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: block_keys(b"short", [1], 1), "32"),
        (lambda: block_keys(NS, [1], 0), "block_tokens"),
        (lambda: block_keys(NS, [-1, 2], 1), "-1"),
        (lambda: block_keys(NS, [2**32], 1), "4294967296"),
        (lambda: block_keys(NS, [2**80], 1), "integers|row"),
        (lambda: block_keys(NS, [1.5], 1), "float"),
        (lambda: block_keys(NS, [[1, 2]], 1), "row"),
        (lambda: block_keys(NS, [[1], [2, 3]], 1), "integers"),
        (lambda: block_keys(NS, np.ones(3, bool), 1), "bool"),
        (lambda: block_keys(NS, b"12345", 1), "5 bytes"),
        (lambda: block_keys(NS, [1] * 8, 4, [ImageSpan(7, 2, b"d" * 32)]), "leaves"),
        (lambda: block_keys(NS, [1] * 8, 4, [ImageSpan(0, 0, b"d" * 32)]), r"0\+0"),
        (lambda: block_keys(NS, [1] * 8, 4, [ImageSpan(0, 2, b"d")]), "digest"),
        (
            lambda: block_keys(
                NS, [1] * 8, 4, [ImageSpan(2, 3, b"d" * 32), ImageSpan(4, 1, b"d" * 32)]
            ),
            "overlaps",
        ),
    ],
)
def test_what_can_not_be_a_prompt_is_refused(call, says):
    with pytest.raises(InvalidRequest, match=says):
        call()
