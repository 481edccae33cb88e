"""The benchmark runs at its smoke size and writes what it says."""

import json

from benchmarks import bench_kernels
from kernels import codec


def test_smoke(tmp_path, capsys):
    target = tmp_path / "kernels.json"
    assert bench_kernels.main(["--smoke", "--json", str(target)]) == 0
    report = json.loads(target.read_text("utf-8"))
    assert report["smoke"] is True
    seen = {(row["kind"], row["backend"]) for row in report["results"]}
    assert seen == {
        (kind, backend)
        for kind in ("nvfp4", "mxfp4", "fp8")
        for backend in codec.available_backends()
    }
    for row in report["results"]:
        for name in ("quantize", "dequantize"):
            assert row[f"{name}_gb_s"] > 0
            assert row[f"{name}_to_copy"] == row[f"{name}_gb_s"] / row["copy_gb_s"]
    assert "nvfp4" in capsys.readouterr().out
