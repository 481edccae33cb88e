"""Sets each peer up in an environment of its own under a temporary directory, measures it, and
writes what came of it; a peer that can't be made to run is reported with the reason. Loopback only.

Redis' server is no Python package: install it (Debian: redis-server), or name it in REDIS_SERVER.
Mooncake wants RDMA libraries even for TCP (Debian: libibverbs1, librdmacm1, libnl-route-3-200).
LMCache's environment is made by hand and named in LMCACHE_PYTHON (see `lmcache_peer`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = {
    "ours": [],
    "redis": ["redis==8.1.0", "hiredis==3.5.0"],
    "mooncake": ["mooncake-transfer-engine-non-cuda"],
    "lmcache": [],
}
SCRIPTS = {"ours": "ours.py"} | {name: f"{name}_peer.py" for name in PEERS if name != "ours"}
INSTALL_S_MAX, RUN_S_MAX = 900, 300


def _python(name: str, folder: Path) -> Path:
    if name == "lmcache":
        return Path(os.environ.get("LMCACHE_PYTHON", "LMCACHE_PYTHON is not set"))
    if not PEERS[name]:
        return Path(sys.executable)
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        command = [python, "-m", "pip", "install", "-q", *PEERS[name]]
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S_MAX)
    return python


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """The peer's rows. Raises what went wrong."""
    command = [_python(name, folder), SCRIPTS[name]]
    done = subprocess.run(command, cwd=HERE, capture_output=True, timeout=RUN_S_MAX, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    last = [line for line in said.decode(errors="replace").splitlines() if line.strip()][-1:]
    return " ".join([type(error).__name__, *(last or [str(error)])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers", description=__doc__)
    parser.add_argument("--only", choices=PEERS, nargs="*", default=list(PEERS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="environments there, and reuse")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"rows": [], "failed": {}, "load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            try:
                report["rows"] += measure(name, options.keep or Path(temporary))
            except (OSError, ValueError, IndexError, subprocess.SubprocessError) as e:
                report["failed"][name] = _reason(e)
    for row in report["rows"]:
        print(
            f"{row['system']:18} {row['bytes']:8} B  {row['gb_s']:6.2f} GB/s  "
            f"p50 {row['p50_us']:8.0f} µs  p99 {row['p99_us']:8.0f} µs"
        )
    for name, reason in report["failed"].items():
        print(f"{name}: {reason}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
