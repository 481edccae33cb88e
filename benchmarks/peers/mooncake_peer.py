"""Mooncake Store over TCP: a master, a process that lends its memory, and this one that reads.

Needs `mooncake-transfer-engine-non-cuda`. MC_STORE_MEMCPY=0 keeps the library from taking a
shortcut that only exists where reader and memory are one process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

os.environ["MC_STORE_MEMCPY"] = "0"

import timing
from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 512 << 20
BUFFER_BYTES = 128 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connect(master: str, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup(
        f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master
    )
    if code:
        raise RuntimeError(f"Mooncake's setup failed with {code}")
    return store


def lend(master: str) -> None:
    """Be the memory until killed."""
    store = connect(master, SEGMENT_BYTES)
    print("ready", flush=True)
    while store:
        time.sleep(60)


def main() -> None:
    master = f"127.0.0.1:{free_port()}"
    binary = Path(sys.executable).with_name("mooncake_master")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen(
            [binary, f"--rpc_port={master.split(':')[1]}", "--metrics_port=0"], **quiet
        )
    ]
    try:
        time.sleep(3)
        lender = subprocess.Popen(
            [sys.executable, __file__, master], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        processes.append(lender)
        for line in lender.stdout:
            if line.strip() == b"ready":
                break
        else:
            raise RuntimeError("the process that lends its memory did not start")
        store = connect(master, 0)
        timing.tell(timing.rows("mooncake tcp", store.put, store.get))
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(lend(sys.argv[1]) if len(sys.argv) > 1 else main())
