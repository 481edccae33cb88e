"""LMCache over TCP: its server (`python -m lmcache.v1.server`, memory alone) and its own connector.

No GPU is needed, but what `pip install lmcache` brings along is for one. An environment without:
a `torch` for the CPU, `pip install --no-deps lmcache==0.5.6`, and of its requirements all but
those of CUDA (cuda-python, cufile-python, cupy-cuda13x). LMCACHE_PYTHON names its interpreter.

Every get goes to the server and into memory of the connector's local backend; nothing is verified.
LMCache's other server (`lmcache server`) moves batches between KV tensors of an engine, on the CPU
by shared memory; there is nothing like one object at a time in it, and it is not measured here."""

import asyncio
import os
import socket
import subprocess
import sys
import time

os.environ["LMCACHE_DISABLE_BANNER"] = "1"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import numpy as np
import timing
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

START_S_MAX = 60.0
LOCAL_GB = 0.25


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    ends_s = time.monotonic() + START_S_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.2)


class Peer:
    """One client of the server."""

    def __init__(self, port: int) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256, local_cpu=False, max_local_cpu_size=LOCAL_GB, save_unfull_chunk=True
        )
        metadata = LMCacheMetadata(
            "peer", 1, 1, 0, 0, torch.uint8, (1, 1, 256, 1, 4096), use_mla=True
        )
        self._loop = asyncio.new_event_loop()
        self._local = LocalCPUBackend(config, metadata, "cpu")
        self._server = LMCServerConnector("127.0.0.1", port, self._loop, self._local)
        self._last = None

    def _key(self, name: str) -> CacheEngineKey:
        size, number = name.split("-")
        return CacheEngineKey("peer", 1, 0, int(size) << 32 | int(number), torch.uint8)

    def put(self, name: str, value: bytes) -> None:
        shape = torch.Size((1, 1, 1, len(value)))
        held = self._local.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD)
        np.frombuffer(held.byte_array, np.uint8)[:] = np.frombuffer(value, np.uint8)
        self._loop.run_until_complete(self._server.put(self._key(name), held))
        held.ref_count_down()

    def get(self, name: str) -> memoryview:
        """The bytes, valid until the next one."""
        if self._last is not None:
            self._last.ref_count_down()
        self._last = self._loop.run_until_complete(self._server.get(self._key(name)))
        return np.frombuffer(self._last.byte_array, np.uint8).data


def main() -> None:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port)
        peer = Peer(port)
        timing.tell(timing.rows("lmcache tcp", peer.put, peer.get))
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    sys.exit(main())
