"""The limit of the disk: fio with O_DIRECT and libaio, the same sizes, depth and clients."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

FIO_S_MAX = 120.0
FILE_BYTES = 512 << 20


class FioResult(NamedTuple):
    """GB/s and the p99 of one request's time, µs, its sync included where there are any."""

    gb_s: float
    p99_us: float


def missing() -> str | None:
    """Why there is nothing to compare with; None where there is fio."""
    if shutil.which("fio"):
        return None
    return "fio is not installed (apt-get install fio): there is no limit to compare with"


def _run(directory: Path, clients: int, options: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "name": "limit",
        "directory": directory,
        "direct": 1,
        "ioengine": "libaio",
        "numjobs": clients,
        "randrepeat": 0,
        "output-format": "json",
        **options,
    }
    command = ["fio", "--group_reporting", *(f"--{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_S_MAX)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


def _p99_us(latency: dict[str, Any]) -> float:
    return float(latency.get("percentile", {}).get("99.000000", 0)) / 1e3


def read(
    directory: Path,
    pattern: str,
    size: int,
    depth: int,
    clients: int,
    runtime_ms: int,
    at_once: bool = False,
) -> FioResult:
    """Reads of `size`, `depth` of them under way; `at_once`: `depth` are begun together, the next
    when all are there. `pattern`: `randread` or `read`."""
    batch = {"iodepth_batch_submit": depth, "iodepth_batch_complete_min": depth}
    job = _run(
        directory,
        clients,
        {
            "filename": "fio.read",
            "size": FILE_BYTES,
            "rw": pattern,
            "norandommap": 1,
            "bs": size,
            "iodepth": depth,
            "runtime": f"{runtime_ms}ms",
            "time_based": 1,
            "offset_increment": f"{100 // clients}%" if pattern == "read" else 0,
            **(batch if at_once else {}),
        },
    )["read"]
    return FioResult(job["bw_bytes"] / 1e9, _p99_us(job["clat_ns"]))


def write(
    directory: Path, size: int, depth: int, clients: int, bytes_each: int, sync_every: int = 0
) -> FioResult:
    """New files, preallocated, of `bytes_each` per client; a sync after `sync_every` writes."""
    job = _run(
        directory,
        clients,
        {
            "filename_format": "fio.write.$jobnum",
            "size": bytes_each // size * size,
            "rw": "write",
            "bs": size,
            "iodepth": depth,
            "unlink": 1,
            "fdatasync": sync_every,
            "end_fsync": 1 if sync_every else 0,
        },
    )
    p99_us = _p99_us(job["write"]["clat_ns"]) + _p99_us(job.get("sync", {}).get("lat_ns", {}))
    return FioResult(job["write"]["bw_bytes"] / 1e9, p99_us)
