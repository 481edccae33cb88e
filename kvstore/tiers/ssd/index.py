"""The durable index: key → where its frame lies, in LMDB.

LMDB trusts its file: a damaged page can take the whole process down. So the file is only given to
it once it is known to be sound, either because its digest is the one left by the last clean stop,
or because `check_file`, which looks at all pages without the engine, finds nothing wrong and every
record matches its own check. Anything else is an `IndexBroken`, and the index is rebuilt from the
frames.

One process has the directory (the store's lock), one thread at a time commits, and nobody reads
after `load`: LMDB's own lock file is not needed.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import StoreFormatError
from kvstore.tiers.base import Location, NamespaceRow
from kvstore.tiers.ssd import entry
from kvstore.tiers.ssd.lmdb_pages import UnexpectedPages, check_file, read_records

INDEX_VERSION = 1
_FORMAT_KEY, _LOG_END_KEY = b"format", b"log_end"
_CLEAN_NAME = "clean"
_CHUNK_BYTES = 4 << 20


class IndexBroken(Exception):
    """The index can't be trusted; the message says why."""


@dataclass(frozen=True, slots=True)
class IndexChange:
    """One commit: `removes` first, then `puts` (key, sealed entry); a new end of the log; new or
    completed namespaces. All of it or nothing."""

    puts: Sequence[tuple[bytes, bytes]] = ()
    removes: Sequence[bytes] = ()
    log_end: Location | None = None
    namespaces: Sequence[NamespaceRow] = ()


@dataclass(slots=True)
class IndexContent:
    """All of an index. `rows`: a key and its sealed entry each (`entry.decode_records`).
    `log_end`: behind the last frame that was ever committed."""

    rows: npt.NDArray[np.uint8] = field(
        default_factory=lambda: np.empty((0, entry.RECORD_BYTES), np.uint8)
    )
    log_end: Location = field(default_factory=lambda: Location(0, 0))
    namespaces: list[NamespaceRow] = field(default_factory=list)


class Index(Protocol):
    """What the log needs of its index. Methods raise `OSError`; `load` also `IndexBroken`."""

    def load(self) -> IndexContent:
        """Everything in it."""
        ...

    def commit(self, change: IndexChange) -> list[bytes]:
        """Make a change durable. The entries that it displaced or removed."""
        ...

    def close(self, clean: bool) -> None:
        """Let go of it; `clean`: as after a stop that the next open may rely on."""
        ...


class IndexOpener(Protocol):
    """How an index comes to be.

    `create`: make a new one where none is; otherwise a missing one is `IndexBroken`. `sync` off:
    commits are not durable. Raises `IndexBroken`, `OSError`, and `StoreFormatError` for a version
    that this program does not know.
    """

    def __call__(
        self, path: Path, store_id: bytes, map_bytes: int, sync: bool, create: bool
    ) -> Index: ...


def _digest(path: Path) -> str:
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as f:
        while chunk := f.read(_CHUNK_BYTES):
            state.update(chunk)
            size += len(chunk)
    return f"ds41-kvstore clean stop 1 {size} {state.hexdigest()}\n"


def _os_error(error: lmdb.Error, path: Path) -> OSError:
    code = error.code if 0 < error.code < 4096 else errno.EIO
    if isinstance(error, lmdb.MapFullError):
        code = errno.ENOSPC
    return OSError(code, f"{os.strerror(code)} (LMDB: {error})", str(path))


class LmdbIndex:
    """`Index` in an LMDB environment of three databases: `blocks`, `namespaces` and `meta`."""

    def __init__(
        self, path: Path, store_id: bytes, map_bytes: int, sync: bool, create: bool
    ) -> None:
        self._path = path
        self._store_id = store_id
        self._map_bytes = map_bytes
        self._sync = sync
        self._env: Any = None
        self._checked: npt.NDArray[np.uint8] | None = None
        data = path / "data.mdb"
        new = not data.exists() or data.stat().st_size == 0
        if new and not create:
            raise IndexBroken(f"{data} is missing or empty")
        if not new and not self._stopped_cleanly():
            self._checked = self._verified()
        self._open_env()
        try:
            self._check_format(new)
        except lmdb.Error as e:
            self.close(clean=False)
            raise _os_error(e, path) from e
        except BaseException:
            self.close(clean=False)
            raise

    def _stopped_cleanly(self) -> bool:
        try:
            said = (self._path / _CLEAN_NAME).read_text()
        except (OSError, UnicodeDecodeError):
            return False
        return said == _digest(self._path / "data.mdb")

    def _verified(self) -> npt.NDArray[np.uint8]:
        """The records of a file that nobody vouches for, once all of it is known to be sound."""
        try:
            rows = check_file(
                self._path / "data.mdb", b"blocks", entry.KEY_BYTES, entry.ENTRY_BYTES
            )
        except UnexpectedPages as e:
            raise IndexBroken(f"{self._path} is damaged: {e}") from e
        wrong = entry.first_wrong(rows)
        if wrong is not None:
            key = rows[wrong, : entry.KEY_BYTES].tobytes()
            raise IndexBroken(f"the index record of {key.hex()} is damaged")
        return rows

    def _open_env(self) -> None:
        try:
            self._env = lmdb.open(
                str(self._path),
                map_size=self._map_bytes,
                max_dbs=3,
                lock=False,
                sync=self._sync,
                metasync=self._sync,
                mode=0o600,
                lib_version=0,
            )
            self._blocks = self._env.open_db(b"blocks")
            self._namespaces = self._env.open_db(b"namespaces")
            self._meta = self._env.open_db(b"meta")
        except lmdb.Error as e:
            if self._env is not None:
                self._env.close()
                self._env = None
            raise _os_error(e, self._path) from e

    def _check_format(self, new: bool) -> None:
        body = INDEX_VERSION.to_bytes(4, "little") + self._store_id
        with self._env.begin(db=self._meta) as txn:
            value = txn.get(_FORMAT_KEY)
        if value is None:
            if not new and self._entries():
                raise IndexBroken(f"{self._path} does not say its version")
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(_FORMAT_KEY, entry.seal(_FORMAT_KEY, body))
            return
        try:
            found = entry.unseal(_FORMAT_KEY, value)
        except entry.RecordCorrupt as e:
            raise IndexBroken(str(e)) from e
        version = int.from_bytes(found[:4], "little")
        if version != INDEX_VERSION:
            raise StoreFormatError(
                f"{self._path} has index version {version}, this program knows {INDEX_VERSION}: "
                "open the store with the release that wrote it"
            )
        if found != body:
            raise IndexBroken(f"{self._path} belongs to another store")

    def _entries(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._blocks)["entries"])

    def load(self) -> IndexContent:
        rows, self._checked = self._checked, None
        try:
            if rows is None:
                rows = read_records(
                    self._path / "data.mdb", b"blocks", entry.KEY_BYTES, entry.ENTRY_BYTES
                )
            with self._env.begin() as txn:
                log_end = txn.get(_LOG_END_KEY, db=self._meta)
                sealed = list(txn.cursor(self._namespaces))
        except (lmdb.Error, UnexpectedPages) as e:
            raise IndexBroken(f"{self._path} can't be read: {e}") from e
        try:
            end = Location(0, 0)
            if log_end is not None:
                end = entry.decode_location(_LOG_END_KEY, log_end)
            namespaces = [_decode_namespace(key, value) for key, value in sealed]
        except entry.RecordCorrupt as e:
            raise IndexBroken(str(e)) from e
        return IndexContent(rows, end, namespaces)

    def commit(self, change: IndexChange) -> list[bytes]:
        if self._env is None:
            self._open_env()
        try:
            with self._env.begin(write=True, db=self._blocks) as txn:
                return self._apply(txn, change)
        except lmdb.Error as e:
            # After a failed commit LMDB may refuse the environment; the next commit opens it anew.
            self._env.close()
            self._env = None
            raise _os_error(e, self._path) from e

    def _apply(self, txn: Any, change: IndexChange) -> list[bytes]:
        displaced = [old for key in change.removes if (old := txn.pop(key)) is not None]
        for key, value in change.puts:
            old = txn.replace(key, value)
            if old is not None:
                displaced.append(old)
        for row in change.namespaces:
            key = row.number.to_bytes(4, "big")
            txn.put(key, entry.seal(key, row.namespace_id + row.descriptor), db=self._namespaces)
        if change.log_end is not None:
            value = entry.encode_location(_LOG_END_KEY, change.log_end)
            txn.put(_LOG_END_KEY, value, db=self._meta)
        return displaced

    def close(self, clean: bool) -> None:
        if self._env is None:
            return
        env, self._env = self._env, None
        try:
            if clean:
                env.sync(True)
        except lmdb.Error as e:
            raise _os_error(e, self._path) from e
        finally:
            env.close()
        if not clean:
            return
        # Neither synced nor insisted on: without a digest that matches, the next open verifies.
        with contextlib.suppress(OSError):
            (self._path / _CLEAN_NAME).write_text(_digest(self._path / "data.mdb"))


def _decode_namespace(key: bytes, value: bytes) -> NamespaceRow:
    body = entry.unseal(key, value)
    if len(key) != 4 or len(body) < 32:
        raise entry.RecordCorrupt(f"{value!r} is no namespace")
    return NamespaceRow(int.from_bytes(key, "big"), body[:32], body[32:])
