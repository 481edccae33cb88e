"""The benchmark of the data plane at its smoke size."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_dataplane


@pytest.mark.timeout(600)
def test_every_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    assert bench_dataplane.main(["--smoke", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert set(report["local"]["targets"]) <= set(report["local"]["ratios"])
    for row in report["remote"]["rows"]:
        assert row["ratios"]["port_to_socket"] > 0
    assert report["prefix"][0]["seconds"]["read_ssd"] > 0
    assert "get_to_memcpy" in capsys.readouterr().out
