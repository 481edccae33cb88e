"""The tensors behind a sequence cache: rows that only grow, a sliding window, open groups.

Each can be cut back by up to `ROLLBACK_TOKENS_MAX` positions, so that drafted tokens which the
model rejects leave nothing behind.
"""

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.devices import CPU
from model_adapter.errors import CacheError
from model_adapter.records import Records, fill

ROLLBACK_TOKENS_MAX = 64
_ROWS_MIN = 64


class GrowingTensor:
    """A tensor that grows along its first axis; `rows` is a view of what it holds."""

    def __init__(
        self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        self._data = _memory((0, *row_shape), dtype, device)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> torch.Tensor:
        """What was appended, in order. The view stays valid, but does not see later growth."""
        return self._data[: self._length]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all, so that appending up to there copies nothing."""
        if rows > len(self._data):
            grown = _memory((rows, *self._data.shape[1:]), self._data.dtype, self._data.device)
            grown[: self._length].copy_(self.rows)
            self._data = grown

    def promise(self, rows: int) -> torch.Tensor:
        """Add rows whose content comes later: the memory for it. Until it has come, nothing may be
        read, and the tensor must not grow beyond what was reserved."""
        self.reserve(self._length + rows)
        self._length += rows
        return self._data[self._length - rows : self._length]

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return len(self._data)

    def append(self, rows: torch.Tensor | npt.NDArray) -> None:
        """Add rows behind the last; see `records.fill`."""
        end = self._length + len(rows)
        if end > len(self._data):
            self.reserve(max(end, _ROWS_MIN, self._length + self._length // 2))
        fill(self._data[self._length : end], rows)
        self._length = end

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` rows."""
        self._length = min(self._length, rows)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that may be written in any of torch's modes: what is made in inference mode may be
    written there only, and a cache is filled from other threads too."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


class WindowRows:
    """Window KV records of one layer for the positions [first, end), the latest ones at least.

    Positions before `start` were never computed here: a replay begins there, and no query sees
    keys before it.
    """

    def __init__(self, row_bytes: int, window: int, device: torch.device = CPU) -> None:
        self._keep = window + ROLLBACK_TOKENS_MAX
        self._window = window
        self._data = _memory((2 * self._keep, row_bytes), torch.uint8, device)
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

    def restore(self, start: int, end: int, records: npt.NDArray[np.uint8]) -> None:
        """Hold `records` of the positions before `end`, and nothing else. `start`: as it was."""
        self.restart(end - len(records))
        self.append(records)
        self.start = start

    def latest(self, count: int) -> Records:
        """Records of the last `count` positions, or of as many as there are; a view."""
        count = min(count, self._count)
        stop = self._at + self._count
        return self._data[stop - count : stop]

    def append(self, records: Records | npt.NDArray[np.uint8]) -> None:
        """Records of the positions from `end` on; see `records.fill`."""
        self.end += len(records)
        records = records[-self._keep :]
        kept = min(self._count, self._keep - len(records))
        if self._at + self._count + len(records) > len(self._data):
            self._data[:kept].copy_(self.latest(kept).clone())
            self._at, self._count = 0, kept
        stop = self._at + self._count
        fill(self._data[stop : stop + len(records)], records)
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

    def __init__(self, ratio: int, channels: int, device: torch.device = CPU) -> None:
        self._ratio = ratio
        self._rows = torch.empty(0, channels, device=device)
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
