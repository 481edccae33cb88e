"""The benchmark of the HBM tier: what it says without a GPU, and that its steps run."""

import importlib.util
import json

import pytest

from benchmarks import bench_gpu_tier


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="CuPy is installed, it may measure"
)
def test_without_a_gpu_nothing_is_measured_and_it_says_so(tmp_path, capsys):
    target = tmp_path / "tier.json"
    assert bench_gpu_tier.main(["--smoke", "--json", str(target)]) == 0
    assert "not measured: no GPU (CuPy can't be imported" in capsys.readouterr().out
    report = json.loads(target.read_text())
    assert (report["measured"], report["results"]) == (False, [])


def test_all_steps_run_on_the_simulated_device(tmp_path, capsys):
    target = tmp_path / "tier.json"
    assert bench_gpu_tier.main(["--smoke", "--simulated", "--json", str(target)]) == 0
    assert "NOT MEASURED ON A GPU" in capsys.readouterr().out
    report = json.loads(target.read_text())
    assert report["measured"] is False
    assert [row["what"] for row in report["results"]] == [
        "promotion",
        "promotion_unverified",
        "read_back",
    ]
    assert report["acquire_to_rows"]["kind"] == "simulated"
    assert report["acquire_to_rows"]["blocks"] == 4
