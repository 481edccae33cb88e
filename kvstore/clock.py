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


class SteadyClock:
    """Another clock whose calendar does not jump: its wall time starts at the other's, or at
    `not_before_s` if that is later, and goes on with the monotonic one. So ages of what was written
    at or before `not_before_s` and of what is written from now on stay in their order, wherever
    the machine's clock is set meanwhile."""

    def __init__(self, clock: Clock, not_before_s: float = 0.0) -> None:
        self._clock = clock
        self.wall_offset_s = max(clock.wall_s(), not_before_s) - clock.monotonic_s()
        """Wall time less monotonic time."""

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def wall_s(self) -> float:
        return self.monotonic_s() + self.wall_offset_s


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
