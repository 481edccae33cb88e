"""Frames that lie one behind the other are moved together."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.tiers.base import Location

_Item = TypeVar("_Item")
_RUN_ITEMS_MAX = 256


def runs(
    items: Sequence[_Item],
    where: Callable[[_Item], tuple[Location, int]],
    run_bytes_max: int | None = None,
) -> Iterator[list[_Item]]:
    """Split sorted items into runs that lie one behind the other in one segment. A run of several
    items has at most `run_bytes_max`."""
    run: list[_Item] = []
    expected: tuple[int, int] | None = None
    size = 0
    for item in items:
        location, length = where(item)
        full = len(run) == _RUN_ITEMS_MAX or (
            run_bytes_max is not None and size + length > run_bytes_max
        )
        if run and (location != expected or full):
            yield run
            run, size = [], 0
        run.append(item)
        size += length
        expected = (location[0], location[1] + length)
    if run:
        yield run
