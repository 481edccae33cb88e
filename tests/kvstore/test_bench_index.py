"""The benchmark runs at its smoke size and writes what it says."""

import json

from benchmarks import bench_index


def test_smoke(tmp_path, capsys):
    target = tmp_path / "index.json"
    assert bench_index.main(["--smoke", "--json", str(target)]) == 0
    report = json.loads(target.read_text("utf-8"))
    assert (report["smoke"], report["blocks"]) == (True, bench_index.BLOCKS_SMOKE)
    assert set(bench_index.TARGETS) <= set(report["results"])
    assert all(value > 0 for value in report["results"].values())
    assert "match_to_bare_lookup" in capsys.readouterr().out
