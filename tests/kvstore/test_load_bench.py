"""The load of many clients at its smoke size, and that it would see what it looks for."""

import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from daemons import STORE_SETTINGS

from benchmarks import bench_load
from benchmarks.load import clients
from benchmarks.load.memory import SHARED, MemoryCurve, resident_bytes
from kvstore import DS41F_LAYOUT, connect


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_left_behind(tmp_path: Path) -> None:
    target, picture = tmp_path / "load.json", tmp_path / "curve.png"
    assert bench_load.main(["--smoke", "--json", str(target), "--png", str(picture)]) == 0
    report = json.loads(target.read_text())
    assert report["clients"] == bench_load.CLIENTS_SMOKE
    assert sum(row["calls"] for row in report["calls"].values()) > 20
    assert report["faults"] == {"wrong": 0, "lost": 0, "errors": 0}
    assert not any(report["after"]["held"].values())
    assert set(report["memory"]["growth"]) == {"daemon", "clients", SHARED}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_wrong_bytes_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CHAINS", 3)
    with connect(f"file://{tmp_path}/store", **STORE_SETTINGS) as client:
        ns = clients.namespace(client, DS41F_LAYOUT, "load")
        load = clients.LoadClient(client, ns, 0)
        for _ in range(12):
            load._put()
            load._get()
            load._snapshot()
            load._hand_over()
        assert load.counts["blocks read"] > 0
        assert load.counts["windows read"] > 0
        assert [load.counts[name] for name in bench_load.FAULTS] == [0, 0, 0]
        monkeypatch.setattr(clients, "payload_of", lambda name, size: np.zeros(size, np.uint8))
        load._get()
        load._snapshot()
        assert load.counts["wrong"] > 1


def test_a_curve_that_grows_is_told_from_a_flat_one() -> None:
    curve = MemoryCurve(dict, step_s=1.0, at_s=[float(n) for n in range(600)])
    flat = [min(n, 50) << 20 for n in range(600)]
    curve.bytes_of = {"flat": flat, "leak": [b + (n << 16) for n, b in enumerate(flat)]}
    assert curve.growth("flat")["mib_per_minute"] == pytest.approx(0.0, abs=1e-6)
    assert curve.growth("leak")["mib_per_minute"] == pytest.approx(60 / 16)
    assert curve.growth("leak")["last_mib"] > curve.growth("leak")["warm_mib"] + 10


def test_shared_memory_counts_once_however_many_map_it() -> None:
    size = 32 << 20
    fd = os.memfd_create("shared")
    os.ftruncate(fd, size)
    before = resident_bytes(os.getpid())
    maps = [mmap.mmap(fd, size) for _ in range(3)]
    for each in maps:
        np.frombuffer(each, np.uint8)[:] = 1
    after = resident_bytes(os.getpid())
    assert size * 7 // 8 < after["shmem"] - before["shmem"] < size * 9 // 8
    os.close(fd)


def test_memory_of_a_process_that_is_gone_is_none() -> None:
    assert sum(resident_bytes(2**22 - 1).values()) == 0
