"""The narrow door to the disk: every file operation of the SSD tier goes through a `FileSystem`.

A simulated disk can therefore stand behind it, record each operation, lose what was not synced and
fail at will (`kvstore.testing.disk`). Errors are plain `OSError`s here; `disk_error` turns one into
the error that callers see.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from kvstore.errors import DiskError, StoreLocked
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.ssd.aio import Done, QueuePool, Transfer

_T = TypeVar("_T")
_IOVECS_MAX = 512
_BESIDE_WORKERS = 2
_AGAIN = (errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP)
"""What an asynchronous read may answer where a plain one would do."""
_ADVICE = {
    errno.ENOSPC: "free some space on this file system, or lower ssd.budget_bytes",
    errno.EDQUOT: "raise the disk quota, or lower ssd.budget_bytes",
    errno.EROFS: "remount the file system read-write, or choose another directory",
    errno.EACCES: "give this user write access, or choose another directory",
    errno.EPERM: "give this user write access, or choose another directory",
    errno.EIO: "the disk failed; look at the kernel log, and replace it if this repeats",
    errno.ENOENT: "where a store was, a file of it is gone: restart it to check what is left; else "
    "no directory can be made there: choose another",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "free some memory or raise the process's limit of it (ulimit -v), or lower "
    "dram.budget_bytes or ssd.index_map_bytes_max",
    errno.ENOTDIR: "a file stands where a directory should; choose a directory",
    errno.EEXIST: "a file stands where a directory should; choose a directory",
}


def disk_error(doing: str, path: Path, error: OSError) -> DiskError:
    """What a caller is told: what was tried, on which path, errno, and what to do about it."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    advice = _ADVICE.get(error.errno or 0, "look at the kernel log")
    return DiskError(f"{doing} {path} failed: {error.strerror or error} ({name}); {advice}")


def attempt(doing: str, path: Path, action: Callable[[], _T]) -> _T:
    """`action()`, its `OSError` raised as `disk_error`."""
    try:
        return action()
    except OSError as e:
        raise disk_error(doing, path, e) from e


def aligned_buffer(length: int) -> memoryview:
    """Zeroed memory at a 4 KiB-aligned address, `length` rounded up to pages."""
    return memoryview(mmap.mmap(-1, max(1, -(-length // PAGE_BYTES)) * PAGE_BYTES))


class FileSystem(Protocol):
    """What the SSD tier needs of a disk. Handles are ints; every method may raise `OSError`."""

    def lock(self, path: Path) -> int:
        """An exclusive lock held until `close` of the handle; `StoreLocked` naming the pid of
        whoever has it."""
        ...

    def direct_works(self, directory: Path) -> bool:
        """Whether files in `directory` can be opened past the page cache."""
        ...

    def exists(self, path: Path) -> bool: ...

    def listdir(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a directory, with its parents, for the owner only; fine if it is there."""
        ...

    def open(self, path: Path, create: bool = False, direct: bool = False) -> int:
        """Read-write handle of a file, for the owner only where it is created. `direct`: offsets,
        lengths and addresses are multiples of 4 KiB."""
        ...

    def close(self, handle: int) -> None: ...

    def size(self, handle: int) -> int: ...

    def pwrite(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all buffers one behind the other, or raise."""
        ...

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers one after the other; the bytes read, fewer only at the file's end."""
        ...

    def preadv_many(self, reads: Sequence[Transfer], depth: int, done: Done) -> None:
        """Execute reads as `preadv` does, up to `depth` at a time and in any order. `done` is told
        of each on this thread, while others may still be under way. Raises what `done` raises,
        when nothing is under way any more."""
        ...

    def beside(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Begin `work` on another thread; the returned function waits for it and gives its result
        or raises its exception."""
        ...

    def fdatasync(self, handle: int) -> None:
        """Make the file's bytes and length durable; its name is `fsync_dir`'s."""
        ...

    def truncate(self, handle: int, length: int) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None:
        """Delete a directory with its files (no directories inside)."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def disk_bytes(self, path: Path, deep: bool = True) -> int:
        """Real bytes of a file, or of a directory and, if `deep`, all in it (`st_blocks`)."""
        ...

    def free_bytes(self, path: Path) -> int:
        """What an unprivileged user may still write on this file system."""
        ...


class OsFileSystem:
    """The kernel's."""

    def __init__(self) -> None:
        self._queues = QueuePool()
        self._beside = ThreadPoolExecutor(_BESIDE_WORKERS, thread_name_prefix="kvstore-log")

    def lock(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StoreLocked(
                f"{path.parent} is in use by process {holder}; stop it, or choose another directory"
            ) from None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def direct_works(self, directory: Path) -> bool:
        path = directory / "direct.tmp"
        page = aligned_buffer(PAGE_BYTES)
        try:
            fd = self.open(path, create=True, direct=True)
        except OSError as e:
            if e.errno == errno.EINVAL:
                path.unlink(missing_ok=True)
                return False
            raise
        try:
            self.pwrite(fd, [page], 0)
            return self.preadv(fd, [page], 0) == PAGE_BYTES
        except OSError as e:
            if e.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def listdir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: Path, create: bool = False, direct: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def pwrite(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        todo = list(buffers)
        while todo:
            n = os.pwritev(handle, todo[:_IOVECS_MAX], offset)
            if n == 0:
                raise OSError(errno.EIO, "the kernel wrote nothing")
            offset += n
            todo = _rest(todo, n)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        todo, total = list(buffers), 0
        while todo:
            n = os.preadv(handle, todo[:_IOVECS_MAX], offset + total)
            if n == 0:
                break
            total += n
            todo = _rest(todo, n)
            if todo and n % PAGE_BYTES:
                break
        return total

    def preadv_many(self, reads: Sequence[Transfer], depth: int, done: Done) -> None:
        def finish(position: int, result: int | OSError) -> None:
            if isinstance(result, OSError):
                again = result.errno in _AGAIN
            else:
                again = result < reads[position].length
            done(position, try_preadv(self, reads[position]) if again else result)

        if len(reads) < 2 or depth < 2 or not self._queues.read(reads, depth, finish):
            one_by_one(self, reads, done)

    def beside(self, work: Callable[[], _T]) -> Callable[[], _T]:
        return self._beside.submit(work).result

    def fdatasync(self, handle: int) -> None:
        os.fdatasync(handle)

    def truncate(self, handle: int, length: int) -> None:
        os.ftruncate(handle, length)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        for name in os.listdir(path):
            (path / name).unlink()
        path.rmdir()

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def disk_bytes(self, path: Path, deep: bool = True) -> int:
        total = path.lstat().st_blocks * 512
        if deep and path.is_dir():
            for entry in os.scandir(path):
                # A file may go between the listing and the look at it; then it takes nothing.
                with contextlib.suppress(FileNotFoundError):
                    total += self.disk_bytes(Path(entry.path))
        return total

    def free_bytes(self, path: Path) -> int:
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize


def try_preadv(files: FileSystem, read: Transfer) -> int | OSError:
    """`preadv`, its error returned."""
    try:
        return files.preadv(read.handle, read.buffers, read.offset)
    except OSError as e:
        return e


def one_by_one(files: FileSystem, reads: Sequence[Transfer], done: Done) -> None:
    """`FileSystem.preadv_many` without a queue."""
    for position, read in enumerate(reads):
        done(position, try_preadv(files, read))


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def read_file(files: FileSystem, path: Path) -> bytes:
    """A whole small file."""
    handle = files.open(path)
    try:
        buffer = aligned_buffer(files.size(handle))
        return bytes(buffer[: files.preadv(handle, [buffer], 0)])
    finally:
        files.close(handle)


def write_file(files: FileSystem, path: Path, data: bytes) -> None:
    """Replace a small file: after a crash the old or the new content is there, whole, and once
    this returns the new one."""
    new = path.with_name(path.name + ".tmp")
    handle = files.open(new, create=True)
    try:
        files.truncate(handle, 0)
        files.pwrite(handle, [memoryview(data)], 0)
        files.fdatasync(handle)
    finally:
        files.close(handle)
    files.rename(new, path)
    files.fsync_dir(path.parent)
