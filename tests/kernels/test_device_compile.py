"""Every device kernel compiles for every architecture, without spills or local memory."""

import ctypes
import ctypes.util
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import gpu_compile
from kernels.engine_records import ENGINE_RECORDS
from kernels.gpu.plan import THREADS
from kernels.gpu.source import OPTIONS, device_source
from kernels.layout import KINDS

REGISTERS_MAX = 64
"""So that half of a multiprocessor's 2048 threads fit, whatever a kernel's shared memory."""

KERNELS = {
    *(f"{d}_{kind}_{v}" for d in ("quantize", "dequantize") for kind in KINDS
      for v in ("float32", "bfloat16")),
    *(f"{d}_{record}" for d in ("gather", "scatter") for record in ENGINE_RECORDS),
    "checksum",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(request):
    """The compiler's report and PTX, made anew only if the source has changed."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc (it needs no GPU)")
    about = [device_source(), *OPTIONS, *map(str, gpu_compile.ARCHITECTURES), nvcc]
    digest = hashlib.sha256("\n".join(about).encode()).hexdigest()[:24]
    kept = request.config.cache.mkdir("device-compile") / f"{digest}.json"
    if not kept.exists():
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(gpu_compile.compile_all(nvcc)), "utf-8")
        own.replace(kept)
    return json.loads(kept.read_text("utf-8"))


def test_no_kernel_spills_or_uses_local_memory_anywhere(compiled):
    rows = gpu_compile.parse(compiled[0])
    assert {(row.kernel, row.architecture) for row in rows} == {
        (kernel, a) for kernel in KERNELS for a in gpu_compile.ARCHITECTURES
    }
    bad = [r for r in rows if r.stack or r.spill_stores or r.spill_loads]
    assert not bad, bad
    assert max(row.registers for row in rows) <= REGISTERS_MAX


def test_rows_are_moved_16_bytes_at_a_time(compiled):
    """Every kernel reads and writes global memory in vectors, and nothing through a pointer of
    unknown memory. What is narrower is in tables and tails."""
    bodies = re.split(r"^\.visible \.entry ", compiled[1], flags=re.MULTILINE)[1:]
    assert len(bodies) == len(KERNELS)
    for body in bodies:
        name = body.split("(")[0]
        used = Counter(re.findall(r"\b((?:ld|st)\.[a-z0-9.]+)", body))
        assert used["ld.global.v4.u32"], name
        if name != "checksum":
            assert used["st.global.v4.u32"] + used["st.global.v4.f32"], name
        spaces = {access.split(".")[1] for access in used}
        assert spaces <= {"global", "shared", "param", "const"}, (name, spaces)
        narrow = {a for a in used if re.fullmatch(r"ld\.global\.(u8|u16)", a)}
        assert not narrow, (name, narrow)


def test_the_source_is_one_text_for_a_compiler_without_headers():
    text = device_source()
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("struct KvNvfp4 {") == 1
    assert f"kKvThreads = {THREADS};" in text


def nvrtc():
    """NVRTC's library, from the loader's path or from NVIDIA's wheel."""
    places = [ctypes.util.find_library("nvrtc")]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else []:
        places += sorted(map(str, Path(folder).glob("**/libnvrtc.so.*")))
    return next(filter(None, places), None)


@pytest.mark.parametrize("architecture", gpu_compile.ARCHITECTURES[:1])
def test_nvrtc_takes_it(architecture):
    """What CuPy does at run time, without CuPy."""
    library = nvrtc()
    if library is None:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc; it needs no GPU)")
    api = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    source = device_source().encode()
    create = api.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    assert create == 0
    options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture=sm_{architecture}")]
    status = api.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    api.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    api.nvrtcGetProgramLog(program, log)
    api.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    assert not log.value.strip()


def test_the_report_is_read_as_ptxas_writes_it():
    report = """
ptxas info    : 64 bytes gmem, 256 bytes cmem[3]
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 2112 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_100a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    assert gpu_compile.parse(report) == [
        gpu_compile.Compiled("one", 90, 40, 16, 8, 4, 2112),
        gpu_compile.Compiled("two", 100, 12, 0, 0, 0, 0),
    ]
