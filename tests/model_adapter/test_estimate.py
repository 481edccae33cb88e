"""`ds41f estimate`."""

import json
from pathlib import Path

import pytest
from golden_model import DIRECTORY as GOLDEN
from typer.testing import CliRunner

from model_adapter.cli import app
from model_adapter.errors import ConfigError, InputError

RELEASED = Path(__file__).parents[1] / "golden" / "released"


def run(*arguments: object):
    return CliRunner().invoke(app, ["estimate", *map(str, arguments)])


@pytest.mark.parametrize("path", [RELEASED, RELEASED / "config.json"])
def test_json(path):
    printed = json.loads(run("--config", path, "--json").stdout)
    assert printed["global_bytes_per_token"] == 890
    assert printed["block"] == {"tokens": 256, "bytes": 227_840}
    contexts = {c["tokens"]: c for c in printed["contexts"]}
    assert list(contexts) == [8 << 10, 32 << 10, 128 << 10, 1 << 20]
    assert contexts[1 << 20]["global_bytes"] == 933_232_640
    assert contexts[1 << 20]["handover_bytes"] == 933_232_640 + 2_906_112 + 4
    assert sum(p["parameters"] for p in printed["parameters"]) > 760e9
    assert {r["record"]: r["bytes"] for r in printed["records"]} == {
        "main": 288,
        "index": 68,
        "window": 528,
        "DSpark window": 528,
        "pending pair row": 4096,
    }


def test_tables():
    printed = run("--config", RELEASED, "--tokens", "128k", "--tokens", 1048575).stdout
    assert "890 B/token" in printed
    assert "227,840 B per block of 256 tokens" in printed
    assert "551,566.18" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["128K", "94.372", "22.282", "116.654"] in [row[:4] for row in rows]
    assert ["1048575", "0.012"] in [[row[0], row[6]] for row in rows if len(row) > 6]
    assert printed.count("+ 2.9") == 2


def test_defaults_end_with_the_models_last_position():
    printed = json.loads(run("--config", GOLDEN, "--block-tokens", 64, "--json").stdout)
    assert [c["tokens"] for c in printed["contexts"]] == [4096]
    assert printed["block"]["tokens"] == 64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--tokens", "many"], InputError, "'many' is no context length"),
        (["--tokens", "1M"], InputError, "1048576 tokens is outside the model's 1…4096"),
        (["--block-tokens", "3"], InputError, "block_tokens 3 is not a multiple"),
        (["--config", "nowhere.json"], ConfigError, r"nowhere\.json is missing"),
    ],
)
def test_refusals(arguments, error, message):
    result = run("--config", GOLDEN, *arguments)
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception
