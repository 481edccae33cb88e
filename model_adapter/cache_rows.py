"""The arrays behind a sequence cache: rows that only grow, a sliding window, open groups.

Each can be cut back by up to `ROLLBACK_TOKENS_MAX` positions, so that drafted tokens which the
model rejects leave nothing behind.
"""

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.errors import CacheError
from model_adapter.records import Records

ROLLBACK_TOKENS_MAX = 64
_ROWS_MIN = 64


class GrowingArray:
    """An array that grows along its first axis; `rows` is a view of what it holds."""

    def __init__(self, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._data = np.empty((0, *row_shape), dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> npt.NDArray:
        """What was appended, in order. The view stays valid, but does not see later growth."""
        return self._data[: self._length]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all, so that appending up to there copies nothing."""
        if rows > len(self._data):
            grown = np.empty((rows, *self._data.shape[1:]), self._data.dtype)
            grown[: self._length] = self.rows
            self._data = grown

    def promise(self, rows: int) -> npt.NDArray:
        """Add rows whose content comes later: the memory for it. Until it has come, nothing may be
        read, and the array must not grow beyond what was reserved."""
        self.reserve(self._length + rows)
        self._length += rows
        return self._data[self._length - rows : self._length]

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return len(self._data)

    def append(self, rows: npt.NDArray) -> None:
        """Add rows behind the last."""
        end = self._length + len(rows)
        if end > len(self._data):
            self.reserve(max(end, _ROWS_MIN, self._length + self._length // 2))
        self._data[self._length : end] = rows
        self._length = end

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` rows."""
        self._length = min(self._length, rows)


class WindowRows:
    """Window KV records of one layer for the positions [first, end), the latest ones at least.

    Positions before `start` were never computed here: a replay begins there, and no query sees
    keys before it.
    """

    def __init__(self, row_bytes: int, window: int) -> None:
        self._keep = window + ROLLBACK_TOKENS_MAX
        self._window = window
        self._data = np.empty((2 * self._keep, row_bytes), np.uint8)
        self._at = 0
        self._count = 0
        self.start = 0
        self.end = 0

    @property
    def first(self) -> int:
        """The first position whose record is still here."""
        return self.end - self._count

    def restart(self, position: int) -> None:
        """Forget everything; the next record is that of `position`."""
        self._at = self._count = 0
        self.start = self.end = position

    def restore(self, start: int, end: int, records: Records) -> None:
        """Hold `records` of the positions before `end`, and nothing else. `start`: as it was."""
        self.restart(end - len(records))
        self.append(records)
        self.start = start

    def latest(self, count: int) -> Records:
        """Records of the last `count` positions, or of as many as there are; a view."""
        count = min(count, self._count)
        stop = self._at + self._count
        return self._data[stop - count : stop]

    def append(self, records: Records) -> None:
        """Records of the positions from `end` on."""
        self.end += len(records)
        records = records[-self._keep :]
        kept = min(self._count, self._keep - len(records))
        if self._at + self._count + len(records) > len(self._data):
            self._data[:kept] = self.latest(kept).copy()
            self._at, self._count = 0, kept
        stop = self._at + self._count
        self._data[stop : stop + len(records)] = records
        self._count += len(records)

    def truncate(self, end: int) -> None:
        """Forget the positions from `end` on.

        Raises `CacheError` where a query at `end` would miss records that slid out already.
        """
        if end >= self.end:
            return
        needed = max(self.start, end - self._window + 1)
        if needed < self.first:
            raise CacheError(
                f"can't go back to position {end}: the window holds {self.first}…{self.end - 1} "
                f"only; at most {ROLLBACK_TOKENS_MAX} tokens can be taken back"
            )
        self._count -= self.end - end
        self.end = end


class OpenGroup:
    """Values and scores, float32 [k, 2·D], of the latest positions of a compressor with ratio > 1.

    Those behind the last complete group are what a checkpoint of the sequence has to carry (ds41f
    §4 pending pair row); the ones before are kept only to be able to go back.
    """

    def __init__(self, ratio: int, channels: int) -> None:
        self._ratio = ratio
        self._rows = torch.empty(0, channels)
        self.end = 0

    def pending(self) -> torch.Tensor:
        """Rows of the incomplete last group: fewer than ratio."""
        count = self.end % self._ratio
        return self._rows[len(self._rows) - count :]

    def restart(self, position: int) -> None:
        """The next row is that of `position`, where a group begins."""
        self._rows = self._rows[:0]
        self.end = position

    def restore(self, end: int, pending: torch.Tensor) -> None:
        """Hold the rows float32 [k, channels] of the positions before `end`, and nothing else."""
        self._rows = pending
        self.end = end

    def complete(self, rows: torch.Tensor) -> torch.Tensor:
        """Add rows; returns the groups that are complete now, [groups, ratio, channels]."""
        behind_last = torch.cat([self.pending(), rows])
        groups = len(behind_last) // self._ratio
        keep = self._ratio - 1 + ROLLBACK_TOKENS_MAX
        self._rows = torch.cat([self._rows[-keep:], rows[-keep:]])[-keep:].clone()
        self.end += len(rows)
        return behind_last[: groups * self._ratio].unflatten(0, (groups, self._ratio))

    def truncate(self, end: int) -> None:
        """Forget the positions from `end` on; raises `CacheError` where too many slid out."""
        cut = self.end - end
        if cut <= 0:
            return
        if len(self._rows) - cut < end % self._ratio:
            raise CacheError(f"can't go back to position {end}: its open group is gone")
        self._rows = self._rows[: len(self._rows) - cut]
        self.end = end
