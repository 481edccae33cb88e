"""Which HBM tier a configuration gives, and what is said where there is none."""

import importlib.util
import subprocess
import sys

import pytest

from kvstore.cli.serve import choose_tiers
from kvstore.config import DaemonConfig, HbmConfig, build_config
from kvstore.errors import ConfigError
from kvstore.tiers.hbm.device import CUDA, SIMULATED, DeviceError, NoDevice
from kvstore.tiers.hbm.opening import open_hbm
from kvstore.tiers.hbm.simulated import SimulatedDevice

HAS_CUPY = importlib.util.find_spec("cupy") is not None
WHY = "CuPy can't be imported (No module named 'cupy'); install the extra cuda12 or cuda13"


def nothing_here(config):
    raise NoDevice(WHY)


class Card(SimulatedDevice):
    """Stands for a CUDA device where none is."""

    kind = CUDA
    name = "Some Card (CUDA device 0)"

    def allocate(self, size_bytes):
        if size_bytes > 1 << 20:
            raise DeviceError("Some Card: out of memory")
        super().allocate(size_bytes)


def test_auto_without_a_device_is_no_tier_and_says_why():
    opened = open_hbm(HbmConfig(), nothing_here)
    assert opened.tier is None
    assert opened.note == f"hbm: absent, {WHY}"


def test_auto_with_a_device_uses_it():
    opened = open_hbm(HbmConfig(budget_bytes=8192), lambda _: [Card()])
    assert opened.tier is not None
    assert opened.tier.kind == CUDA
    assert opened.note == "hbm: Some Card (CUDA device 0)"
    opened.tier.close()


def test_auto_with_a_full_device_is_no_tier_and_says_why():
    opened = open_hbm(HbmConfig(), lambda _: [Card()])
    assert opened.tier is None
    assert opened.note == "hbm: absent, its memory can't be had: Some Card: out of memory"


def test_asking_for_a_device_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"hbm\.device is cupy, but CuPy can't be imported"):
        open_hbm(HbmConfig(device="cupy"), nothing_here)
    with pytest.raises(ConfigError, match=r"hbm\.budget_bytes 1073741824: Some Card: out of"):
        open_hbm(HbmConfig(device="cupy"), lambda _: [Card()])


def test_simulated_devices_are_called_so():
    opened = open_hbm(HbmConfig(device="simulated", devices=(0, 3), budget_bytes=8192))
    assert opened.tier is not None
    assert opened.tier.kind == SIMULATED
    assert opened.note.count("simulated device") == 2
    assert "simulated device 3 (host memory, no GPU)" in opened.note
    opened.tier.close()


def test_off_looks_at_nothing():
    opened = open_hbm(HbmConfig(device="off"), lambda _: pytest.fail("it looked"))
    assert (opened.tier, opened.note) == (None, "hbm: absent, hbm.device is off")


def test_a_device_named_twice_is_refused():
    with pytest.raises(ConfigError, match="names one of them twice"):
        build_config(DaemonConfig, {}, {"hbm.devices": "1,1"})
    with pytest.raises(ConfigError, match="write indices as 0,1"):
        build_config(DaemonConfig, {}, {"hbm.devices": "first"})
    assert build_config(DaemonConfig, {}, {"hbm.devices": "2,0"}).hbm.devices == (2, 0)


@pytest.mark.parametrize(
    ("tiers", "settings", "changes"),
    [
        ("dram", {}, {"ssd": None, "hbm.device": "off"}),
        ("dram,ssd", {"dir": "/d"}, {"hbm.device": "off"}),
        ("hbm,dram", {}, {"ssd": None, "hbm.device": "cupy"}),
        ("hbm,dram,ssd", {"dir": "/d", "hbm.device": "off"}, {"hbm.device": "cupy"}),
        ("hbm, dram, ssd", {"dir": "/d", "hbm.device": "simulated"}, {}),
    ],
)
def test_tiers_by_name(tiers, settings, changes):
    assert choose_tiers(build_config(DaemonConfig, {}, settings), tiers) == changes


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("hbm,ssd", "dram can't be left out"),
        ("dram,disk", "'disk' is no tier"),
        ("dram,ssd", "needs --dir"),
        ("", "'' is no tier"),
    ],
)
def test_tiers_that_can_not_be(tiers, message):
    with pytest.raises(ConfigError, match=message):
        choose_tiers(build_config(DaemonConfig, {}, {}), tiers)


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed here, so hbm may be had")
def test_a_daemon_that_is_to_have_hbm_and_can_not_ends_with_the_reason(tmp_path):
    command = [sys.executable, "-m", "kvstore", "serve", "--tiers", "hbm,dram"]
    command += ["--listen", f"unix://{tmp_path}/kv.sock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: hbm.device is cupy, but CuPy can't be imported" in last
    assert "set hbm.device to off, or to simulated" in last
