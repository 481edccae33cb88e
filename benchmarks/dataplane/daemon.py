"""A daemon for a benchmark, as a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import kvstore
from kvstore import BlockPut, Layout, Namespace, NamespaceHandle
from kvstore.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 30.0


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def daemon(listen: str, dram: str, directory: Path | None = None, ssd: str = "") -> Iterator[str]:
    """Run `kvstore serve`; gives its URL."""
    with daemon_process(listen, dram, directory, ssd, {}) as (url, _):
        yield url


@contextmanager
def daemon_process(
    listen: str, dram: str, directory: Path | None, ssd: str, settings: Mapping[str, object]
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`daemon` with more settings; gives the process too."""
    command = [sys.executable, "-m", "kvstore", "serve", "--listen", listen, "--dram", dram]
    if directory is not None:
        command += ["--dir", str(directory), "--ssd", ssd, "--set", "ssd.free_floor_bytes=0"]
        command += ["--set", "ssd.lifetime_min_s=0"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    url = listen.replace("tcp://", "dns:///")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        _wait_for(process, url)
        yield url, process
    finally:
        process.terminate()
        process.wait(START_S_MAX + 60)


def _wait_for(process: "subprocess.Popen[bytes]", url: str) -> None:
    ends_s = time.monotonic() + START_S_MAX
    while True:
        try:
            kvstore.connect(f"{url}?data=grpc", deadline_s=5.0).close()
            return
        except Unavailable:
            if process.poll() is not None or time.monotonic() > ends_s:
                raise
            time.sleep(0.05)


def namespace(client: kvstore.Client, layout: Layout, name: str) -> NamespaceHandle:
    """A namespace of the benchmark's own."""
    return client.open_namespace(Namespace(f"bench-{name}", "1", layout))


def chain(ns: NamespaceHandle, blocks: int, seed: int) -> list[BlockPut]:
    """A prompt's blocks; random bytes, one buffer for all sections of a block."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 17, blocks * ns.layout.block_tokens, dtype=np.uint32)
    data = rng.integers(0, 256, ns.layout.block_bytes, dtype=np.uint8)
    ends = np.cumsum(ns.layout.section_bytes).tolist()
    starts = [0, *ends[:-1]]
    parent, out = ns.id, []
    for i, key in enumerate(ns.block_keys(tokens)):
        own = np.roll(data, i)
        sections: Sequence[np.ndarray] = [own[a:b] for a, b in zip(starts, ends, strict=True)]
        out.append(BlockPut(key, parent, sections))
        parent = key
    return out
