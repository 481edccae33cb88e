import json

import pytest
from hypothesis import given

from kvstore.errors import InvalidRequest
from kvstore.namespace import (
    BLOCK_BYTES_MAX,
    DS41F_LAYOUT,
    Layout,
    Namespace,
    SectionSpec,
    namespace_id,
)
from kvstore.testing.strategies import namespaces

SECRET = b"s" * 32


def test_the_released_layout_costs_890_bytes_per_token():
    assert DS41F_LAYOUT.block_bytes == 227_840
    assert DS41F_LAYOUT.bytes_per_token == 890.0
    assert DS41F_LAYOUT.section_bytes == (36864, 8704) * 3 + (73728, 17408)


def test_section_offsets_lie_one_behind_the_other():
    sizes, offsets = DS41F_LAYOUT.section_bytes, DS41F_LAYOUT.section_offsets
    assert offsets[0] == 0
    assert all(offsets[i] + sizes[i] == offsets[i + 1] for i in range(len(sizes) - 1))
    assert offsets[-1] + sizes[-1] == DS41F_LAYOUT.block_bytes


@given(namespaces())
def test_the_descriptor_comes_back_from_its_json(namespace):
    text = namespace.canonical_json()
    assert Namespace.from_json(text) == namespace
    assert json.loads(text)["model"] == namespace.model
    assert namespace_id(namespace, SECRET) == namespace_id(Namespace.from_json(text), SECRET)


BASE = Namespace("m", "1", DS41F_LAYOUT, "")
OTHERS = [
    Namespace("n", "1", DS41F_LAYOUT),
    Namespace("m", "2", DS41F_LAYOUT),
    Namespace("m", "1", Layout(DS41F_LAYOUT.sections, 512)),
    Namespace("m", "1", Layout(DS41F_LAYOUT.sections[::-1], 256)),
    Namespace("m", "1", Layout(DS41F_LAYOUT.sections[:-1], 256)),
    Namespace("m", "1", DS41F_LAYOUT, "t"),
    Namespace("m1", "1", DS41F_LAYOUT),
]


def test_whatever_decides_reuse_changes_the_id():
    ids = {namespace_id(ns, SECRET) for ns in [BASE, *OTHERS]}
    assert len(ids) == 1 + len(OTHERS)


def test_a_tenant_is_as_secret_as_the_secret():
    tenant = Namespace("m", "1", DS41F_LAYOUT, "t")
    assert namespace_id(tenant, b"a" * 32) != namespace_id(tenant, b"b" * 32)
    assert namespace_id(BASE, b"a" * 32) == namespace_id(BASE)
    with pytest.raises(InvalidRequest, match="secret"):
        namespace_id(tenant)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SectionSpec(2, "window", 2, 288), "window"),
        (lambda: SectionSpec(-1, "main", 2, 288), "layer"),
        (lambda: SectionSpec(2, "main", 0, 288), "ratio"),
        (lambda: SectionSpec(2, "main", 2, 0), "row_bytes"),
        (lambda: SectionSpec(2, "main", 2, 1.5), "row_bytes"),
        (lambda: Layout(()), "0"),
        (lambda: Layout((SectionSpec(2, "main", 3, 1),), 256), "multiple"),
        (lambda: Layout((SectionSpec(2, "main", 2, 1),) * 2, 256), "twice"),
        (
            lambda: Layout((SectionSpec(2, "main", 1, BLOCK_BYTES_MAX),), 2),
            str(2 * BLOCK_BYTES_MAX),
        ),
        (lambda: Layout((SectionSpec(2, "main", 1, 1),), 0), "block_tokens"),
        (lambda: Namespace("", "1", DS41F_LAYOUT), "model"),
        (lambda: Namespace("m", "", DS41F_LAYOUT), "weight_revision"),
        (lambda: Namespace("m" * 2000, "1", DS41F_LAYOUT), "1024"),
        (lambda: Namespace("m", "1", DS41F_LAYOUT, "\ud800"), "tenant"),
    ],
)
def test_what_can_not_be_a_namespace_is_refused(make, says):
    with pytest.raises(InvalidRequest, match=says):
        make()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"more": 1},
        {"layout": []},
        {"layout": [{"layer": 1}]},
        {"layout": 3},
        {"block_tokens": "256"},
        {"model": 7},
    ],
)
def test_descriptors_of_another_kind_are_refused(change):
    descriptor = json.loads(BASE.canonical_json()) | change
    with pytest.raises(InvalidRequest):
        Namespace.from_json(json.dumps(descriptor))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"7"])
def test_what_is_no_descriptor_is_refused(text):
    with pytest.raises(InvalidRequest):
        Namespace.from_json(text)
