"""Moving estimates of what a read costs: seconds per request and bytes per second.

Every read moves both figures by half of how far it was off, each in proportion to its part in what
was expected: small reads move the latency, large ones the bandwidth. The first real read sets the
scale of what was assumed before it, so a disk a thousand times slower is known as such at once; and
a few reads tell of a change.
"""

from kvstore.block import TierCost

_GAIN = 0.5
_BANDWIDTH_MIN, _LATENCY_MIN_S = 1e3, 1e-9


class CostEstimate:
    """`latency_s` and `bytes_per_s`: what is assumed at first."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._byte_s = latency_s, 1 / bytes_per_s
        self.measured = False

    def observe(self, size_bytes: int, seconds: float) -> None:
        """One read of so many bytes took so long."""
        expected = self._latency_s + size_bytes * self._byte_s
        off = seconds / expected - 1
        if not self.measured:
            self.measured = True
            self._move(off, off)
            return
        share = self._latency_s / expected
        self._move(_GAIN * off * share, _GAIN * off * (1 - share))

    def _move(self, latency: float, byte: float) -> None:
        self._latency_s = max(self._latency_s * (1 + latency), _LATENCY_MIN_S)
        self._byte_s = min(self._byte_s * (1 + byte), 1 / _BANDWIDTH_MIN)

    def cost(self) -> TierCost:
        """The estimate now."""
        bandwidth = 1 / self._byte_s if self._byte_s > 0 else float("inf")
        return TierCost(self._latency_s, bandwidth, self.measured)
