"""What reading sections in the order of need hides: a replay that starts while later ones arrive.

A prompt's blocks lie in a daemon's DRAM (read over the data plane, and over gRPC, the slow way), or
on its SSD, cold; the model takes them up by a bounded replay of its window and a suffix. A CPU
computes for much longer than it reads, so they are also read over a simulated line, so slow that
reading alone takes as long as computing alone: as on a GPU, or between hosts.

Three ways, in turns within one run: everything read before the computation starts; sections in the
order of need beside it; and the computation alone, its blocks in the process. Reported: time to the
last logits of each, and the share of the reading beside it that the computation did not wait for.
Rows are random values through the real quantisers; the model has the released records (288, 68 and
528 bytes) and narrow layers.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import kvstore
from benchmarks.dataplane.daemon import daemon
from benchmarks.dataplane.measure import in_turns
from kvstore import BlockData, BlockPut, Client, Tier
from model_adapter import records
from model_adapter.cache import SequenceCache
from model_adapter.make_checkpoint import write_checkpoint
from model_adapter.model import Model
from model_adapter.presets import preset_config
from model_adapter.session import StoreBlocks, namespace_of
from model_adapter.session.source import TokenIds

TOKENS, TOKENS_SMOKE = 8 << 10, 2 << 10
SUFFIX_TOKENS = 64
ROUNDS, ROUNDS_SMOKE = 7, 1
_SEED = 0
_WIDTHS = ("head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "index_topk")
_CANDIDATES = ("candidate_topk_blocks", "candidate_block_size", "max_position_embeddings")


class SimulatedLine:
    """A client behind a line of so many bytes per second: reads sleep for what they bring."""

    def __init__(self, client: Client, bytes_per_s: float) -> None:
        self._client = client
        self._bytes_per_s = bytes_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def read(self, *args: Any) -> list[BlockData]:
        """As the client's, later."""
        start = time.perf_counter()
        blocks = self._client.read(*args)
        size = sum(len(section) for block in blocks for section in block.sections)
        time.sleep(max(0.0, size / self._bytes_per_s - (time.perf_counter() - start)))
        return blocks


@dataclass(slots=True)
class Bench:
    """A model, its blocks in a store and in the process."""

    model: Model
    client: Client | SimulatedLine
    namespace: kvstore.Namespace
    ids: TokenIds
    blocks: list[list[records.Records]]

    def source(self, ahead: bool) -> StoreBlocks:
        """Of either kind."""
        return StoreBlocks(
            cast(Client, self.client), self.namespace, read_ahead_bytes_min=0 if ahead else None
        )

    def from_store(self, ahead: bool) -> tuple[float, float]:
        """Look up, read, compute. Seconds that reading beside took, and that were waited for it."""
        source, cache = self.source(ahead), self.model.new_cache()
        cache.reserve(len(self.ids))
        loaded = source.load(source.find(self.ids), len(self.blocks), cache)
        if loaded.blocks != len(self.blocks):
            raise RuntimeError(f"{loaded.blocks} of {len(self.blocks)} blocks came: {loaded.error}")
        self._resume(cache)
        return (loaded.reading.join().seconds if loaded.reading else 0.0), cache.waited_s

    def read_only(self) -> None:
        """Look up and read."""
        source, cache = self.source(False), self.model.new_cache()
        cache.reserve(len(self.ids))
        source.load(source.find(self.ids), len(self.blocks), cache)

    def fresh(self) -> SequenceCache:
        """A cache with the blocks, from the process."""
        cache = self.model.new_cache()
        cache.reserve(len(self.ids))
        for i, sections in enumerate(self.blocks):
            cache.load_block(i, self.namespace.layout.block_tokens, sections)
        return cache

    def _resume(self, cache: SequenceCache) -> None:
        hit = len(self.blocks) * self.namespace.layout.block_tokens
        self.model.resume(cache, self.ids, hit)

    def compute(self, cache: SequenceCache) -> None:
        """The computation alone."""
        self._resume(cache)


def _config(smoke: bool) -> dict[str, Any]:
    config = preset_config("tiny" if smoke else "small")
    if not smoke:
        wide = preset_config("wide")["text_config"]
        config["text_config"] |= {key: wide[key] for key in (*_WIDTHS, *_CANDIDATES)}
        config["text_config"]["rope_parameters"] = wide["rope_parameters"]
    return config


def _blocks(model: Model, tokens: int, block_tokens: int) -> list[list[records.Records]]:
    """Random rows, quantised as the model's are."""
    torch.manual_seed(_SEED)
    config, blocks = model.config, tokens // block_tokens
    widths = {"main": (records.MAIN, config.head_dim), "index": (records.INDEX, config.index_dim)}
    columns = []
    for spec in config.global_caches:
        kind, width = widths[spec.role]
        rows = records.host(records.pack(kind, torch.randn(tokens // spec.ratio, width)))
        columns.append(np.split(rows, blocks))
    return [list(sections) for sections in zip(*columns, strict=True)]


def _put(bench: Bench) -> None:
    handle = bench.client.open_namespace(bench.namespace)
    keys = [handle.id, *handle.block_keys(bench.ids)]
    puts = [BlockPut(keys[i + 1], keys[i], rows) for i, rows in enumerate(bench.blocks)]
    for at in range(0, len(puts), 64):
        bench.client.put(handle, puts[at : at + 64])
    bench.client.flush()


def _evict_from_dram(bench: Bench) -> None:
    handle = bench.client.open_namespace(bench.namespace)
    bench.client.evict(handle, tier=Tier.DRAM)


def _benches(
    directory: Path, smoke: bool, tokens: int, listen: str
) -> Iterator[tuple[str, Bench, bool]]:
    """Where the blocks come from, and whether they are on SSD alone before each reading."""
    write_checkpoint(_config(smoke), _SEED, directory / "checkpoint")
    model = Model.load(directory / "checkpoint")
    namespace = namespace_of(model, directory / "checkpoint")
    ids = np.random.default_rng(_SEED).integers(11, 500, tokens + SUFFIX_TOKENS).astype(np.uint32)
    blocks = _blocks(model, tokens, namespace.layout.block_tokens)
    with (
        daemon(listen, "1GiB", directory / "store", "2GiB") as url,
        kvstore.connect(url, deadline_s=60.0) as client,
    ):
        bench = Bench(model, client, namespace, ids, blocks)
        _put(bench)
        yield "dram", bench, False
        with kvstore.connect(f"{url}?data=grpc", deadline_s=60.0) as slow:
            yield "grpc", replace(bench, client=slow), False
        yield "ssd", bench, True
        size = len(blocks) * namespace.layout.block_bytes
        seconds = _seconds(lambda: bench.compute(bench.fresh()))
        line = SimulatedLine(client, size / seconds)
        yield "simulated line", replace(bench, client=line), False


def _seconds(operation: Callable[[], None]) -> float:
    """The least of three runs."""
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        operation()
        runs.append(time.perf_counter() - start)
    return min(runs)


def measure(bench: Bench, rounds: int, cold: bool) -> dict[str, Any]:
    """The three ways in turns. `cold`: blocks are on SSD alone before each reading."""
    prepared: list[SequenceCache] = []
    beside: list[tuple[float, float]] = []

    before = {"compute alone": lambda: prepared.append(bench.fresh())}
    if cold:
        for name in ("read, then compute", "read beside", "read alone"):
            before[name] = lambda: _evict_from_dram(bench)
    timings = in_turns(
        {
            "read, then compute": lambda: bench.from_store(False),
            "read beside": lambda: beside.append(bench.from_store(True)),
            "read alone": bench.read_only,
            "compute alone": lambda: bench.compute(prepared.pop()),
        },
        rounds,
        before,
    )
    p50 = {name: t.p50 for name, t in timings.items()}
    counted = beside[1:]
    return {
        "seconds": {name: t.as_json() for name, t in timings.items()},
        "beside_to_before": p50["read beside"] / p50["read, then compute"],
        "hidden_share": float(np.median([1 - waited / read for read, waited in counted])),
        "reading_s_p50": float(np.median([read for read, _ in counted])),
        "waited_s_p50": float(np.median([waited for _, waited in counted])),
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0, or the error of whatever failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--tokens", type=int, help="length of the hit; whole blocks of 256")
    parser.add_argument("--rounds", type=int, help="per way")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    tokens = args.tokens or (TOKENS_SMOKE if args.smoke else TOKENS)
    rounds = args.rounds or (ROUNDS_SMOKE if args.smoke else ROUNDS)
    # one thread computes, the other core is the reader's and the daemon's
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-ahead-") as name:
        directory = Path(name)
        listen = f"unix://{directory}/kv.sock"
        for what, bench, cold in _benches(directory, args.smoke, tokens, listen):
            results[what] = measure(bench, rounds, cold)
            _print(what, results[what])
            size = len(bench.blocks) * bench.namespace.layout.block_bytes
    report = {
        "smoke": args.smoke,
        "tokens": tokens,
        "payload_bytes": size,
        "machine": {"cpus": torch.get_num_threads(), "arch": platform.machine()},
        "results": results,
        "seconds": time.perf_counter() - start,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _print(what: str, result: dict[str, Any]) -> None:
    for name, t in result["seconds"].items():
        print(f"  {what:14} {name:20} {t['p50_us'] / 1e3:9.1f} ms")
    print(
        f"  {what:14} beside ÷ before     {result['beside_to_before']:9.2f}; reading beside took "
        f"{result['reading_s_p50'] * 1e3:.1f} ms, of which {result['hidden_share']:.1%} hidden, "
        f"{result['waited_s_p50'] * 1e3:.1f} ms waited for",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
