"""The classes of `Gittins`: what is known of a block, as one number.

From the highest part to the lowest: how often it was used, whether it is used much more often than
its session comes back, whether it is new, the session's pace, what the client said when the last
answer ended, whether its branch was left.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.block import Outlook

_PACES: Final = 14
_PACE_GAIN: Final = 0.3
_LOG_2: Final = math.log(2)

OUTLOOKS: Final = 2 * len(Outlook)
"""Classes that differ in what the client said and in whether the branch was left: `kind % OUTLOOKS`
is 2 × outlook + left."""


def groups() -> npt.NDArray[np.int64]:
    """The group of every class: the same with the pace in steps of 8 instead of 2."""
    rest, low = np.divmod(np.arange(4 * 2 * 2 * _PACES * OUTLOOKS), OUTLOOKS)
    rest, pace = np.divmod(rest, _PACES)
    coarse = np.where(pace == 0, 0, np.maximum(pace - 2, 1) // 3 + 1)
    groups: npt.NDArray[np.int64] = (rest * (_PACES // 3 + 2) + coarse) * OUTLOOKS + low
    return groups


def class_of(uses: int, shared: bool, new: bool, pace: float) -> int:
    """The class of blocks whose branch is not left and whose outlook is unknown."""
    used = 0 if uses <= 1 else 1 if uses == 2 else 2 if uses <= 4 else 3
    step = 0 if pace != pace else min(max(math.floor(pace / _LOG_2) + 2, 1), _PACES - 1)
    return (((used * 2 + shared) * 2 + new) * _PACES + step) * OUTLOOKS


def moved(pace: float, gap_s: float) -> float:
    """The moving mean of log(seconds + 0.5) after one more gap."""
    now = math.log(max(gap_s, 0.0) + 0.5)
    return now if math.isnan(pace) else pace + _PACE_GAIN * (now - pace)
