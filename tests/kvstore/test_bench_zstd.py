"""The benchmark of compression at its smoke size, and its verdict."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_zstd
from benchmarks.compression.records import Sample, gaussian
from kvstore import DS41F_LAYOUT


@pytest.mark.timeout(300)
def test_every_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    assert bench_zstd.main(["--smoke", "--dir", str(tmp_path), "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    kinds = {(r["kind"], r["ratio"], r["separated"]) for r in report["rows"]}
    assert len(kinds) == 8
    assert report["disk_read_gb_s"] > 0
    gains = {(r["level"], r["separated"]): r["gain"] for r in report["whole_blocks"]}
    # negative levels do no entropy coding, and records have nothing else to gain from
    assert gains[-1, False] < 0.01 < gains[1, False] < gains[1, True] < 0.2
    assert "| main, ratio 2, 36,864 B |" in capsys.readouterr().out


def test_the_samples_have_the_released_sizes() -> None:
    sizes = {s.section_bytes for s in gaussian(1)}
    assert sizes == set(DS41F_LAYOUT.section_bytes)


def test_codes_and_scales_are_taken_apart() -> None:
    rows = np.arange(2 * 3 * 68, dtype=np.uint16).astype(np.uint8).reshape(2, 3, 68)
    codes, scales = Sample("s", "index", 1, rows).parts(separated=True)[:2]
    assert codes == rows[0, :, :64].tobytes()
    assert scales == rows[0, :, 64:].tobytes()
    assert Sample("s", "index", 1, rows).parts(separated=False) == [r.tobytes() for r in rows]


@pytest.mark.parametrize(
    ("gain", "unpack", "verdict"), [(0.06, 2.0, True), (0.04, 2.0, False), (0.2, 0.9, False)]
)
def test_it_pays_where_it_gains_and_keeps_up(gain: float, unpack: float, verdict: bool) -> None:
    assert bench_zstd.pays({"gain": gain, "unpack_gb_s": unpack}, 1.0) is verdict


def test_a_block_s_gain_is_its_sections_by_weight() -> None:
    rows = [
        {
            "source": "s",
            "level": 1,
            "separated": False,
            "kind": kind,
            "ratio": ratio,
            "section_bytes": size,
            "gain": gain,
            "unpack_gb_s": 1.0,
        }
        for kind, ratio, size, gain in (
            ("main", 2, 36_864, 0.0),
            ("index", 2, 8_704, 0.1),
            ("main", 1, 73_728, 0.0),
            ("index", 1, 17_408, 0.1),
        )
    ]
    (block,) = bench_zstd.whole_block(rows)
    assert block["gain"] == pytest.approx(0.1 * (3 * 8_704 + 17_408) / 227_840)
