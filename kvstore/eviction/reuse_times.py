"""What a cache has learnt about when blocks come back, and what that makes a block worth.

Every block belongs to a class (what is known about it) and has an age (seconds since its last use).
Per class, the times to the next use are counted in bins of age; what never came back counts as
well. From these follows the index of Gittins (1979), the best achievable rate of return of holding
something that may pay at a random time: over all horizons h, the largest

    P(used within h | unused up to now) / E(seconds until that use, or h | unused up to now).

It is high shortly before a use is due, falls when the use is overdue, and needs no more than
one look into a table. Few observations are eked out by those of the group that a class is part of,
these by all observations, and these by a prior that makes a block the less likely to return the
longer it is away.
"""

import math
from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

AGES: Final = 48
_FIRST_AGE_S: Final = 0.5
_PER_OCTAVE: Final = 2
_PRIOR_REUSE: Final = 0.5
_PRIOR_REQUESTS: Final = 20.0
_GROUP_REQUESTS: Final = 20.0
_CLASS_REQUESTS: Final = 40.0
_REFRESH_GROWTH: Final = 0.1
_REFRESH_ROWS_MAX: Final = 100_000
_HALVE_REQUESTS: Final = 1 << 20
_CLASSES_AT_ONCE: Final = 64

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def age_bin(age_s: float) -> int:
    """The bin of an age: one for what is younger than half a second, then two per octave."""
    if age_s < _FIRST_AGE_S:
        return 0
    return min(int(_PER_OCTAVE * math.log2(age_s / _FIRST_AGE_S)) + 1, AGES - 1)


def age_bins(ages_s: Floats) -> Ints:
    """`age_bin` of each."""
    halves = np.maximum(ages_s, 1e-9) / _FIRST_AGE_S
    bins = np.floor(_PER_OCTAVE * np.log2(halves)).astype(np.int64) + 1
    clipped: Ints = np.clip(bins, 0, AGES - 1)
    return clipped


_EDGES_S: Final = np.concatenate(([0.0], _FIRST_AGE_S * 2.0 ** (np.arange(AGES) / _PER_OCTAVE)))
_WIDTHS_S: Final = np.diff(_EDGES_S)


def _prior() -> Floats:
    returns = np.zeros(AGES + 1)
    returns[2:25] = _PRIOR_REUSE / 23
    returns[AGES] = 1 - _PRIOR_REUSE
    return returns


class ReuseTimes:
    """See the module. `group_of`: for every class the group whose experience it shares. Counts are
    weighted so that a request of average length weighs 1. Memory depends on the number of classes
    alone: 1.2 KB each."""

    def __init__(self, group_of: Ints) -> None:
        classes = len(group_of)
        self._group_of = group_of
        self._groups = int(group_of.max()) + 1
        # plain arrays where single cells are written, and their contents as NumPy sees them
        self._return_cells = array("d", bytes(8 * classes * AGES))
        self._start_cells = array("d", bytes(8 * classes))
        self._returned = np.frombuffer(self._return_cells).reshape(classes, AGES)
        self._started = np.frombuffer(self._start_cells)
        # classes share the rows of the index that are the same for them
        self._index = _gittins(_prior()[None])
        self._row_of = np.zeros(classes, np.int64)
        self._row_cells = self._row_of.data
        self._requests = self._rows = self._rows_since = 0.0
        self._weight = 1.0

    def request(self, rows: int) -> None:
        """A request of so many rows comes; all that is learnt until the next belongs to it."""
        self._requests += 1
        self._rows += rows
        self._rows_since += rows
        self._weight = self._requests / self._rows if self._rows else 1.0
        if self._rows_since >= min(_REFRESH_ROWS_MAX, self._rows * _REFRESH_GROWTH):
            self._refresh()

    def returned(self, kind: int, age_s: float, rows: int) -> None:
        """So many blocks of this class were used again at this age."""
        self._return_cells[kind * AGES + age_bin(age_s)] += self._weight * rows

    def started(self, kind: int, rows: int) -> None:
        """So many blocks of this class begin to wait for their next use."""
        self._start_cells[kind] += self._weight * rows

    def changed(self, old: int, new: int, rows: int) -> None:
        """So many waiting blocks are in another class now."""
        self._start_cells[old] -= self._weight * rows
        self._start_cells[new] += self._weight * rows

    def worth(self, kind: int, age_s: float) -> float:
        """The index, in expected uses per second of holding one block."""
        return self._index.item(self._row_cells[kind], age_bin(age_s))

    def worths(self, kinds: Ints, ages_s: Floats) -> Floats:
        """`worth` of each."""
        worths: Floats = self._index[self._row_of[kinds], age_bins(ages_s)]
        return worths

    def _refresh(self) -> None:
        self._rows_since = 0.0
        if self._requests > _HALVE_REQUESTS:
            self._returned /= 2
            self._started /= 2
            self._requests /= 2
            self._rows /= 2
        seen = np.flatnonzero(self._started > 0)
        counts = np.empty((len(seen), AGES + 1))
        counts[:, :AGES] = self._returned[seen]
        counts[:, AGES] = np.maximum(0, self._started[seen] - counts[:, :AGES].sum(axis=1))
        group_of = self._group_of[seen]
        active = np.flatnonzero(np.bincount(group_of, minlength=self._groups))
        row_of_group = np.zeros(self._groups, np.int64)
        row_of_group[active] = np.arange(1, len(active) + 1)
        group = row_of_group[group_of] - 1
        groups = np.zeros((len(active), AGES + 1))
        np.add.at(groups, group, counts)
        everything = groups.sum(axis=0) + _PRIOR_REQUESTS * _prior()
        groups += _GROUP_REQUESTS * everything / everything.sum()
        shared = groups[group]
        counts += _CLASS_REQUESTS * shared / shared.sum(axis=1, keepdims=True)
        self._index = _gittins(np.concatenate((everything[None], groups, counts)))
        row_of_group.take(self._group_of, out=self._row_of)
        self._row_of[seen] = np.arange(1 + len(active), len(self._index))


def _gittins(counts: Floats) -> Floats:
    """The index per class and age. `counts` (classes, AGES + 1): returns per bin of age, and those
    that never came."""
    index = np.zeros((len(counts), AGES))
    # behind the last age at which anything ever returned there is nothing to be had
    ages = int(np.flatnonzero(counts[:, : AGES - 1].any(axis=0))[-1]) + 1
    returns = counts[:, :ages]
    paid = np.cumsum(returns, axis=1)
    waiting = counts.sum(axis=1, keepdims=True) - paid
    # within a bin the returns are spread evenly; of the first one half lies behind already
    seconds = (waiting + 0.5 * returns) * _WIDTHS_S[:ages]
    held = np.cumsum(seconds, axis=1)
    for at in range(0, len(counts), _CLASSES_AT_ONCE):
        some = slice(at, at + _CLASSES_AT_ONCE)
        # (class, age, horizon); a horizon before the age gives a hugely negative rate
        pays = paid[some, None, :] - (paid[some] - 0.5 * returns[some])[:, :, None]
        costs = held[some, None, :] - (held[some] - 0.5 * seconds[some])[:, :, None]
        np.maximum(costs, 1e-12, out=costs)
        pays /= costs
        index[some, :ages] = np.maximum(pays.max(axis=2), 0.0)
    return index
