"""Daemons as processes, stores of three kinds behind one face, and small blocks for both."""

import asyncio
import inspect
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import BlockPut, Layout, Namespace, NamespaceHandle, SectionSpec
from kvstore.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 30.0
SMALL = Layout(
    (
        SectionSpec(0, "main", 2, 8),
        SectionSpec(0, "index", 2, 4),
        SectionSpec(1, "main", 4, 16),
    ),
    block_tokens=16,
)
"""Sections of 64, 32 and 64 bytes."""
STORE_SETTINGS = {
    "dram.budget_bytes": "16MiB",
    "ssd.budget_bytes": "64MiB",
    "ssd.segment_bytes": "4MiB",
    "ssd.free_floor_bytes": 0,
    "ssd.lifetime_min_s": 0,
}
_serial = itertools.count()


def fresh_namespace(layout: Layout = SMALL, **more: Any) -> Namespace:
    """One that no other test of this process uses."""
    return Namespace(
        model=f"model-{os.getpid()}-{next(_serial)}", weight_revision="r", layout=layout, **more
    )


def chain(ns: NamespaceHandle, blocks: int, seed: int = 0) -> list[BlockPut]:
    """A prompt's blocks with random bytes."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 17, blocks * ns.layout.block_tokens, dtype=np.uint32)
    parent, out = ns.id, []
    for key in ns.block_keys(tokens):
        sections = [rng.bytes(n) for n in ns.layout.section_bytes]
        out.append(BlockPut(key, parent, sections))
        parent = key
    return out


def keys_of(blocks: list[BlockPut]) -> list[bytes]:
    return [block.key for block in blocks]


def until(true: Callable[[], Any], wait_s: float = 60.0) -> None:
    """Wait until something is true. Raises `AssertionError` after `wait_s`."""
    ends_s = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < ends_s, f"it did not come true within {wait_s:g} s"
        time.sleep(0.02)


class Daemon:
    """`kvstore serve` as a process of its own; a context manager, which starts and kills it."""

    def __init__(self, listen: str, directory: Path | None, settings: dict[str, Any]) -> None:
        self.url = listen.replace("tcp://", "dns:///")
        self._command = [sys.executable, "-m", "kvstore", "serve", "--listen", listen]
        if directory is not None:
            self._command += ["--dir", str(directory)]
        for key, value in settings.items():
            self._command += ["--set", f"{key}={value}"]
        self.log = b""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Daemon":
        assert self.process is None
        self.process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                kvstore.connect(self.url, deadline_s=5.0).close()
                return self
            except Unavailable:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(self.log.decode()) from None
                time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Exit code, once the process has ended; its log is in `log` then."""
        assert self.process is not None
        self.log += self.process.communicate(timeout=START_S_MAX)[1]
        code = self.process.returncode
        self.process = None
        return code

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.wait()

    def __enter__(self) -> "Daemon":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Door:
    """A client and the way to call it: directly, or on an event loop of its own."""

    def __init__(self, url: str, asynchronous: bool, **settings: Any) -> None:
        self.url = url
        self._loop = asyncio.new_event_loop() if asynchronous else None
        connect: Any = kvstore.connect_async if asynchronous else kvstore.connect
        self.client: Any = self.do(connect(url, deadline_s=20.0, **settings))

    def do(self, result: Any) -> Any:
        """The result of a call, whichever kind the client is of."""
        if inspect.isawaitable(result):
            assert self._loop is not None

            async def wait() -> Any:
                return await result

            return self._loop.run_until_complete(wait())
        return result

    def open(self, layout: Layout = SMALL) -> NamespaceHandle:
        handle: NamespaceHandle = self.do(self.client.open_namespace(fresh_namespace(layout)))
        return handle

    def fails(self, call: Any) -> Exception:
        """The error that a call raises."""
        try:
            result = self.do(call())
        except Exception as e:
            return e
        raise AssertionError(f"no error, but {result!r}")

    def close(self) -> None:
        self.do(self.client.close())
        if self._loop is not None:
            self._loop.close()
