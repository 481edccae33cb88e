"""Time under a test's control: a clock that stands still, and an event loop that runs on it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ManualClock:
    """`kvstore.clock.Clock` that moves when told to. Wall time starts at `wall_s`."""

    def __init__(self, wall_s: float = 1.8e9) -> None:
        self._now_s = 0.0
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._wall_s + self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises `ValueError` for a step back."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards ({seconds} s)")
        self._now_s += seconds


class Stuck(Exception):
    """Everything waits, and no timer will ever change that: in real time, a hang."""


class _Selector(selectors.DefaultSelector):
    """Instead of sleeping, moves the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("every task waits for an event that nothing will bring")
        self._clock.advance(max(0.0, timeout))
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a `ManualClock`: sleeps and timeouts take no time and come in their order,
    so that a run without threads is the same every time. Raises `Stuck` instead of hanging."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_Selector(clock))
        self._simulated = clock

    def time(self) -> float:
        return self._simulated.monotonic_s()


def run_simulated(clock: ManualClock, main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `SimulatedLoop`."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(clock)) as runner:
        return runner.run(main)
