"""The bytes of tests/golden/records.safetensors."""

from pathlib import Path

import numpy as np
import pytest
import records_model as model
from safetensors.numpy import load_file

import kernels
from kernels import codec

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "records.safetensors")
ROLES = {"nvfp4": "main", "mxfp4": "index", "fp8": "window"}


def test_the_file_holds_the_released_records():
    sizes = {kind: GOLDEN[f"{role}.record"].shape for kind, role in ROLES.items()}
    assert sizes == {"nvfp4": (119, 288), "mxfp4": (119, 68), "fp8": (119, 528)}


@pytest.mark.parametrize("value_type", ["float32", "bfloat16"])
def test_records(kind, backend, value_type):
    x = GOLDEN[f"{ROLES[kind]}.input"]
    if value_type == "bfloat16":
        assert not (x.view(np.uint32) & 0xFFFF).any()
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    got = codec.quantize(kind, x, backend=backend)
    np.testing.assert_array_equal(got, GOLDEN[f"{ROLES[kind]}.record"])


def test_dequantised(kind, backend):
    expected = GOLDEN[f"{ROLES[kind]}.dequantised"]
    record = GOLDEN[f"{ROLES[kind]}.record"]
    got = codec.dequantize(kind, record, backend=backend)
    np.testing.assert_array_equal(model.bits(got), model.bits(expected))
    narrow = codec.dequantize(kind, record, "bfloat16", backend=backend)
    np.testing.assert_array_equal(narrow, model.bits(expected) >> 16)


@pytest.mark.parametrize("module", [kernels, kernels.reference], ids=["kernels", "reference"])
def test_public_names(kind, module):
    role = ROLES[kind]
    record = getattr(module, f"{kind}_quantize")(GOLDEN[f"{role}.input"])
    np.testing.assert_array_equal(record, GOLDEN[f"{role}.record"])
    values = getattr(module, f"{kind}_dequantize")(record, out_dtype="float32")
    np.testing.assert_array_equal(model.bits(values), model.bits(GOLDEN[f"{role}.dequantised"]))
