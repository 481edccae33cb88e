"""A simulated disk: files and index in memory, every operation recorded, crashes and faults made.

`SimDisk` stands behind `kvstore.tiers.ssd` in place of the kernel and of LMDB. Its log of
operations can be cut anywhere, and `crash_state` says what a disk may hold then:

- `fdatasync` makes what was written to a file before it, and its length, durable; `fsync_dir` makes
  the names in a directory durable. Nothing else does.
- Of what is not durable, any part may be lost, in any order: whole writes, single 512-byte sectors
  of a write, truncations, names. A name whose directory was lost is lost.
- A commit of the index is one step that is durable when it returns, and absent before: what LMDB
  promises of its own file, which is taken on trust here (and tested for real elsewhere).
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import basename, dirname
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np

from kvstore.errors import StoreLocked
from kvstore.tiers.base import Location, NamespaceRow
from kvstore.tiers.ssd.aio import Done, Transfer
from kvstore.tiers.ssd.entry import RECORD_BYTES
from kvstore.tiers.ssd.files import one_by_one
from kvstore.tiers.ssd.index import IndexBroken, IndexChange, IndexContent

_T = TypeVar("_T")
SECTOR_BYTES = 512
_BLOCK_BYTES = 4096


@dataclass(slots=True)
class SimIndexState:
    """What an index file holds."""

    store_id: bytes
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    namespaces: dict[int, NamespaceRow] = field(default_factory=dict)
    log_end: Location = Location(0, 0)  # noqa: RUF009 - immutable

    def apply(self, change: IndexChange) -> list[bytes]:
        """One commit; the entries it displaced."""
        displaced = [self.blocks.pop(key) for key in change.removes if key in self.blocks]
        for key, value in change.puts:
            if key in self.blocks:
                displaced.append(self.blocks[key])
            self.blocks[key] = value
        self.namespaces.update((row.number, row) for row in change.namespaces)
        self.log_end = change.log_end or self.log_end
        return displaced


class Op(NamedTuple):
    """One recorded operation. `what`: `mkdir`, `rmdir`, `create`, `write`, `truncate`, `sync`,
    `rename`, `unlink`, `sync_dir` or `commit`. `inode`: the file's, where it has to do
    with one. `path`: of the directory for `sync_dir`, of the name otherwise."""

    what: str
    path: str
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    target: str | None = None
    change: IndexChange | None = None


class DiskState:
    """Directories, names (absolute paths) and contents at one instant."""

    def __init__(self) -> None:
        self.dirs: set[str] = {"/"}
        self.names: dict[str, int] = {}
        self.contents: dict[int, bytearray | SimIndexState] = {}

    def file(self, inode: int) -> bytearray:
        """A file's bytes."""
        content = self.contents[inode]
        assert isinstance(content, bytearray)
        return content

    def apply(self, op: Op, sectors: Sequence[int] | None = None) -> None:
        """Take one operation over; `sectors`: which 512-byte sectors of a write made it."""
        if op.what == "mkdir":
            self.dirs.add(op.path)
        elif op.what == "rmdir":
            self.dirs.discard(op.path)
        elif op.what == "create":
            self.names[op.path] = op.inode
            fresh = bytearray() if op.change is None else SimIndexState(op.data)
            self.contents.setdefault(op.inode, fresh)
        elif op.what == "write":
            self._write(op, sectors)
        elif op.what == "truncate":
            content = self.file(op.inode)
            content[op.offset :] = bytes(max(0, op.offset - len(content)))
        elif op.what == "rename" and op.target is not None:
            self._rename(op.path, op.target)
        elif op.what == "unlink":
            self.names.pop(op.path, None)
        elif op.what == "commit" and op.change is not None:
            index = self.contents[op.inode]
            assert isinstance(index, SimIndexState)
            index.apply(op.change)

    def _write(self, op: Op, sectors: Sequence[int] | None) -> None:
        content = self.file(op.inode)
        if sectors is None:
            sectors, step = (0,), len(op.data)
        else:
            step = SECTOR_BYTES
        for sector in sectors:
            data = op.data[sector * step : (sector + 1) * step]
            at = op.offset + sector * step
            if len(content) < at + len(data):
                content.extend(bytes(at + len(data) - len(content)))
            content[at : at + len(data)] = data

    def _rename(self, source: str, target: str) -> None:
        if source in self.names:
            self.names[target] = self.names.pop(source)
        elif source in self.dirs:
            self.dirs.remove(source)
            self.dirs.add(target)
            for path in [p for p in self.names if dirname(p) == source]:
                self.names[target + path[len(source) :]] = self.names.pop(path)

    def drop_orphans(self) -> None:
        """Forget names and directories whose directory is not there."""
        found: set[str] = {"/"}
        for path in sorted(self.dirs):
            if dirname(path) in found:
                found.add(path)
        self.dirs = found
        self.names = {p: i for p, i in self.names.items() if dirname(p) in found}


def _settled_at(ops: Sequence[Op]) -> list[int]:
    """Per operation: the position of the one that makes it durable; len(ops) where none does."""
    settled = [len(ops)] * len(ops)
    files: dict[int, list[int]] = {}
    folders: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        if op.what in ("write", "truncate"):
            files.setdefault(op.inode, []).append(i)
        elif op.what == "sync":
            for j in files.pop(op.inode, ()):
                settled[j] = i
        elif op.what in ("mkdir", "rmdir", "create", "unlink", "rename"):
            folders.setdefault(dirname(op.target or op.path), []).append(i)
        elif op.what == "sync_dir":
            for j in folders.pop(op.path, ()):
                settled[j] = i
        elif op.what == "commit":
            settled[i] = i
    return settled


class History:
    """A recorded log, ready to be cut anywhere. `base`: what the disk held before the first
    operation, all of it durable."""

    def __init__(self, ops: Sequence[Op], base: DiskState | None = None) -> None:
        self.ops = list(ops)
        self._base = base or DiskState()
        self._settled = _settled_at(self.ops)

    def unsettled(self, cut: int) -> list[int]:
        """Operations among the first `cut` that a power loss may still take."""
        return [
            i
            for i, op in enumerate(self.ops[:cut])
            if self._settled[i] >= cut and op.what not in ("sync", "sync_dir")
        ]

    def state(self, cut: int, lost: Mapping[int, Sequence[int] | None] | None = None) -> DiskState:
        """What the disk holds after the first `cut` operations. `lost`: per operation that did not
        make it whole, the sectors that did, or None for nothing at all."""
        lost = lost or {}
        state = deepcopy(self._base)
        for i, op in enumerate(self.ops[:cut]):
            if i not in lost:
                state.apply(op)
                continue
            if op.what == "create":
                # Its content has no name to be found under, unless a rename gives it one.
                state.apply(op)
                del state.names[op.path]
            sectors = lost[i]
            if sectors is not None:
                state.apply(op, sectors)
        state.drop_orphans()
        return state

    def torn(self, cut: int, random: Random) -> DiskState:
        """One of the states that a power loss after `cut` operations may leave."""
        share = random.random()
        lost: dict[int, Sequence[int] | None] = {}
        for i in self.unsettled(cut):
            op, fate = self.ops[i], random.random()
            if op.what == "write" and fate < 0.5:
                sectors = range(-(-len(op.data) // SECTOR_BYTES))
                lost[i] = [s for s in sectors if random.random() < share]
            elif fate > share:
                lost[i] = None
        return self.state(cut, lost)


def no_fault(what: str, path: Path) -> None:
    """`SimDisk.before` of a disk that works."""


def fail_next(what: str, code: int, times: int = 1, name: str = "") -> Callable[[str, Path], None]:
    """`SimDisk.before` of a disk whose next `times` operations `what`, on files whose name ends
    with `name`, fail with errno `code`."""
    left = times

    def before(op: str, path: Path) -> None:
        nonlocal left
        if op == what and left and path.name.endswith(name):
            left -= 1
            raise OSError(code, os.strerror(code))

    return before


class SimDisk:
    """`FileSystem` and `IndexOpener` (its method `open_index`) over a `DiskState`.

    `log` records what changes the disk. `before(what, path)` is called ahead of every operation,
    reads included, and may raise `OSError` or block: that is how faults and slow disks are made.
    `capacity_bytes`: size of the disk; beyond it writes fail with ENOSPC. `tear_next`: so many
    bytes of the next write are written, and then it fails with EIO. `late`: what is to run beside
    the log runs when its result is asked for, the last moment there is; otherwise at once.
    """

    def __init__(self, state: DiskState | None = None, capacity_bytes: int = 1 << 40) -> None:
        self.state = state or DiskState()
        self.capacity_bytes = capacity_bytes
        self.tear_next: int | None = None
        self.late = False
        self.log: list[Op] = []
        self.before: Callable[[str, Path], None] = no_fault
        self._next = 1 + max(self.state.contents, default=0)
        self._handles: dict[int, tuple[int, Path]] = {}
        self._locked: dict[int, Path] = {}

    def _do(self, op: Op) -> None:
        self.log.append(op)
        self.state.apply(op)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def lock(self, path: Path) -> int:
        if path in self._locked.values():
            raise StoreLocked(f"{path.parent} is in use")
        handle = self.open(path, create=True)
        self._locked[handle] = path
        return handle

    def direct_works(self, directory: Path) -> bool:
        return False

    def exists(self, path: Path) -> bool:
        return str(path) in self.state.names or str(path) in self.state.dirs

    def listdir(self, path: Path) -> list[str]:
        self.before("listdir", path)
        folder = str(path)
        entries = (*self.state.names, *self.state.dirs)
        return sorted(basename(p) for p in entries if dirname(p) == folder and p != "/")

    def mkdir(self, path: Path) -> None:
        for each in (*reversed(path.parents), path):
            if str(each) not in self.state.dirs:
                self.before("mkdir", each)
                self._do(Op("mkdir", str(each)))

    def open(self, path: Path, create: bool = False, direct: bool = False) -> int:
        self.before("open", path)
        name = str(path)
        if name not in self.state.names:
            if not create or dirname(name) not in self.state.dirs:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
            self._do(Op("create", name, self._number()))
        handle = self._number()
        self._handles[handle] = (self.state.names[name], path)
        return handle

    def close(self, handle: int) -> None:
        del self._handles[handle]
        self._locked.pop(handle, None)

    def abandon(self) -> None:
        """The process that had files open and locked here is gone."""
        self._handles.clear()
        self._locked.clear()

    def _file(self, what: str, handle: int) -> tuple[int, Path, bytearray]:
        inode, path = self._handles[handle]
        self.before(what, path)
        return inode, path, self.state.file(inode)

    def size(self, handle: int) -> int:
        return len(self._file("size", handle)[2])

    def pwrite(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        inode, path, content = self._file("pwrite", handle)
        data = b"".join(buffers)
        if self.tear_next is not None:
            part, self.tear_next = data[: self.tear_next], None
            self._do(Op("write", str(path), inode, offset, part))
            raise OSError(errno.EIO, "Input/output error")
        if offset + len(data) - len(content) > self.free_bytes(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        self._do(Op("write", str(path), inode, offset, data))

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        content = self._file("preadv", handle)[2]
        total = 0
        for buffer in buffers:
            data = content[offset + total : offset + total + len(buffer)]
            buffer[: len(data)] = data
            total += len(data)
        return total

    def preadv_many(self, reads: Sequence[Transfer], depth: int, done: Done) -> None:
        one_by_one(self, reads, done)

    def beside(self, work: Callable[[], _T]) -> Callable[[], _T]:
        if self.late:
            return work
        future: Future[_T] = Future()
        try:
            future.set_result(work())
        except Exception as e:
            future.set_exception(e)
        return future.result

    def fdatasync(self, handle: int) -> None:
        inode, path, _ = self._file("fdatasync", handle)
        self._do(Op("sync", str(path), inode))

    def truncate(self, handle: int, length: int) -> None:
        inode, path, content = self._file("truncate", handle)
        if length != len(content):
            self._do(Op("truncate", str(path), inode, length))

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source)
        self._do(Op("rename", str(source), target=str(target)))

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        self._do(Op("unlink", str(path)))

    def remove_tree(self, path: Path) -> None:
        for name in self.listdir(path):
            self.unlink(path / name)
        self._do(Op("rmdir", str(path)))

    def fsync_dir(self, path: Path) -> None:
        self.before("fsync_dir", path)
        self._do(Op("sync_dir", str(path)))

    def disk_bytes(self, path: Path, deep: bool = True) -> int:
        self.before("disk_bytes", path)
        total = self._real_bytes(str(path))
        if deep:
            inside = f"{path}/"
            total += sum(self._real_bytes(p) for p in self.state.names if p.startswith(inside))
        return total

    def _real_bytes(self, path: str) -> int:
        content = self.state.contents.get(self.state.names.get(path, 0))
        if isinstance(content, SimIndexState):
            return _BLOCK_BYTES * (8 + len(content.blocks) // 16)
        return -(-len(content or b"") // _BLOCK_BYTES) * _BLOCK_BYTES

    def free_bytes(self, path: Path) -> int:
        self.before("free_bytes", path)
        return self.capacity_bytes - sum(self._real_bytes(p) for p in self.state.names)

    def open_index(
        self, path: Path, store_id: bytes, map_bytes: int, sync: bool, create: bool
    ) -> "SimIndex":
        """`IndexOpener` over the same state and log."""
        name = path / "data.mdb"
        self.before("open_index", name)
        if str(name) not in self.state.names:
            if not create:
                raise IndexBroken(f"{name} is missing or empty")
            new = Op("create", str(name), self._number(), data=store_id, change=IndexChange())
            self._do(new)
        inode = self.state.names[str(name)]
        index = self.state.contents[inode]
        if not isinstance(index, SimIndexState) or index.store_id != store_id:
            raise IndexBroken(f"{name} belongs to another store")
        return SimIndex(self, name, inode, index)


class SimIndex:
    """`Index` in memory."""

    def __init__(self, disk: SimDisk, path: Path, inode: int, index: SimIndexState) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._index = index

    def load(self) -> IndexContent:
        """Everything in it."""
        index = self._index
        packed = b"".join(key + value for key, value in index.blocks.items())
        rows = np.frombuffer(packed, np.uint8).reshape(-1, RECORD_BYTES)
        return IndexContent(rows, index.log_end, list(index.namespaces.values()))

    def commit(self, change: IndexChange) -> list[bytes]:
        """One step, recorded; atomic and durable."""
        self._disk.before("commit", self._path)
        change = IndexChange(
            tuple(change.puts), tuple(change.removes), change.log_end, tuple(change.namespaces)
        )
        self._disk.log.append(Op("commit", str(self._path), self._inode, change=change))
        return self._index.apply(change)

    def close(self, clean: bool) -> None:
        """Nothing is kept outside the state."""
