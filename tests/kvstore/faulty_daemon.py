"""A daemon over real files whose disk fails on order: `faulty_daemon.py CONTROL LISTEN DIR [K=V…]`.

CONTROL is a JSON file that is read at every operation on a segment and at every commit of the
index: {operation: seconds to wait, or the name of an errno}. Operations: preadv, pwrite, fdatasync,
commit.
"""

import asyncio
import errno
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvstore.config import DaemonConfig, build_config
from kvstore.server import daemon
from kvstore.store import Engine
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.aio import Transfer
from kvstore.tiers.ssd.files import Done, OsFileSystem, one_by_one
from kvstore.tiers.ssd.index import IndexChange, LmdbIndex

CONTROL = Path()


def maybe_fail(what: str) -> None:
    """Do what the control file says."""
    order = json.loads(CONTROL.read_text()).get(what)
    if isinstance(order, str):
        code = getattr(errno, order)
        raise OSError(code, os.strerror(code))
    if order:
        time.sleep(order)


class FaultyFiles(OsFileSystem):
    """The kernel's files; those of segments fail on order."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: set[int] = set()

    def open(self, path: Path, create: bool = False, direct: bool = False) -> int:
        handle = super().open(path, create, direct)
        if path.suffix == ".seg":
            self._segments.add(handle)
        return handle

    def close(self, handle: int) -> None:
        self._segments.discard(handle)
        super().close(handle)

    def _fault(self, what: str, handle: int) -> None:
        if handle in self._segments:
            maybe_fail(what)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fault("preadv", handle)
        return super().preadv(handle, buffers, offset)

    def preadv_many(self, reads: Sequence[Transfer], depth: int, done: Done) -> None:
        one_by_one(self, reads, done)

    def pwrite(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._fault("pwrite", handle)
        super().pwrite(handle, buffers, offset)

    def fdatasync(self, handle: int) -> None:
        self._fault("fdatasync", handle)
        super().fdatasync(handle)


class FaultyIndex(LmdbIndex):
    """LMDB, its commits failing on order."""

    def commit(self, change: IndexChange) -> list[bytes]:
        maybe_fail("commit")
        return super().commit(change)


def main(listen: str, directory: str, settings: Sequence[str]) -> None:
    given = {"dir": directory, "server.listen": listen}
    config = build_config(DaemonConfig, given | dict(s.split("=", 1) for s in settings))
    open_log = partial(SsdTier.open, files=FaultyFiles(), open_index=FaultyIndex)
    Engine.open = partial(Engine.open, open_log=open_log)  # type: ignore[method-assign]
    logging.basicConfig(level="INFO")
    asyncio.run(daemon.serve(config))


if __name__ == "__main__":
    CONTROL = Path(sys.argv[1])
    main(sys.argv[2], sys.argv[3], sys.argv[4:])
