"""Settings beyond what the machine has are told at the start."""

import resource
from pathlib import Path

import pytest
from daemons import STORE_SETTINGS, Daemon

from kvstore.config import DaemonConfig, build_config
from kvstore.server import machine

GIB = 1 << 30


def config_of(**settings: object) -> DaemonConfig:
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return build_config(DaemonConfig, {}, dotted)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "disk_bytes", lambda directory: 250 * GIB)


@pytest.mark.usefixtures("small")
def test_a_budget_above_what_there_is_is_told_with_both_figures(tmp_path: Path) -> None:
    fits = config_of(dram__budget_bytes=24 * GIB, ssd__budget_bytes=250 * GIB, dir=tmp_path)
    assert machine.budget_warnings(fits) == []
    dram, ssd = machine.budget_warnings(
        config_of(dram__budget_bytes="100GiB", ssd__budget_bytes="100TiB", dir=tmp_path)
    )
    for part in ("100.0 GiB", "24.0 GiB", "--dram"):
        assert part in dram
    for part in ("102,400.0 GiB", "250.0 GiB", str(tmp_path), "--ssd"):
        assert part in ssd
    assert "\n" not in dram + ssd


@pytest.mark.usefixtures("small")
def test_without_a_directory_the_ssd_budget_says_nothing() -> None:
    assert machine.budget_warnings(config_of(ssd__budget_bytes="100TiB")) == []


def test_a_directory_to_be_made_lies_on_the_file_system_above_it(tmp_path: Path) -> None:
    assert machine.disk_bytes(tmp_path / "not" / "yet") == machine.disk_bytes(tmp_path) > 0
    assert machine.memory_bytes() > 0


def test_too_few_files_are_told_with_both_figures() -> None:
    config = config_of(server__data_port__connections_max=1000)
    needed = machine.files_needed(config)
    assert needed > 1000
    assert machine.files_warnings(config, needed) == []
    assert machine.files_warnings(config, resource.RLIM_INFINITY) == []
    (warning,) = machine.files_warnings(config, needed - 1)
    for part in (str(needed), str(needed - 1), "connections_max 1000", "ulimit -Hn"):
        assert part in warning
    off = config_of(server__data_port__listen="off", server__data_port__connections_max=10**6)
    assert machine.files_warnings(off, 1024) == []


def test_a_daemon_lifts_its_limit_of_open_files_and_tells_what_is_missing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finite = hard != resource.RLIM_INFINITY
    settings = STORE_SETTINGS | {
        "ssd.budget_bytes": 1 << 60,
        "server.data_port.connections_max": hard if finite else 1 << 20,
    }
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", settings)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        daemon.start()
        assert daemon.process is not None
        lifted = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        daemon.kill()
    assert lifted == (hard, hard)
    log = daemon.log.decode()
    assert log.count(" WARNING kvstore.server.daemon: ssd.budget_bytes is ") == 1
    assert log.count(f" WARNING kvstore.server.daemon: this process may open {hard} ") == finite
