"""What a replay says: figures for people and for programs."""

from typing import Any

import numpy as np

from kvstore.bench.cost import CostModel
from kvstore.bench.live import LiveRun
from kvstore.bench.simulate import Replay
from kvstore.bench.trace import Trace

_PERCENTILES = (50, 90, 99)
_SPANS = 100


def trace_figures(trace: Trace) -> dict[str, Any]:
    """Name, size and ceiling of a trace."""
    counts = np.bincount(trace.blocks, minlength=trace.unique)
    return {
        "name": trace.name,
        "block_tokens": trace.block_tokens,
        "requests": trace.requests,
        "block_accesses": trace.accesses,
        "unique_blocks": trace.unique,
        "used_once": float((counts == 1).mean()) if trace.unique else 0.0,
        "seconds": float(trace.time_s[-1] - trace.time_s[0]) if trace.requests else 0.0,
        "unbounded_hit_rate": trace.unbounded_hit_rate(),
    }


def replay_figures(replay: Replay, cost: CostModel) -> dict[str, Any]:
    """One replay as JSON. `hits`: shares of all block accesses, one per place and one for misses;
    they sum to 1. `requests`: shares of the requests that ask for a block at all, by the slowest
    place that they read from; they sum to 1 as well."""
    trace = replay.trace
    total = max(trace.accesses, 1)
    dram, store = int(replay.hit_dram.sum()), int(replay.hit_store.sum())
    block_bytes = trace.block_tokens * cost.bytes_per_token
    hits = {"miss": (trace.accesses - dram - store) / total}
    if replay.dram_capacity:
        hits = {"dram": dram / total, "ssd": store / total, **hits}
    else:
        hits = {"store": store / total, **hits}
    seconds, cold = cost.ttft_s(replay), trace.tokens / cost.prefill_tokens_per_s + cost.wait_s
    return {
        "policy": replay.policy,
        "capacity_blocks": replay.capacity,
        "capacity_share": replay.capacity / max(trace.unique, 1),
        "dram_capacity_blocks": replay.dram_capacity,
        "hit_rate": replay.hit_rate,
        "request_hit_rate": replay.request_hit_rate,
        "hits": hits,
        "requests": _requests(replay),
        "blocks": {
            "added": replay.added,
            "evicted": replay.evicted,
            "refused": replay.refused,
            "promoted": replay.promoted,
        },
        "bytes": {
            "written": replay.added * block_bytes,
            "read": (dram + store) * block_bytes,
            "promoted": replay.promoted * block_bytes,
        },
        "ttft_s": _quantiles(seconds),
        "ttft_without_cache_s": _quantiles(cold),
        "cost_model": cost.name,
    }


def _requests(replay: Replay) -> dict[str, float]:
    asked = np.diff(replay.trace.start) > 0
    total = max(int(asked.sum()), 1)
    slow, hit = replay.hit_store > 0, replay.hit_store + replay.hit_dram > 0
    miss = int((asked & ~hit).sum()) / total
    if not replay.dram_capacity:
        return {"store": int(slow.sum()) / total, "miss": miss}
    fast = int((hit & ~slow).sum()) / total
    return {"dram": fast, "ssd": int(slow.sum()) / total, "miss": miss}


def live_figures(run: LiveRun, policy: str, cost: CostModel) -> dict[str, Any]:
    """One live run as JSON: what `replay_figures` says, and under `measured` what the clock and the
    store's own counters said. `ttft_s` of `measured`: the model's prefill with the fetch as it took
    here, and no fetch where that would be the slower."""
    replay = run.as_replay(policy)
    fetched = (run.hit_dram + run.hit_ssd).astype(np.float64)
    hit = fetched > 0
    trace, block_bytes = run.trace, run.trace.block_tokens * cost.bytes_per_token
    computed = np.maximum(trace.tokens - fetched * trace.block_tokens, 0) + cost.replay_tokens
    cold = trace.tokens / cost.prefill_tokens_per_s
    warm = np.where(hit, run.fetch_s + computed / cost.prefill_tokens_per_s, cold)
    put_s = run.put_s[run.put_s > 0]
    return {
        **replay_figures(replay, cost),
        "measured": {
            "sessions": run.sessions,
            "speedup": run.speedup,
            "seconds": run.seconds,
            "late_s_max": run.late_s,
            "blocks_before": run.blocks_before,
            "wrong_blocks": run.wrong_blocks,
            "fetch_s": _quantiles(run.fetch_s[hit]),
            "fetch_bytes_per_s": _rate(float(fetched.sum()) * block_bytes, run.fetch_s),
            "put_s": _quantiles(put_s),
            "put_bytes_per_s": _rate(run.puts["STORED"] * block_bytes, put_s),
            "ttft_s": _quantiles(cost.wait_s + np.minimum(cold, warm)),
            "puts": dict(sorted(run.puts.items())),
            "counters": {name: n for name, n in sorted(run.counters.items()) if n},
        },
    }


def _rate(amount: float, seconds: Any) -> float:
    total = float(seconds.sum())
    return amount / total if total else 0.0


def _quantiles(seconds: Any) -> dict[str, float]:
    if not len(seconds):
        return {}
    figures = {f"p{q}": float(np.percentile(seconds, q)) for q in _PERCENTILES}
    return {"mean": float(seconds.mean()), **figures}


def attribution(replay: Replay) -> dict[str, Any]:
    """Hits per place in up to 100 spans of equally many requests, as shares of their accesses."""
    trace = replay.trace
    asked = np.diff(trace.start)
    spans = np.array_split(np.arange(trace.requests), min(_SPANS, max(trace.requests, 1)))
    total = np.maximum([asked[s].sum() for s in spans], 1)
    return {
        "request": [int(s[-1]) + 1 for s in spans if len(s)],
        "dram": (np.array([replay.hit_dram[s].sum() for s in spans]) / total).tolist(),
        "store": (np.array([replay.hit_store[s].sum() for s in spans]) / total).tolist(),
    }
