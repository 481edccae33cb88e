"""LMCache's disk backend, by its own benchmark: `lmcache bench l2`, `fs_native` with O_DIRECT.

A library call without verification; to be compared with the tier, not with the daemon. It takes
whole multiples of 4 KiB: an object is rounded up, and its payload counted.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.ssd.load import BATCH, Load
from benchmarks.ssd.simple import _page_bytes

LMCACHE_S_MAX = 120.0


def measure(program: Path, directory: Path, load: Load, rounds: int) -> dict[str, Any]:
    """Median and mean GB/s of payload of its loads and stores; or `why` there are none."""
    adapter = {"type": "fs_native", "base_path": str(directory), "use_odirect": True}
    command = [str(program), "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    options = {
        "num-keys": BATCH,
        "data-size-kb": _page_bytes(load.payload) // 1024,
        "l1-align-bytes": 4096,
        "rounds": rounds,
        "warmup-rounds": 2,
        "format": "json",
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LMCACHE_S_MAX, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return {"why": f"lmcache did not run: {e}"}
    out: dict[str, Any] = {}
    for operation in _operations(done.stdout):
        name = operation["operation"].lower()
        if name in ("store", "load") and operation["total_success"]:
            moved = load.payload * BATCH / 1e9
            out[f"{name}_gb_s"] = moved / (operation["duration_p50_ms"] / 1e3)
            out[f"{name}_gb_s_mean"] = moved / (operation["duration_avg_ms"] / 1e3)
    return out or {"why": f"lmcache gave no figures: {(done.stderr or done.stdout)[-300:]}"}


def _operations(text: str) -> list[dict[str, Any]]:
    """The results' `op_N` objects, wherever they lie in what was printed."""
    decoder, found, at = json.JSONDecoder(), [], text.find('"op_')
    while at >= 0:
        start = text.index("{", at)
        value, end = decoder.raw_decode(text, start)
        found.append(value)
        at = text.find('"op_', end)
    return found
