"""Turns for operations that are compared, and what came of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Operation = Callable[[], object]


@dataclass(slots=True)
class Timings:
    """Seconds of one operation's runs."""

    seconds: list[float] = field(default_factory=list)

    def take(self, operation: Operation) -> None:
        """Run it once more."""
        start = time.perf_counter()
        operation()
        self.seconds.append(time.perf_counter() - start)

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """Of a hundred runs the slowest but one; of fewer the slowest."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    def as_json(self) -> dict[str, float]:
        """Median, least and p99 in microseconds, and how many runs."""
        return {
            "p50_us": self.p50 * 1e6,
            "min_us": min(self.seconds) * 1e6,
            "p99_us": self.p99 * 1e6,
            "runs": len(self.seconds),
        }


def in_turns(
    operations: Mapping[str, Operation], rounds: int, before: Mapping[str, Operation] | None = None
) -> dict[str, Timings]:
    """Run each operation once per round, one after the other, so that a slow spell of the machine
    hits all alike. A first round is not counted. `before`: what an operation needs done first."""
    timings = {name: Timings() for name in operations}
    for _ in range(rounds + 1):
        for name, operation in operations.items():
            if before and name in before:
                before[name]()
            timings[name].take(operation)
    for timing in timings.values():
        del timing.seconds[0]
    return timings
