"""What a client makes of a call's plain arguments, alike before every door."""

from collections.abc import Iterable
from typing import SupportsFloat, TypeVar

from kvstore.block import Durability, Outlook, Tier
from kvstore.errors import InvalidRequest

WAIT_S_MAX = 366 * 86_400.0
"""A deadline beyond it, infinity too, is this: the clocks and timers below take no more."""
_TIERS = (Tier.HBM, Tier.DRAM, Tier.SSD)
_E = TypeVar("_E", Durability, Outlook)
_T = TypeVar("_T")


def _number(value: object, what: str) -> float:
    try:
        if isinstance(value, SupportsFloat) and not isinstance(value, bool):
            return float(value)
    except (OverflowError, TypeError, ValueError):
        pass
    raise InvalidRequest(f"{what} must be a number of seconds, not {value!r}")


def check_deadline(deadline_s: object) -> float:
    """Seconds that a call may take: above 0, `WAIT_S_MAX` at most. Raises `InvalidRequest`."""
    seconds = _number(deadline_s, "deadline_s")
    if not seconds > 0:
        raise InvalidRequest(f"deadline_s must be > 0, not {deadline_s!r}")
    return min(seconds, WAIT_S_MAX)


def check_wait(deadline_s: object) -> float:
    """Seconds to wait for something: from 0 on, `WAIT_S_MAX` at most. Raises `InvalidRequest`."""
    seconds = _number(deadline_s, "deadline_s")
    if not seconds >= 0:
        raise InvalidRequest(f"deadline_s must be ≥ 0, not {deadline_s!r}")
    return min(seconds, WAIT_S_MAX)


def check_ttl(ttl_s: object) -> float | None:
    """Seconds that a right or an object is asked to last; None for the store's default. Raises
    `InvalidRequest` unless above 0."""
    if ttl_s is None:
        return None
    seconds = _number(ttl_s, "ttl_s")
    if not seconds > 0:
        raise InvalidRequest(f"ttl_s must be above 0, not {ttl_s!r}; leave it out for the default")
    return min(seconds, WAIT_S_MAX)


def check_tier(tier: object) -> Tier | None:
    """One tier, or None for all. Raises `InvalidRequest`."""
    if tier is None or (isinstance(tier, Tier) and tier in _TIERS):
        return tier
    known = ", ".join(f"Tier.{t.name}" for t in _TIERS)
    raise InvalidRequest(f"tier must be one of {known}, or None for all, not {tier!r}")


def check_member(kind: type[_E], value: object, what: str) -> _E:
    """A member of an enum. Raises `InvalidRequest` for anything else, a member's value too."""
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise InvalidRequest(f"{what} must be one of {known}, not {value!r}")
    return value


def as_list(values: Iterable[_T], kind: type[_T], what: str) -> list[_T]:
    """What any iterable gives, a generator too, which gives it once. Raises `InvalidRequest` where
    it is none, or gives something of another kind."""
    if not isinstance(values, Iterable):
        raise InvalidRequest(f"{what} must be a list of {kind.__name__}, not {values!r}")
    given = list(values)
    for value in given:
        if not isinstance(value, kind):
            raise InvalidRequest(f"{what} must be of {kind.__name__} alone, not {value!r}")
    return given
