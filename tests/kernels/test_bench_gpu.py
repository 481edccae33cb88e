"""The benchmark says what it did not measure, and runs through on a simulated device."""

import json

import pytest
from simulated_cupy import SimulatedCupy

from benchmarks import bench_gpu
from kernels import gpu
from kernels.gpu import runtime


def absent():
    raise gpu.GpuUnavailableError("CuPy can't be imported")


def test_without_a_device_nothing_is_measured_and_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runtime, "cupy", absent)
    target = tmp_path / "gpu.json"
    assert bench_gpu.main(["--smoke", "--json", str(target)]) == 0
    assert "not measured: no GPU (CuPy can't be imported)" in capsys.readouterr().out
    report = json.loads(target.read_text("utf-8"))
    assert report["measured"] is False
    assert report["results"] == []


def test_every_kernel_has_a_row(monkeypatch, tmp_path, host_kernels, capsys):
    """Rates of the simulated device mean nothing; that the launches are right does."""
    simulated = SimulatedCupy(host_kernels)
    monkeypatch.setattr(runtime, "cupy", lambda: simulated)
    for cached in (runtime._module, runtime._function):
        monkeypatch.setattr(runtime, cached.__name__, cached.__wrapped__)
    target = tmp_path / "gpu.json"
    assert bench_gpu.main(["--smoke", "--json", str(target)]) == 0
    report = json.loads(target.read_text("utf-8"))
    assert report["device"] == "simulated"
    assert "on simulated" in capsys.readouterr().out
    names = [row["kernel"] for row in report["results"]]
    launched = {name for name, _ in simulated.launches}
    assert len(launched) == 12 + 12 + 1
    assert {name.removesuffix("_split").removesuffix("_interleaved") for name in names} == launched
    for row in report["results"]:
        assert row["gb_s"] > 0
        assert row["bytes"] <= 2.2 * bench_gpu.SMOKE.bytes_each


@pytest.mark.gpu
def test_smoke_on_a_device(capsys):
    if not gpu.available():
        pytest.skip("needs CuPy and a device")
    assert bench_gpu.main(["--smoke"]) == 0
    assert "checksum" in capsys.readouterr().out
