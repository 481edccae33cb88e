"""The store's directory: who has it, what format it is in, and the tenants' secret.

```
LOCK            held with flock by the one process that has the store open; holds its pid
FORMAT          version and store id
tenant.secret   32 random bytes, for the owner only
index.lmdb/     the index
segments/       the log
aside/          what was found damaged or foreign; never read, never deleted
```
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore.errors import StoreFormatError
from kvstore.tiers.ssd.files import FileSystem, read_file, write_file
from kvstore.tiers.ssd.segments import FoundSegment, find_segments

STORE_FORMAT = "ds41-kvstore-ssd"
STORE_VERSION = 1
STORE_ID_BYTES = 16
SECRET_BYTES = 32
_SECRET_WORDS = "ds41-kvstore tenant secret 1"
_FILES = ("LOCK", "FORMAT", "tenant.secret")
_FOLDERS = ("index.lmdb", "index.lmdb.new", "segments", "aside")
_ALLOWED = {*_FILES, *(f + ".tmp" for f in _FILES), *_FOLDERS, "direct.tmp", "lost+found"}


@dataclass(slots=True)
class Directory:
    """An opened, locked directory. `segments`: as found, damaged headers included."""

    path: Path
    lock: int
    store_id: bytes
    tenant_secret: bytes
    segments: list[FoundSegment]
    notes: list[str] = field(default_factory=list)

    @property
    def segments_path(self) -> Path:
        return self.path / "segments"

    @property
    def index_path(self) -> Path:
        return self.path / "index.lmdb"

    def set_aside(self, files: FileSystem, path: Path, why: str) -> None:
        """Move a file or folder into `aside/` under a name that is free, and note why."""
        aside = self.path / "aside"
        files.mkdir(aside)
        n = 1
        while files.exists(target := aside / f"{path.name}.{n}"):
            n += 1
        files.rename(path, target)
        files.fsync_dir(path.parent)
        files.fsync_dir(aside)
        self.notes.append(f"{path} was set aside as {target}: {why}")


def open_directory(files: FileSystem, path: Path, created_wall_s: float) -> Directory:
    """Make or open the directory and take its lock.

    A missing or damaged FORMAT is written anew from what the segments say. Raises `StoreLocked`,
    `StoreFormatError` (unknown version; a directory that is no store and not empty; nothing left
    that says which store it is; damaged secret) and `OSError`.
    """
    missing = [p for p in (path, *path.parents) if not files.exists(p)]
    files.mkdir(path)
    for made in missing:
        files.fsync_dir(made.parent)
    _check_foreign(files, path)
    lock = files.lock(path / "LOCK")
    try:
        directory = Directory(path, lock, b"", b"", [])
        files.mkdir(directory.segments_path)
        directory.segments = find_segments(files, directory.segments_path)
        directory.store_id = _store_id(files, directory, created_wall_s)
        directory.tenant_secret = _tenant_secret(files, directory)
        files.fsync_dir(path)
    except BaseException:
        files.close(lock)
        raise
    return directory


def _check_foreign(files: FileSystem, path: Path) -> None:
    if files.exists(path / "FORMAT"):
        return
    foreign = [name for name in files.listdir(path) if name not in _ALLOWED]
    if foreign:
        raise StoreFormatError(
            f"{path} is no store and not empty (it holds {foreign[0]!r}); choose an empty directory"
        )


def _store_id(files: FileSystem, directory: Directory, created_wall_s: float) -> bytes:
    path = directory.path / "FORMAT"
    there = files.exists(path)
    store_id = _decode_format(path, read_file(files, path)) if there else None
    if store_id is not None:
        return store_id
    if there:
        directory.set_aside(files, path, "it is damaged; it is written anew")
    known = {s.store_id for s in directory.segments if s.header}
    if directory.segments and len(known) != 1:
        raise StoreFormatError(
            f"{path} is lost and the segments name {len(known)} stores; restore FORMAT from a "
            "backup, or move the directory away to start an empty store"
        )
    store_id = known.pop() if known else os.urandom(STORE_ID_BYTES)
    write_file(files, path, _encode_format(store_id, created_wall_s))
    return store_id


def _encode_format(store_id: bytes, created_wall_s: float) -> bytes:
    text = json.dumps(
        {
            "created_wall_s": created_wall_s,
            "format": STORE_FORMAT,
            "store_id": store_id.hex(),
            "version": STORE_VERSION,
        },
        sort_keys=True,
    )
    return f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n".encode()


def _decode_format(path: Path, data: bytes) -> bytes | None:
    """The store id; None where the file is damaged."""
    text, _, check = data.partition(b"\n")
    if check != f"{xxhash.xxh3_128_hexdigest(text)}\n".encode():
        return None
    said = json.loads(text)
    if said.get("format") != STORE_FORMAT or said.get("version") != STORE_VERSION:
        raise StoreFormatError(
            f"{path} says {said.get('format')!r} version {said.get('version')!r}, this program "
            f"knows {STORE_FORMAT!r} version {STORE_VERSION}: open it with the release that wrote "
            "it, or choose another directory"
        )
    return bytes.fromhex(said["store_id"])


def _tenant_secret(files: FileSystem, directory: Directory) -> bytes:
    path = directory.path / "tenant.secret"
    if not files.exists(path):
        if directory.segments:
            directory.notes.append(
                f"{path} was missing; with the new one, blocks of tenants are no longer found"
            )
        secret = os.urandom(SECRET_BYTES)
        write_file(files, path, _sealed(secret.hex()).encode())
        return secret
    text = read_file(files, path).decode("ascii", errors="replace")
    secret_hex = text[len(_SECRET_WORDS) + 1 :].partition(" ")[0]
    if text != _sealed(secret_hex):
        raise StoreFormatError(
            f"{path} is damaged; restore it from a backup, or move it away: then a new secret is "
            "made, and blocks of tenants are no longer found"
        )
    return bytes.fromhex(secret_hex)


def _sealed(secret_hex: str) -> str:
    body = f"{_SECRET_WORDS} {secret_hex}"
    return f"{body} {xxhash.xxh3_128_hexdigest(body.encode())}\n"
