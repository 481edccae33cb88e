"""The benchmark of the SSD tier at its smoke size, and the readers of what others print."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench_ssd
from benchmarks.ssd import fio, lmcache, table
from benchmarks.ssd.load import SHAPES, Figures, Load, median_ratio, percentile_99


@pytest.mark.timeout(300)
def test_every_figure_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "results.json"
    arguments = ["--smoke", "--dir", str(tmp_path), "--json", str(target)]
    assert bench_ssd.main(arguments) == 0
    report = json.loads(target.read_text())
    for row in report["rows"]:
        for name in ("read", "at_once", "prefix", "write"):
            assert row[name]["gb_s"] > 0
        assert row["at_once"]["p99_us"] > 0
    for row in report["others"]:
        assert row["lmdb_write"]["gb_s"] > 0
        assert row["files_read"]["gb_s"] > 0
    assert set(report["daemon"]["ratios"]) == {"daemon_read_to_library", "daemon_write_to_library"}
    assert "tier against fio" in capsys.readouterr().out
    assert not list(tmp_path.glob("bench-ssd-*")), "it leaves nothing behind"

    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nstale figures\n{table.END}\nafter\n")
    monkeypatch.setattr("sys.argv", ["table", str(target), str(page)])
    for _ in range(2):
        assert table.main() == 0
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert text.count("| section 8,704 |") == 2
        assert "stale" not in text


def test_a_full_report_has_its_ratios_in_the_table() -> None:
    row = {"shape": "section 8,704", "clients": 4, "ratios": {"read": 0.5, "read_p99": 1.5}}
    row |= {name: {"gb_s": 1.25} for name in ("read", "prefix", "write")}
    other = {"shape": "section 8,704", "lmcache": {"store_gb_s": 0.25, "load_gb_s": 0.5}}
    names = ("write", "scattered", "prefix", "lmdb_write", "lmdb_read", "files_write", "files_read")
    other |= {name: {"gb_s": 1.0} for name in names}
    report = {"load_before": [1.0], "load_after": [2.0], "cpus": 2, "rounds": 3, "daemon": {}}
    text = "\n".join(table.tables(report | {"rows": [row], "others": [other]}))
    assert "| section 8,704 | 4 | 1.25 (0.50) | 1.50 | 1.25  | 1.25  |" in text
    assert "| 0.25, 0.50 | 2.00 (scattered 2.00) |" in text


def test_without_fio_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing = fio.missing()
    assert missing is not None
    assert "apt-get install fio" in missing


def test_ratios_are_of_neighbours_in_time() -> None:
    assert median_ratio([1.0, 10.0, 3.0], [1.0, 20.0, 1.0]) == 1.0
    assert percentile_99([*range(1, 201)]) == 199
    figures = Figures()
    figures.add(1.0, 5.0)
    figures.add(3.0, 7.0)
    figures.add(2.0, 6.0)
    assert figures.as_json() == {"gb_s": 2.0, "rounds_gb_s": [1.0, 3.0, 2.0], "p99_us": 6.0}


def test_the_shapes_are_those_of_the_released_layout() -> None:
    assert sum(SHAPES["block 227,840"]) == 227_840
    assert Load(SHAPES["block 227,840"], 0, 0, 1, 1).stored == 229_376
    assert Load(SHAPES["section 8,704"], 0, 0, 1, 1).stored == 12_288


def test_lmcache_s_figures_are_found_in_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = """[Step] something
{ "config": {}, "results": {
    "op_0": {"operation": "Store", "total_success": 5, "duration_p50_ms": 10.0,
             "duration_avg_ms": 20.0},
    "op_2": {"operation": "Load", "total_success": 5, "duration_p50_ms": 4.0,
             "duration_avg_ms": 5.0}
}}
[Cleanup] Done."""
    result = subprocess.CompletedProcess([], 0, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: result)
    load = Load(SHAPES["section 8,704"], 1, 1, 1, 1)
    found = lmcache.measure(Path("lmcache"), tmp_path, load, 3)
    assert found["load_gb_s"] == pytest.approx(64 * 8704 / 0.004 / 1e9)
    assert found["store_gb_s_mean"] == pytest.approx(64 * 8704 / 0.020 / 1e9)


def test_a_missing_lmcache_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    load = Load(SHAPES["section 8,704"], 1, 1, 1, 1)
    assert "did not run" in lmcache.measure(tmp_path / "none", tmp_path, load, 1)["why"]
