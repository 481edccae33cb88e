"""W-TinyLFU (Einziger, Friedman and Manes, 2017): a window, a segmented main space, a sketch.

New rows live in a small LRU window. What falls out of it must have been asked for more often, by a
count-min sketch of recent requests, than the main space's own next victim; the loser goes. The main
space is a segmented LRU: a row used there is protected, up to four fifths of the space.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.eviction.base import ALONE, Chain, Rows, Surroundings
from kvstore.eviction.queues import Queue, QueuePolicy

_PROTECTED_SHARE = 0.8
_DEPTH = 4
_COUNT_MAX = 15
_SAMPLE_PER_NAME = 10
_COUNTERS_PER_NAME = 8
_NAMES_MIN = 1024
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MIX = np.array(_MIXERS, np.uint64)[:, None]
_WORD = (1 << 64) - 1


class _Sketch:
    """How often a name was seen lately, at most 15; all counts halve as the sample fills up."""

    def __init__(self, names: int) -> None:
        names = max(_NAMES_MIN, names)
        bits = (names * _COUNTERS_PER_NAME).bit_length()
        self._bits_off = 64 - bits
        self._shift = np.uint64(self._bits_off)
        self._counts = np.zeros((_DEPTH, 1 << bits), np.uint8)
        self._line_counts = [line.data for line in self._counts]
        self._lines = np.arange(_DEPTH)[:, None]
        self._sample = _SAMPLE_PER_NAME * names
        self._seen = 0

    def _cells(self, names: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # the product alone leaves small names in few places of the upper bits
        mixed = (names ^ (names >> np.uint64(29))) * _MIX
        cells: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(32))) * _MIX[0] >> self._shift
        return cells

    def count(self, names: npt.NDArray[np.uint64]) -> None:
        """See the names once each."""
        cells = self._cells(names)
        now = self._counts[self._lines, cells]
        low = now.min(axis=0)
        self._counts[self._lines, cells] = np.where((now == low) & (now < _COUNT_MAX), now + 1, now)
        self._seen += len(names)
        if self._seen >= self._sample:
            self._counts >>= 1
            self._seen //= 2

    def of(self, name: int) -> int:
        """Estimated count; the cells of `_cells`, in integers: one name is no work for NumPy."""
        mixed, least = name ^ (name >> 29), _COUNT_MAX
        for counts, mix in zip(self._line_counts, _MIXERS, strict=True):
            product = mixed * mix & _WORD
            cell = ((product ^ (product >> 32)) * _MIXERS[0] & _WORD) >> self._bits_off
            least = min(least, counts[cell])
        return least


class WTinyLfu(QueuePolicy):
    """See the module. `window`: the window's share of the room."""

    def __init__(self, surroundings: Surroundings = ALONE, window: float = 0.01) -> None:
        super().__init__(surroundings)
        self._share = window
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._loser: int | None = None
        self._foreseen = False
        self._sketch = _Sketch(surroundings.capacity_rows())

    def foresee(self, chain: Chain, held: int) -> None:
        self._count(chain)
        self._foreseen = True

    def continued(self, chain: Chain, held: int) -> None:
        self.foresee(chain[held:], 0)

    def admits(self, row: int, victim: int) -> bool:
        # the chain of one request may overflow the window by itself
        return len(self._fresh) < self._window_rows() or self._beats(row, victim)

    def touch(self, rows: Chain) -> None:
        self._loser = None
        if not self._foreseen:
            self._count(rows)
        self._foreseen = False
        super().touch(rows)

    def _count(self, rows: Chain) -> None:
        if len(rows):
            self._sketch.count(self.surroundings.identity(np.asarray(rows, np.int64)))

    def _enter(self, row: int) -> None:
        self._window.append(row)
        # where the main space isn't full there is nothing to contend for
        room = self._capacity - self._window_rows()
        while len(self._window) > self._window_rows() and self._main_rows() < room:
            self._probation.append(self._window.pop_oldest())

    def _main_rows(self) -> int:
        return len(self._probation) + len(self._protected)

    def _hit(self, rows: Rows) -> None:
        window, probation, protected = self._window, self._probation, self._protected
        for row in rows.tolist():
            # most are here, and a long chain has hundreds
            if row in protected.rows:
                protected.rows.move_to_end(row)
            elif row in protected:
                protected.renew(row)
            elif row in window:
                window.renew(row)
            else:
                probation.remove(row)
                protected.append(row)
        main = max(1, self._capacity - self._window_rows())
        while len(protected) > _PROTECTED_SHARE * main:
            probation.append(protected.pop_oldest())

    def _leave(self, row: int, name: int | None) -> None:
        if row == self._loser:
            self._loser = None
        next(queue for queue in self._queues() if row in queue).remove(row)

    def _window_rows(self) -> int:
        return max(1, int(self._capacity * self._share))

    def _propose(self, may_go: Callable[[int], bool]) -> int | None:
        loser = self._loser
        if loser is not None and may_go(loser):
            return loser
        candidate = None
        # rows that are in, but not placed yet, press on the window
        if len(self._window) + len(self._fresh) > self._window_rows():
            candidate = self._window.first(may_go)
        if candidate is None:
            row = self._main_victim(may_go)
            return self._window.first(may_go) if row is None else row
        rival = self._main_victim(may_go)
        if rival is None or not self._beats(candidate, rival):
            self._loser = candidate
        else:
            self._window.remove(candidate)
            self._probation.append(candidate)
            self._loser = rival
        return self._loser

    def _beats(self, candidate: int, rival: int) -> bool:
        names = self.surroundings.identity(np.array([candidate, rival], np.int64))
        new, old = map(self._sketch.of, names.tolist())
        return new > old

    def _main_victim(self, may_go: Callable[[int], bool]) -> int | None:
        row = self._probation.first(may_go)
        return self._protected.first(may_go) if row is None else row

    def _queues(self) -> Sequence[Queue]:
        return self._window, self._probation, self._protected
