"""What a hit is worth: time to first token from a stated cost model.

    TTFT = wait + fetch + (replayed + missed tokens) / prefill rate
    fetch = per tier that holds part of the hit: latency + bytes / bandwidth

The caller takes a hit only where fetching is faster than computing (`Match.fetch_cost_s` lets it),
so the time is never above that of a full prefill. Queueing is left out: the model gives the time of
a request that meets an idle machine.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.bench.simulate import Replay
from kvstore.block import TierCost

_WINDOW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class CostModel:
    """`prefill_tokens_per_s`: of one model instance. `bytes_per_token`: global KV. `wait_s`: what a
    request pays in any case. `replay_tokens`: recomputed on every hit (ds41f §5)."""

    name: str
    prefill_tokens_per_s: float
    dram: TierCost
    ssd: TierCost
    bytes_per_token: float = 890.0
    replay_tokens: int = _WINDOW_TOKENS
    wait_s: float = 0.0

    def ttft_s(self, replay: Replay) -> npt.NDArray[np.float64]:
        """Seconds per request. Where no DRAM was simulated every hit is charged as DRAM's."""
        trace = replay.trace
        dram, ssd = replay.hit_dram, replay.hit_store
        if not replay.dram_capacity:
            dram, ssd = ssd, np.zeros_like(ssd)
        bytes_per_block = self.bytes_per_token * trace.block_tokens
        fetch = np.zeros(trace.requests)
        for blocks, tier in ((dram, self.dram), (ssd, self.ssd)):
            fetch += (blocks > 0) * tier.latency_s + blocks * bytes_per_block / tier.bytes_per_s
        hit_tokens = (dram + ssd) * trace.block_tokens
        computed = np.maximum(trace.tokens - hit_tokens, 0) + self.replay_tokens
        all_of_it = trace.tokens / self.prefill_tokens_per_s
        seconds: npt.NDArray[np.float64] = self.wait_s + np.minimum(
            all_of_it, fetch + computed / self.prefill_tokens_per_s
        )
        return seconds

    def with_rate(self, prefill_tokens_per_s: float) -> "CostModel":
        """The same machine with another, measured prefill rate."""
        return replace(self, name="measured", prefill_tokens_per_s=prefill_tokens_per_s)


_DRAM = TierCost(latency_s=1.2e-3, bytes_per_s=4.1e9)
_SSD = TierCost(latency_s=1.4e-3, bytes_per_s=0.67e9)
PRESETS = {
    "h100": CostModel("h100", 18_300.0, _DRAM, _SSD),
    "gb300": CostModel("gb300", 142_000.0, _DRAM, _SSD),
}
"""Prefill of 8×H100 and of one GB300 GPU as published (ds41f §5). The tiers are those of a modest
machine, as measured: 32 blocks per call through shared memory, and 64 KiB direct reads at queue
depth 16. A server's SSDs are ten times faster; give your own figures."""
