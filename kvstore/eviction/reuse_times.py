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
from typing import Final

import numpy as np
import numpy.typing as npt

AGES: Final = 48
_FIRST_AGE_S: Final = 0.5
_PER_OCTAVE: Final = 2
_PRIOR_REUSE: Final = 0.5
_PRIOR_REQUESTS: Final = 20.0
_GROUP_REQUESTS: Final = 20.0
_CLASS_REQUESTS: Final = 100.0
_REFRESH_GROWTH: Final = 0.05
_REFRESH_ROWS_MAX: Final = 100_000
_HALVE_REQUESTS: Final = 1 << 20

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def age_bin(age_s: Floats) -> Ints:
    """The bin of each age: one for what is younger than half a second, then two per octave."""
    halves = np.maximum(age_s, 1e-9) / _FIRST_AGE_S
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
        self._returned = np.zeros((classes, AGES))
        self._started = np.zeros(classes)
        self._index = np.zeros((classes, AGES))
        self._index[:] = _gittins(_prior()[None])
        self._requests = self._rows = self._rows_since = 0.0

    def request(self, rows: int) -> None:
        """A request of so many rows comes; all that is learnt until the next belongs to it."""
        self._requests += 1
        self._rows += rows
        self._rows_since += rows
        if self._rows_since >= min(_REFRESH_ROWS_MAX, self._rows * _REFRESH_GROWTH):
            self._refresh()

    @property
    def _weight(self) -> float:
        return self._requests / self._rows if self._rows else 1.0

    def returned(self, classes: Ints, age_s: Floats) -> None:
        """Blocks of these classes were used again at these ages."""
        cells = classes * AGES + age_bin(age_s)
        np.add.at(self._returned.reshape(-1), cells, self._weight)

    def started(self, classes: Ints) -> None:
        """Blocks of these classes begin to wait for their next use."""
        np.add.at(self._started, classes, self._weight)

    def changed(self, old: Ints, new: Ints) -> None:
        """Waiting blocks are in another class now."""
        np.add.at(self._started, old, -self._weight)
        np.add.at(self._started, new, self._weight)

    def worth(self, classes: Ints, age_s: Floats) -> Floats:
        """The index, in expected uses per second of holding one block."""
        worth: Floats = self._index[classes, age_bin(age_s)]
        return worth

    def worth_of(self, kind: int, age_s: float) -> float:
        """`worth` of one block."""
        if age_s < _FIRST_AGE_S:
            return self._index.item(kind, 0)
        age = int(_PER_OCTAVE * math.log2(age_s / _FIRST_AGE_S)) + 1
        return self._index.item(kind, min(age, AGES - 1))

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
        groups = np.zeros((self._groups, AGES + 1))
        np.add.at(groups, self._group_of[seen], counts)
        everything = groups.sum(axis=0) + _PRIOR_REQUESTS * _prior()
        groups += _GROUP_REQUESTS * everything / everything.sum()
        shared = groups[self._group_of[seen]]
        counts += _CLASS_REQUESTS * shared / shared.sum(axis=1, keepdims=True)
        self._index[:] = _gittins(everything[None])
        active = np.unique(self._group_of[seen])
        peers = np.flatnonzero(np.isin(self._group_of, active))
        index_of = _gittins(groups[active])
        self._index[peers] = index_of[np.searchsorted(active, self._group_of[peers])]
        self._index[seen] = _gittins(counts)


def _gittins(counts: Floats) -> Floats:
    """The index per class and age. `counts` (classes, AGES + 1): returns per bin of age, and those
    that never came."""
    returns = counts[:, :AGES]
    waiting = counts.sum(axis=1, keepdims=True) - np.cumsum(returns, axis=1)
    # within a bin the returns are spread evenly; of the first one half lies behind already
    seconds = (waiting + 0.5 * returns) * _WIDTHS_S
    best = np.zeros_like(returns)
    for age in range(AGES - 1):
        paid = np.cumsum(returns[:, age : AGES - 1], axis=1) - 0.5 * returns[:, age : age + 1]
        held = np.cumsum(seconds[:, age : AGES - 1], axis=1) - 0.5 * seconds[:, age : age + 1]
        best[:, age] = np.max(paid / np.maximum(held, 1e-12), axis=1)
    return best
