"""Moving estimates of what a read costs: seconds per request and bytes per second.

A straight line through the reads seen, each weighted less the longer ago it was. Two invented reads
stand at the start, so that there is an estimate before the first and a slope while all reads have
one size.
"""

from kvstore.block import TierCost

_DECAY = 0.98
_BANDWIDTH_MIN = 1e3


class CostEstimate:
    """`latency_s` and `bytes_per_s`: what is assumed at first."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._first = TierCost(latency_s, bytes_per_s)
        for size in (4096.0, 16e6):
            self._add(size, latency_s + size / bytes_per_s)

    def _add(self, x: float, y: float) -> None:
        self._n += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def observe(self, size_bytes: int, seconds: float) -> None:
        """One read of so many bytes took so long."""
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _DECAY)
        self._add(float(size_bytes), seconds)

    def cost(self) -> TierCost:
        """The estimate now. A line that slopes the wrong way (noise) falls back to the mean: no
        latency, all bandwidth."""
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        latency = (self._y - slope * self._x) / self._n
        if slope <= 0 or latency < 0:
            slope, latency = self._xy / self._xx, 0.0
        return TierCost(latency, max(1 / slope, _BANDWIDTH_MIN) if slope > 0 else float("inf"))
