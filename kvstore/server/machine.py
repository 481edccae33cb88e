"""What the settings ask of the machine that it may not have, told at the start in a line each."""

import contextlib
import os
import resource
import shutil
from pathlib import Path

from kvstore.config import DaemonConfig

_FILES_PER_CONNECTION = 2
"""Its socket, and what a writer hands over through it."""
_FILES_BESIDE = 256
"""The store's own: segments, index, arena, what Python and gRPC have open."""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def disk_bytes(directory: Path) -> int:
    """Size of the file system that has `directory`, or will have once it is made."""
    at = directory.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    return shutil.disk_usage(at).total


def budget_warnings(config: DaemonConfig) -> list[str]:
    """What is said of budgets larger than the machine."""
    warnings = []
    budget, has = config.dram.budget_bytes, memory_bytes()
    if budget > has:
        warnings.append(
            f"dram.budget_bytes is {_gib(budget)} and this machine's memory {_gib(has)}: the "
            "kernel may kill the daemon before it has filled that; lower --dram"
        )
    if config.dir is not None and config.ssd is not None:
        with contextlib.suppress(OSError):  # opening the store says what is wrong with it
            budget, has = config.ssd.budget_bytes, disk_bytes(config.dir)
            if budget > has:
                warnings.append(
                    f"ssd.budget_bytes is {_gib(budget)} and the file system of {config.dir} has "
                    f"{_gib(has)}: it will be full before the budget is; lower --ssd"
                )
    return warnings


def files_needed(config: DaemonConfig) -> int:
    """File descriptors with every connection of the data port and every gRPC call there at once."""
    server = config.server
    connections = 0 if server.data_port.listen == "off" else server.data_port.connections_max
    return _FILES_PER_CONNECTION * connections + server.calls_max + _FILES_BESIDE


def raise_open_files() -> int:
    """Lift this process's limit of open files as far as it may; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a sandbox may refuse it
        return soft
    return hard


def files_warnings(config: DaemonConfig, limit: int) -> list[str]:
    """What is said of a limit of open files below what the settings can need."""
    needed = files_needed(config)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    return [
        f"this process may open {limit} files, and with server.data_port.connections_max "
        f"{config.server.data_port.connections_max} and server.calls_max "
        f"{config.server.calls_max} it can need {needed}: raise the hard limit (ulimit -Hn), or "
        "lower these"
    ]
