"""Index commits that run beside the batches that follow.

Frames that are durable need no index to survive: the next open adopts what lies behind the index's
mark. So a batch that only adds is acknowledged after its own sync. Its commit, two syncs of LMDB's
file, runs while the next batch is appended, for all batches that came meanwhile at once. What takes
something out of the index, or builds on it, waits until nothing is outstanding.
"""

import threading
from collections.abc import Callable
from functools import reduce

from kvstore.errors import DiskError
from kvstore.tiers.ssd.files import FileSystem
from kvstore.tiers.ssd.index import IndexChange

_OUTSTANDING_ENTRIES_MAX = 1024
"""What the next open may have to adopt, and verify, after a crash."""


class Committer:
    """One caller at a time. `commit` makes a change durable and returns the entries it displaced;
    `displaced` is told of them, in calls of the caller's; `lagging`, on any thread, of how many
    entries the index lacks."""

    def __init__(
        self,
        files: FileSystem,
        commit: Callable[[IndexChange], list[bytes]],
        displaced: Callable[[list[bytes]], None],
        lagging: Callable[[int], None],
    ) -> None:
        self._files, self._commit = files, commit
        self._displaced, self._lagging = displaced, lagging
        self._lock = threading.Lock()
        self._outstanding: list[IndexChange] = []
        self._news: list[bytes] = []
        self._running = False
        self._failed = False
        self._wait: Callable[[], None] | None = None

    def _entries(self) -> int:
        return sum(len(change.puts) for change in self._outstanding)

    def later(self, change: IndexChange) -> None:
        """Let a change of puts alone be committed. Raises `DiskError` where an earlier one failed
        and fails again; then nothing of `change` will be committed."""
        if self._failed or self._entries() + len(change.puts) > _OUTSTANDING_ENTRIES_MAX:
            self.now(change)
            return
        assert not change.removes, "a commit that may come late must not be one that removes"
        with self._lock:
            self._outstanding.append(change)
            self._lagging(self._entries())
            if self._running:
                return
            self._running = True
        self._collect()
        self._wait = self._files.beside(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = list(self._outstanding)
                if not batch or self._failed:
                    self._running = False
                    return
            try:
                displaced = self._commit_all(batch)
            except BaseException as e:
                with self._lock:
                    self._failed, self._running = True, False
                if isinstance(e, DiskError):
                    return
                raise
            with self._lock:
                del self._outstanding[: len(batch)]
                self._news += displaced
                self._lagging(self._entries())

    def _collect(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        with self._lock:
            news, self._news = self._news, []
        self._displaced(news)

    def now(self, change: IndexChange | None = None) -> None:
        """Commit everything outstanding and `change`, durable on return. Raises `DiskError`: then
        nothing of `change` holds, and the rest stays outstanding."""
        self._collect()
        changes = [*self._outstanding, *([change] if change else [])]
        if not changes:
            return
        displaced = self._commit_all(changes)
        self._outstanding, self._failed = [], False
        self._lagging(0)
        self._displaced(displaced)

    def _commit_all(self, changes: list[IndexChange]) -> list[bytes]:
        """Commit changes as one. What they displace, entries of theirs that never got into the
        index, because a later one among them took them away again, included."""
        merged = reduce(_merged, changes)
        kept = {value for _, value in merged.puts}
        superseded = {value for change in changes for _, value in change.puts} - kept
        displaced = [value for value in self._commit(merged) if value not in superseded]
        return [*superseded, *displaced]


def _merged(first: IndexChange, then: IndexChange) -> IndexChange:
    """One change that does what these two do one after the other. `first` removes nothing."""
    puts = dict(first.puts)
    for key in then.removes:
        puts.pop(key, None)
    puts.update(then.puts)
    return IndexChange(
        tuple(puts.items()),
        then.removes,
        then.log_end or first.log_end,
        (*first.namespaces, *then.namespaces),
    )
