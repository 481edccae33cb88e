"""Which backend runs, what it says when it is the slow one, and what it must not depend on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import records_model as model

from kernels import codec

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "kernels" / "csrc"
WITHOUT_EXTENSION = "import sys; sys.modules['kernels._records'] = None; "


def run_python(code, forced=None):
    environment = {k: v for k, v in os.environ.items() if k != codec.BACKEND_VARIABLE}
    if forced is not None:
        environment[codec.BACKEND_VARIABLE] = forced
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_fastest_is_chosen():
    result = run_python("import kernels; print(kernels.backend())")
    assert result.stdout.strip() == codec.available_backends()[0]
    assert result.stderr == "" or codec.available_backends() == ("numpy",)


def test_a_backend_can_be_forced(backend):
    result = run_python("import kernels; print(kernels.backend())", forced=backend)
    assert (result.stdout.strip(), result.stderr) == (backend, "")


def test_an_unknown_backend_is_refused():
    result = run_python("import kernels", forced="cuda")
    assert result.returncode != 0
    assert "KERNELS_BACKEND='cuda': use avx2, portable or numpy" in result.stderr


def test_a_forced_backend_that_is_missing_is_refused():
    result = run_python(WITHOUT_EXTENSION + "import kernels", forced="avx2")
    assert result.returncode != 0
    assert "KERNELS_BACKEND='avx2' can't run here" in result.stderr
    assert "available: numpy" in result.stderr


def test_without_the_extension_numpy_runs_and_says_so_once():
    code = (
        WITHOUT_EXTENSION
        + "import numpy as np, kernels; print(kernels.backend()); "
        + "x = np.ones((1, 32), np.float32); r = kernels.fp8_quantize(kernels.fp8_dequantize("
        + "kernels.fp8_quantize(x))); print(r.tobytes().hex())"
    )
    result = run_python(code)
    expected = codec.quantize("fp8", np.ones((1, 32), np.float32), backend="numpy")
    assert result.stdout.split() == ["numpy", expected.tobytes().hex()]
    assert result.stderr.count("RuntimeWarning") == 1
    assert "slow NumPy path" in result.stderr
    assert "C++ compiler" in result.stderr


def test_forcing_numpy_is_silent_without_the_extension():
    result = run_python(
        WITHOUT_EXTENSION + "import kernels; print(kernels.backend())", forced="numpy"
    )
    assert (result.stdout.strip(), result.stderr) == ("numpy", "")


def test_importing_kernels_needs_nothing_of_ours_and_no_torch():
    result = run_python(
        "import sys, kernels; print([m for m in ('torch', 'kvstore', 'model_adapter') "
        "if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(codec.available_backends() == ("numpy",), reason="the extension is not built")
def test_a_thread_that_flushes_subnormals_gets_the_same_bytes():
    torch = pytest.importorskip("torch")
    # A quarter of the least scale rounds to zero, the next number up to half of it.
    x = np.array([0x00200001, 0x80200001, 0x007FFFFF] * 32, np.uint32).view(np.float32)[None]
    records = {kind: codec.quantize(kind, x, backend="numpy") for kind in ("nvfp4", "mxfp4", "fp8")}
    least = np.full((1, 17), 0x11, np.uint8)
    least[0, -1] = 0
    values = codec.dequantize("mxfp4", least, backend="numpy")
    assert values.all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormals")
    try:
        for backend in codec.available_backends():
            if backend == "numpy":
                continue
            for kind, expected in records.items():
                got = codec.quantize(kind, x, backend=backend)
                assert got.tobytes() == expected.tobytes(), (backend, kind)
            got = codec.dequantize("mxfp4", least, backend=backend)
            assert got.tobytes() == values.tobytes(), backend
    finally:
        torch.set_flush_denormal(False)
    assert model.unpack("mxfp4", records["mxfp4"], 96)[0].any()


def test_the_shared_header_stands_alone(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = (CSRC / "records.h").read_text("utf-8")
    assert "#include" not in source
    assert "std::" not in source
    unit = tmp_path / "alone.cpp"
    unit.write_text(
        '#include "records.h"\nunsigned char f(float x) { return kv_e4m3_encode(x); }\n'
    )
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", CSRC, unit],
        check=True,
        timeout=60,
    )


def test_the_shared_header_compiles_for_a_gpu_without_local_memory(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    unit = tmp_path / "kernel.cu"
    unit.write_text(
        '#include "records.h"\n'
        "template <class K> __device__ void both(const float* x, float* y) {\n"
        "    const kv_u8 byte = K::scale(kv_abs_bits(x[0]));\n"
        "    const float scale = K::scale_value(byte);\n"
        "    y[0] = kv_dequantize<K>(K::encode(x[threadIdx.x], scale), scale);\n"
        "}\n"
        "__global__ void all(const float* x, float* y) {\n"
        "    both<KvNvfp4>(x, y); both<KvMxfp4>(x + 64, y + 1); both<KvFp8>(x + 128, y + 2);\n"
        "}\n"
    )
    options = ["-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas=-v", "-I", CSRC]
    result = subprocess.run(
        [nvcc, *options, "-o", tmp_path / "kernel.cubin", unit],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result.stderr
