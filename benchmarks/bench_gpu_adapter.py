"""The adapter on a CUDA device beside the same adapter on the CPU, in turns in one run.

* `prefill`: tokens per second of a prompt, every layer at every position.
* `decode`: steps per second behind it.
* `hit`: bytes per second of a prefix out of a store's HBM into the caches, and by way of the host.

A random checkpoint of a preset; what is compared is the device, not the model. Without a device
nothing is measured, and the output says so. `--simulated` runs the same steps with the CPU in the
device's place and HBM on the simulated device; its numbers mean nothing.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore import Client, Namespace, Tier, connect
from model_adapter.cache import SequenceCache
from model_adapter.devices import CPU, device_of, finish
from model_adapter.errors import InputError
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import StoreBlocks, namespace_of

WAIT_S = 60.0
HBM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """`tokens` of the prompt, `steps` decoded behind it, `rounds` of everything."""

    preset: str
    tokens: int
    block_tokens: int
    steps: int
    rounds: int


FULL = Size("small", tokens=4096, block_tokens=256, steps=32, rounds=5)
SMOKE = Size("tiny", tokens=96, block_tokens=32, steps=2, rounds=1)

Rates = dict[str, list[float]]


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds until what `work` queued is done."""
    finish(device)
    began = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - began


def compute(model: Model, ids: np.ndarray, size: Size, name: str, rates: Rates) -> SequenceCache:
    """One round of prefill and decode; the cache that it leaves, without what was decoded."""
    cache = model.new_cache()
    took = timed(model.device, lambda: model.prefill(cache, ids, "exact"))
    rates.setdefault(f"prefill_{name}", []).append(len(ids) / took)

    def decode() -> None:
        for token in range(11, 11 + size.steps):
            model.decode(cache, token)

    rates.setdefault(f"decode_{name}", []).append(size.steps / timed(model.device, decode))
    cache.truncate(len(ids))
    return cache


class _ByHost:
    """A client that does not show what lies in HBM."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def view_hbm(self, lease: Any, keys: Sequence[bytes], sections: Any = None) -> list[None]:
        return [None] * len(keys)


def take(model: Model, client: Any, namespace: Namespace, ids: np.ndarray) -> tuple[int, float]:
    """Bytes of a hit into a fresh cache, and the seconds that it took."""
    source = StoreBlocks(client, namespace, read_ahead_bytes_min=None)
    found, cache = source.find(ids), model.new_cache()
    cache.reserve(len(ids))
    loaded: list[int] = []
    took = timed(
        model.device,
        lambda: loaded.append(source.load(found, found.blocks, cache).payload_bytes),
    )
    return loaded[0], took


def put_into_hbm(
    model: Model, client: Client, namespace: Namespace, ids: np.ndarray, cache: SequenceCache
) -> None:
    """Store a sequence's blocks, and wait until a hit has brought them into HBM."""
    stored = StoreBlocks(client, namespace).store(ids, 0, cache)
    take(model, client, namespace, ids)
    ends_s = time.monotonic() + WAIT_S
    while not any(t.tier is Tier.HBM and t.objects == stored.stored for t in client.stat().tiers):
        if time.monotonic() > ends_s:
            raise RuntimeError("the blocks were not promoted in time")
        time.sleep(0.01)


def run(device: torch.device, size: Size) -> dict[str, Any]:
    """Medians per second, by what and where."""
    ids = np.random.default_rng(0).integers(11, 500, size.tokens).astype(np.uint32)
    rates: Rates = {}
    hbm = {"device": "cupy" if device.type == "cuda" else "simulated", "budget_bytes": HBM_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        make_checkpoint(size.preset, 0, checkpoint)
        here = Model.load(checkpoint)
        there = Model.load(checkpoint, device=device)
        namespace = namespace_of(there, checkpoint, size.block_tokens)
        for model in (here, there):  # reads the weights
            compute(model, ids, size, "", {})
        with connect(f"file://{folder}/store", hbm=hbm) as client:
            client.open_hbm()
            for n in range(size.rounds):
                compute(here, ids, size, "cpu", rates)
                cache = compute(there, ids, size, "device", rates)
                if n == 0:
                    put_into_hbm(there, client, namespace, ids, cache)
                for name, seen in (("device", client), ("cpu", _ByHost(client))):
                    moved, took = take(there, seen, namespace, ids)
                    rates.setdefault(f"hit_{name}", []).append(moved / took)
    return {what: statistics.median(found) for what, found in rates.items()}


def print_report(report: dict[str, Any]) -> None:
    """One line per row."""
    note = "" if report["measured"] else "; NOT MEASURED ON A GPU, the numbers mean nothing"
    print(f"on {report['device']}{note}")
    rates = report["per_second"]
    for what, unit in (("prefill", "tokens/s"), ("decode", "steps/s"), ("hit", "B/s")):
        mine, other = rates[f"{what}_device"], rates[f"{what}_cpu"]
        print(f"{what:8} {mine:14,.1f} {unit:9} {mine / other:7.2f} of by way of the CPU")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="bench_gpu_adapter", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--simulated", action="store_true", help="the CPU in the device's place")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    size = SMOKE if options.smoke else FULL
    report: dict[str, Any] = {"benchmark": "gpu_adapter", "measured": False}
    try:
        device = CPU if options.simulated else device_of("cuda")
    except InputError as e:
        report["reason"] = str(e)
        print(f"not measured: {e}")
    else:
        report["measured"] = device.type == "cuda"
        report["device"] = (
            torch.cuda.get_device_name(device) if report["measured"] else "the CPU, simulated"
        )
        report |= {"preset": size.preset, "tokens": size.tokens, "per_second": run(device, size)}
        print_report(report)
    if options.json:
        report["smoke"] = options.smoke
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
