"""The store's and the calls' counters for Prometheus."""

import asyncio
import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.metrics import COUNTERS
from kvstore.store.types import Stat

SCRAPE_DEADLINE_S = 5.0
_CALL_BUCKETS_S = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_TIER_GAUGES = {
    "objects": "READY blocks",
    "payload_bytes": "Section bytes of READY blocks",
    "used_bytes": "What they really take",
    "budget_bytes": "What they may take",
    "accepting": "0 while errors or a full SSD keep new blocks out",
}
_GAUGES = {
    "blocks": "READY blocks",
    "namespaces": "Open namespaces",
    "leases": "Leases held",
    "reservations": "Reservations held",
    "pinned_blocks": "Blocks under a lease",
    "dirty_blocks": "Blocks not yet on SSD",
}
_WINDOWS_GAUGES = {
    "objects": "Window snapshots and hand-over records",
    "payload_bytes": "Bytes of their payloads",
    "used_bytes": "What they really take",
    "budget_bytes": "What they may take",
}
_LABELLED = ("lookup_", "put_")
"""Counters that families with a label have already."""
_log = logging.getLogger(__name__)


class CallMetrics:
    """Duration of calls by method and result (`ok`, `caller gone` or the error's name)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvstored_call_seconds",
            "Duration of calls",
            ("method", "result"),
            registry=registry,
            buckets=_CALL_BUCKETS_S,
        )
        # finding a child by its labels costs as much as everything else about it
        self._children: dict[tuple[str, str], Histogram] = {}

    def observe(self, method: str, result: str, seconds: float) -> None:
        """Count one call."""
        child = self._children.get((method, result))
        if child is None:
            child = self._children[method, result] = self._seconds.labels(method, result)
        child.observe(seconds)


class StoreCollector(Collector):
    """Asks the store on every scrape. `stat` runs on `loop`, a scrape on a thread of its own."""

    def __init__(self, stat: Callable[[], Stat], loop: asyncio.AbstractEventLoop) -> None:
        self._stat = stat
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        async def ask() -> Stat:
            return self._stat()

        yield from _families(
            asyncio.run_coroutine_threadsafe(ask(), self._loop).result(SCRAPE_DEADLINE_S)
        )


def _families(stat: Stat) -> Iterator[Metric]:
    for name, text in _TIER_GAUGES.items():
        family = GaugeMetricFamily(f"kvstore_tier_{name}", text, labels=("tier",))
        for tier in stat.tiers:
            family.add_metric((str(tier.tier.name).lower(),), float(getattr(tier, name)))
        yield family
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"kvstore_{name}", text, value=getattr(stat, name))
    for name, text in _WINDOWS_GAUGES.items():
        value = float(getattr(stat.windows, name))
        yield GaugeMetricFamily(f"kvstore_windows_{name}", text, value=value)
    text = "Bytes waiting for SSD or being written"
    yield GaugeMetricFamily("kvstore_dirty_bytes", text, value=stat.write_back_bytes)
    if stat.write_amplification is not None:
        text = "Frame bytes written to SSD, compaction included, per byte taken in"
        yield GaugeMetricFamily(
            "kvstore_ssd_write_amplification", text, value=stat.write_amplification
        )
    if stat.evicted_ssd_age_s_min is not None:
        text = "Age of the youngest block that left the SSD for room"
        value = stat.evicted_ssd_age_s_min
        yield GaugeMetricFamily("kvstore_evicted_ssd_age_s_min", text, value=value)
    for name, value in stat.counters.items():
        if not name.startswith(_LABELLED):
            yield CounterMetricFamily(f"kvstore_{name}", COUNTERS.get(name, name), value=value)
    lookups = CounterMetricFamily("kvstore_lookup_blocks", "Keys looked up", labels=("found",))
    for found, value in stat.lookup_blocks.items():
        lookups.add_metric((found,), value)
    yield lookups
    puts = CounterMetricFamily("kvstore_put_blocks", "Blocks put", labels=("outcome",))
    for outcome, value in stat.puts.items():
        puts.add_metric((outcome,), value)
    yield puts


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve `/metrics` on threads of its own; returns what stops it. Raises `OSError`."""
    server, thread = start_http_server(port, addr=host, registry=registry)
    _log.info("metrics at http://%s:%d/metrics", host, server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
