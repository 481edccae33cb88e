"""The classes of `Gittins`: what is known of a block, as one number.

From the highest part to the lowest: how often it was used, or that it is new; whether it is used
much more often than its session comes back, or else whether the request grew that used it last; the
session's pace; what the client said when the last answer ended; whether its branch was left.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook

_PACES: Final = 14
_PACE_GAIN: Final = 0.3
_LOG_2: Final = math.log(2)
_NEW: Final = 0
_USED: Final = 5
_SHARED: Final = 2
_WAYS: Final = 3
_GREW_BLOCKS: Final = 2

OUTLOOKS: Final = 2 * len(Outlook)
"""Classes that differ in what the client said and in whether the branch was left: `kind % OUTLOOKS`
is 2 × outlook + left."""
_PER_WAY: Final = _PACES * OUTLOOKS


def groups() -> npt.NDArray[np.int64]:
    """The group of every class: whether it grew or not, and with the pace in steps of 8 instead of
    2."""
    rest, low = np.divmod(np.arange(_USED * _WAYS * _PER_WAY), OUTLOOKS)
    rest, pace = np.divmod(rest, _PACES)
    used, way = np.divmod(rest, _WAYS)
    coarse = np.where(pace == 0, 0, np.maximum(pace - 2, 1) // 3 + 1)
    of = (used * 2 + (way == _SHARED)) * (_PACES // 3 + 2) + coarse
    groups: npt.NDArray[np.int64] = of * OUTLOOKS + low
    return groups


def grew(unknown: int) -> bool:
    """Whether a request brought more than the block in which its chain went on, `unknown` being how
    many of its blocks nobody knew."""
    return unknown >= _GREW_BLOCKS


def class_of(uses: int, pace: float, *, shared: bool, new: bool, grew: bool) -> int:
    """The class of blocks whose branch is not left and whose outlook is unknown."""
    used = _NEW if new else 1 if uses <= 1 else 2 if uses == 2 else 3 if uses <= 4 else 4
    way = _SHARED if shared else int(grew)
    step = 0 if pace != pace else min(max(math.floor(pace / _LOG_2) + 2, 1), _PACES - 1)
    return (used * _WAYS + way) * _PER_WAY + step * OUTLOOKS


def unheard_of(new: bool) -> int:
    """The class of blocks of which nothing is known but that they are in."""
    return class_of(1, math.nan, shared=False, new=new, grew=False)


def is_new(kind: int) -> bool:
    """Whether no request has used such blocks since they came."""
    return kind // _PER_WAY // _WAYS == _NEW


def told_growth(kind: int, grew: bool) -> int:
    """The class once it is known whether the request grew that used such blocks last."""
    way = kind // _PER_WAY % _WAYS
    return kind if way == _SHARED else kind + (grew - way) * _PER_WAY


def moved(pace: float, gap_s: float) -> float:
    """The moving mean of log(seconds + 0.5) after one more gap."""
    now = math.log(max(gap_s, 0.0) + 0.5)
    return now if math.isnan(pace) else pace + _PACE_GAIN * (now - pace)
