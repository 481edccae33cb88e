"""`kvstore serve` = `kvstored`: settings from a file and from flags, then the daemon."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.settings import as_toml, size_text
from kvstore.cli.version import VersionOption
from kvstore.config import DaemonConfig, SsdConfig, build_config, load_toml
from kvstore.errors import ConfigError

_DEFAULTS = DaemonConfig()
TIERS = ("hbm", "dram", "ssd")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _parse_setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(
            f"--set {text!r}: write it as key=value, for example lease.leases_max=100"
        )
    return key, value


def load_settings(config: Path | None, overrides: dict[str, Any]) -> DaemonConfig:
    """The settings of a file, if any, under those of flags. Raises `ConfigError`."""
    if config is None:
        return build_config(DaemonConfig, {}, overrides)
    return load_toml(config, overrides)


def choose_tiers(settings: DaemonConfig, tiers: str) -> dict[str, Any]:
    """What `--tiers` changes of `settings`. Raises `ConfigError`."""
    names = [name.strip() for name in tiers.split(",")]
    wrong = [name for name in names if name not in TIERS]
    if wrong or "dram" not in names:
        what = f"{wrong[0]!r} is no tier" if wrong else "dram can't be left out"
        raise ConfigError(f"--tiers {tiers!r}: {what}; name dram, and with it hbm or ssd or both")
    if "ssd" in names and not settings.has_ssd:
        raise ConfigError(f"--tiers {tiers!r}: the ssd tier needs --dir, where it lives")
    changes: dict[str, Any] = {} if "ssd" in names else {"ssd": None}
    if "hbm" not in names:
        changes["hbm.device"] = "off"
    elif settings.hbm.device in ("auto", "off"):
        # asked for by name: an error where it can't be had
        changes["hbm.device"] = "cupy"
    return changes


def serve(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings; flags win over it.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--dir", help="Where the SSD tier lives; without it, DRAM only.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="unix:///path/of.sock or tcp://127.0.0.1:port.",
            show_default=_DEFAULTS.server.listen,
        ),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(
            help="DRAM budget, for example 4GiB.",
            show_default=size_text(_DEFAULTS.dram.budget_bytes),
        ),
    ] = None,
    ssd: Annotated[
        str | None,
        typer.Option(
            help="SSD budget, for example 100GiB.",
            show_default=size_text(SsdConfig().budget_bytes),
        ),
    ] = None,
    hbm: Annotated[
        str | None,
        typer.Option(
            help="HBM budget per device, for example 8GiB.",
            show_default=size_text(_DEFAULTS.hbm.budget_bytes),
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Which tiers there are: dram, and hbm or ssd or both, as hbm,dram,ssd. By itself "
            "ssd is there with --dir, and hbm where a CUDA device is."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="host:port on loopback for Prometheus.", show_default="off")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            help="debug, info, warning or error.", show_default=_DEFAULTS.server.log_level
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting of docs/settings.md, as key=value."),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print all settings as TOML, which --config takes, and end."
        ),
    ] = False,
    version: VersionOption = False,
) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    flags = {
        "dir": directory,
        "server.listen": listen,
        "dram.budget_bytes": dram,
        "ssd.budget_bytes": ssd,
        "hbm.budget_bytes": hbm,
        "server.metrics_listen": metrics,
        "server.log_level": log_level,
    }
    overrides: dict[str, Any] = dict(_parse_setting(text) for text in setting or ())
    overrides |= {key: value for key, value in flags.items() if value is not None}
    settings = load_settings(config, overrides)
    if tiers is not None:
        settings = load_settings(config, overrides | choose_tiers(settings, tiers))
    if print_config:
        print(as_toml(settings), end="")
        return
    logging.basicConfig(level=settings.server.log_level.upper(), format=_LOG_FORMAT)
    from kvstore.server import daemon

    asyncio.run(daemon.serve(settings))
