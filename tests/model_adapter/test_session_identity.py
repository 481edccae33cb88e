"""Blocks of other weights, other sizes and other block lengths are never met."""

import json
import shutil

import pytest
import tiny_checkpoint as tiny

from kvstore.errors import InvalidRequest
from model_adapter.errors import CheckpointError
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import CachedSession, StoreBlocks, namespace_of, weight_revision


def test_the_layout_is_the_model_s():
    layout = tiny.namespace().layout
    assert [(s.layer, s.role, s.ratio, s.row_bytes) for s in layout.sections] == [
        (2, "main", 2, 36),
        (2, "index", 2, 17),
        (3, "main", 2, 36),
        (3, "index", 2, 17),
        (4, "main", 1, 36),
        (4, "index", 1, 17),
    ]
    assert layout.bytes_per_token == 106.0


def test_other_weights_of_the_same_shapes_are_another_namespace(tmp_path):
    make_checkpoint("tiny", 1, tmp_path / "other")
    same = [
        (d / "model.safetensors.index.json").read_bytes()
        for d in (tiny.checkpoint(), tmp_path / "other")
    ]
    assert same[0] == same[1]
    other = Model.load(tmp_path / "other")
    namespace = namespace_of(other, tmp_path / "other", tiny.BLOCK_TOKENS)
    assert namespace.layout == tiny.namespace().layout
    assert namespace.weight_revision != tiny.namespace().weight_revision
    ids = tiny.prompt(100)
    with tiny.store(tmp_path / "store") as client:
        tiny.session(client).generate(ids, 1)
        report = CachedSession(other, StoreBlocks(client, namespace)).generate(ids, 1).report
        assert report.hit_tokens == 0
        assert report.stored_blocks == 3


def test_a_copy_is_the_same_revision_and_any_changed_tensor_of_some_size_another(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny.checkpoint(), copy)
    assert weight_revision(copy) == tiny.namespace().weight_revision
    (shard,) = copy.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    start, stop = len(data) // 2, len(data) // 2 + (128 << 10)
    data[start:stop] = bytes(b ^ 1 for b in data[start:stop])
    shard.write_bytes(data)
    assert weight_revision(copy) != tiny.namespace().weight_revision


def test_a_changed_config_is_another_revision(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny.checkpoint(), copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["index_topk"] += 1
    (copy / "config.json").write_text(json.dumps(config))
    assert weight_revision(copy) != tiny.namespace().weight_revision


def test_a_named_revision_and_a_tenant_are_taken_as_given():
    named = namespace_of(tiny.model(), tiny.checkpoint(), 64, tenant="a", revision="2026-10")
    assert (named.weight_revision, named.tenant) == ("2026-10", "a")
    assert named.layout.block_tokens == 64


def test_says_what_does_not_fit(tmp_path):
    with pytest.raises(InvalidRequest, match="block_tokens 33 is not a multiple of the ratio 2"):
        namespace_of(tiny.model(), tiny.checkpoint(), 33)
    copy = tmp_path / "copy"
    shutil.copytree(tiny.checkpoint(), copy)
    next(copy.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        weight_revision(copy)
