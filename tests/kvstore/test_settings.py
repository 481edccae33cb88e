"""Settings on paper: the page is current and complete; a printed configuration is taken back."""

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from pydantic import BaseModel

from kvstore.cli import main, serve_main
from kvstore.cli.settings import meanings, page, size_text
from kvstore.config import DaemonConfig, load_toml
from model_adapter.cli import main as ds41f_main

ROOT = Path(__file__).parents[2]


def ran(monkeypatch, capsys, command, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvstored", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command()
    assert not ended.value.code
    return capsys.readouterr().out


def groups(settings):
    yield settings
    for _, value in settings:
        if isinstance(value, BaseModel):
            yield from groups(value)


def test_the_page_is_current():
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == page(), "run `make settings`"


def test_every_setting_says_what_it_is():
    for group in groups(DaemonConfig()):
        values = {name for name, value in group if not isinstance(value, BaseModel)}
        assert values - meanings(type(group)).keys() == set(), type(group).__name__


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--dram", "4GiB", "--ssd", "1500000000", "--hbm", "100MiB"),
        ("--dir", '/tmp/a "b" ü', "--tiers", "dram,ssd", "--set", "hbm.devices=0,1"),
        ("--set", "ssd.lifetime_min_s=0", "--set", "windows.budget_bytes=0"),
        ("--metrics", "127.0.0.1:9000", "--set", "server.data_port.share=false"),
    ],
)
def test_a_printed_configuration_is_taken_back(flags, tmp_path, monkeypatch, capsys):
    printed = ran(monkeypatch, capsys, serve_main, *flags, "--print-config")
    file = tmp_path / "kv.toml"
    file.write_text(printed, encoding="utf-8")
    assert ran(monkeypatch, capsys, serve_main, "--config", file, "--print-config") == printed
    assert load_toml(file).dram.budget_bytes == (4 << 30 if "4GiB" in flags else 1 << 30)
    assert bool(tomllib.loads(printed).get("dir")) == ("--dir" in flags)


def test_without_an_ssd_tier_the_printed_configuration_has_none(tmp_path, monkeypatch, capsys):
    flags = ("--dir", tmp_path, "--tiers", "dram", "--print-config")
    file = tmp_path / "kv.toml"
    file.write_text(ran(monkeypatch, capsys, serve_main, *flags))
    assert not load_toml(file).has_ssd


@pytest.mark.parametrize("command", [main, serve_main, ds41f_main])
def test_every_command_says_its_version(command, monkeypatch, capsys):
    assert version("ds41-kvstore") in ran(monkeypatch, capsys, command, "--version")


def test_help_shows_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    shown = " ".join(ran(monkeypatch, capsys, serve_main, "--help").split())
    for default in ("unix:///tmp/kvstored.sock", "1GiB", "16GiB", "info", "off"):
        assert f"[default: ({default})]" in shown


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (main, ("bench", "replay"), "at the capacity that the store turned out to have, for"),
        (ds41f_main, ("decode",), "4: it, or blocks before it, can't be used; recompute."),
    ],
)
def test_help_fills_its_lines(command, arguments, sentence, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    lines = ran(monkeypatch, capsys, command, *arguments, "--help").splitlines()
    assert sentence in " ".join(" ".join(lines).split())
    words = sentence.split()
    (at,) = (i for i, line in enumerate(lines) if " ".join(words[:3]) in line)
    # the next line's first word would not have fitted
    assert len(lines[at]) + 1 + len(lines[at + 1].split()[0]) > 78


def test_sizes_are_exact():
    assert [size_text(n) for n in (0, 1, 1 << 10, 3 << 29, 1 << 40, 1500)] == [
        *("0", "1", "1KiB", "1536MiB", "1TiB", "1500")
    ]
