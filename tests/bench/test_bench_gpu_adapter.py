"""The benchmark of the adapter on a device: what it says without one, and that its steps run."""

import json

import torch

from benchmarks import bench_gpu_adapter


def test_without_a_gpu_nothing_is_measured_and_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = tmp_path / "adapter.json"
    assert bench_gpu_adapter.main(["--smoke", "--json", str(target)]) == 0
    assert "not measured: device 'cuda': torch sees no CUDA device" in capsys.readouterr().out
    report = json.loads(target.read_text())
    assert report["measured"] is False
    assert "per_second" not in report


def test_all_steps_run_with_the_cpu_in_the_devices_place(tmp_path, capsys):
    target = tmp_path / "adapter.json"
    assert bench_gpu_adapter.main(["--smoke", "--simulated", "--json", str(target)]) == 0
    assert "NOT MEASURED ON A GPU" in capsys.readouterr().out
    report = json.loads(target.read_text())
    assert report["measured"] is False
    rates = report["per_second"]
    assert rates.keys() == {
        f"{what}_{where}" for what in ("prefill", "decode", "hit") for where in ("cpu", "device")
    }
    assert all(rate > 0 for rate in rates.values())
