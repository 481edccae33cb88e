"""Without CuPy or a device: what one is told, and that nobody needs them to import anything."""

import importlib
import subprocess
import sys

import numpy as np
import pytest

from kernels import gpu
from kernels.gpu import runtime


@pytest.fixture
def importing(monkeypatch):
    """Says what importing CuPy does."""
    runtime.cupy.cache_clear()
    yield lambda behaviour: monkeypatch.setattr(importlib, "import_module", behaviour)
    runtime.cupy.cache_clear()


def test_without_cupy_the_error_says_what_to_install(importing):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    importing(missing)
    assert not gpu.available()
    with pytest.raises(gpu.GpuUnavailableError, match=r"No module named 'cupy'.*\[cuda13\]"):
        gpu.quantize("nvfp4", np.zeros((4, 512), np.float32))


class CupyOf:
    def __init__(self, count):
        self._count = count
        self.cuda = self.runtime = self

    def getDeviceCount(self):  # noqa: N802
        if self._count is None:
            raise RuntimeError("cudaErrorInsufficientDriver")
        return self._count


@pytest.mark.parametrize(("count", "words"), [(0, "no device"), (None, "InsufficientDriver")])
def test_without_a_device_the_error_says_so(importing, count, words):
    importing(lambda name: CupyOf(count))
    assert not gpu.available()
    with pytest.raises(gpu.GpuUnavailableError, match=words):
        gpu.Checksums(1)


def test_cupy_is_imported_by_the_first_call_and_not_before():
    program = "import sys, kernels, kernels.gpu; print('cupy' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
