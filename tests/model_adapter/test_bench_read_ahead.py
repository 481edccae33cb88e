"""The benchmark runs at its smoke size and writes what it says."""

import json

from benchmarks import bench_read_ahead


def test_smoke(tmp_path, capsys):
    target = tmp_path / "ahead.json"
    assert bench_read_ahead.main(["--smoke", "--json", str(target)]) == 0
    report = json.loads(target.read_text("utf-8"))
    assert (report["smoke"], report["tokens"]) == (True, bench_read_ahead.TOKENS_SMOKE)
    assert report["payload_bytes"] > 0
    for kind in ("dram", "grpc", "ssd", "simulated line"):
        result = report["results"][kind]
        assert result["beside_to_before"] > 0
        assert all(t["p50_us"] > 0 for t in result["seconds"].values())
    assert "beside ÷ before" in capsys.readouterr().out
