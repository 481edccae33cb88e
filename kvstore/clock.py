"""Time as an argument, so that leases, lifetimes and simulations can be driven by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that never jumps, for waits; one of the calendar, for ages on disk."""

    def monotonic_s(self) -> float:
        """Seconds that only grow within this process."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, comparable across restarts."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
