"""The HBM tier on a CUDA device: promotion, reading back, and from `acquire` to rows in the engine.

* `promotion`: frames from the pinned arena into the pool by the store's own copies, checksums
  included and without them, against one bare copy of as many bytes from pinned memory.
* `read_back`: frames from the pool to the arena, verified, against the bare copy the other way.
* `acquire_to_rows`: a client process' lease, its blocks' rows copied device to device into tensors
  of its own, and the look at the generations; microseconds.

What is compared takes turns in one run. Without CuPy or a device nothing is measured, and the
output says so. `--simulated` runs the same steps on the simulated device; its numbers mean nothing.
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

import torch

from benchmarks.dataplane.daemon import chain, daemon_process, namespace
from kvstore import DS41F_LAYOUT, Tier, connect
from kvstore.migration.hbm_copies import CopyIn, HbmCopies, HbmJob
from kvstore.migration.promotion import Load
from kvstore.testing.tiers_frames import NAMESPACE_ID, key_of, make_frame
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.cupy_device import find_devices
from kvstore.tiers.hbm.device import Device, NoDevice
from kvstore.tiers.hbm.simulated import SimulatedDevice
from model_adapter.devices import device_of
from model_adapter.session.leased_blocks import LeasedBlocks

RATIO_TARGET = 0.9
WAIT_S = 60.0
VERIFY_THREADS = 4


@dataclass(frozen=True, slots=True)
class Size:
    """`blocks` of the released layout per round."""

    blocks: int
    rounds: int


FULL = Size(blocks=512, rounds=15)
SMOKE = Size(blocks=8, rounds=2)


class Bench:
    """An arena, a pool, and frames in both."""

    def __init__(self, device: Device, size: Size) -> None:
        sections = DS41F_LAYOUT.section_bytes
        frames = [make_frame(key_of(i), sections) for i in range(size.blocks)]
        self.frame_bytes, self.size = len(frames[0]), size
        total = self.frame_bytes * size.blocks
        self.arena, self.tier = DramTier(2 * total), HbmTier([device], total)
        device.register(self.arena.memory)
        self.copies = HbmCopies(self.tier, self.arena, WAIT_S, VERIFY_THREADS)
        self.there = [self._alloc(self.arena) for _ in frames]
        self.back = [self._alloc(self.arena) for _ in frames]
        self.slots = [self._alloc(self.tier) for _ in frames]
        for slot, frame in zip(self.there, frames, strict=True):
            self.arena.view(slot)[:] = frame
        self.bytes = total

    @staticmethod
    def _alloc(tier: Any) -> Any:
        slot = tier.alloc(len(make_frame(key_of(0), DS41F_LAYOUT.section_bytes)))
        assert slot is not None
        return slot

    def _timed(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return self.bytes / (time.perf_counter() - began) / 1e9

    def bare(self, into_device: bool) -> None:
        """As many bytes in one copy."""
        host = self.arena.memory[: self.bytes]
        with self.tier.stream(0) as stream:
            if into_device:
                stream.copy_in(0, host)
            else:
                stream.copy_out(self.arena.memory[self.bytes :], 0)
            assert stream.record().wait(WAIT_S)

    def frame_by_frame(self) -> None:
        """The store's copies without its checksums."""
        with self.tier.stream(0) as stream:
            for there, slot in zip(self.there, self.slots, strict=True):
                stream.copy_in(self.tier.place(slot)[1], self.arena.view(there))
            assert stream.record().wait(WAIT_S)

    def promote(self) -> None:
        """As the lane's job does it."""
        pairs = zip(self.there, self.slots, strict=True)
        copies = [CopyIn(i, key_of(i), NAMESPACE_ID, *pair) for i, pair in enumerate(pairs)]
        result = self.copies.run(HbmJob(copies=copies))
        assert result.errors == [None] * len(copies)

    def read_back(self) -> None:
        """As a read by way of the host does it."""
        loads = [
            Load(i, key_of(i), NAMESPACE_ID, None, slot, self.frame_bytes, back)
            for i, (slot, back) in enumerate(zip(self.slots, self.back, strict=True))
        ]
        results, _ = self.copies.read(loads, [self.arena.view(slot) for slot in self.back])
        assert not any(loaded.error for loaded in results)

    def run(self) -> list[dict[str, Any]]:
        """A row per kind of copy: GB/s, and the median ratio to the bare copy beside it."""
        kinds: dict[str, tuple[Callable[[], None], bool]] = {
            "promotion": (self.promote, True),
            "promotion_unverified": (self.frame_by_frame, True),
            "read_back": (self.read_back, False),
        }
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for n in range(self.size.rounds + 1):
            for name, (work, into) in kinds.items():
                rate, limit = self._timed(work), self._timed(lambda into=into: self.bare(into))
                if n:  # the first warms up
                    rates[name].append((rate, limit))
        return [
            {
                "what": name,
                "bytes": self.bytes,
                "gb_s": statistics.median(own for own, _ in found),
                "bare_gb_s": statistics.median(limit for _, limit in found),
                "to_bare": statistics.median(own / limit for own, limit in found),
            }
            for name, found in rates.items()
        ]

    def close(self) -> None:
        """Give the memory back."""
        self.copies.close(WAIT_S)
        self.tier.close()
        self.arena.close()


def acquire_to_rows(size: Size, device: str) -> dict[str, Any]:
    """Microseconds from `acquire` until all sections lie in the engine's memory."""
    blocks = size.blocks // 2
    tier_bytes = 2 * blocks * (256 << 10)
    settings = {
        "hbm.device": device,
        "hbm.budget_bytes": tier_bytes,
        "hbm.held_fraction_max": 1,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon_process(f"unix://{folder}/kv.sock", str(2 * tier_bytes), None, "", settings) as (
            url,
            _,
        ),
        connect(f"{url}?data=shared") as client,
    ):
        kind = client.open_hbm()
        assert kind is not None
        return {"blocks": blocks, "kind": kind, **_lease_rounds(client, blocks, size, kind)}


def _lease_rounds(client: Any, blocks: int, size: Size, kind: str) -> dict[str, Any]:
    ns = namespace(client, DS41F_LAYOUT, "gpu-tier")
    made = chain(ns, blocks, seed=0)
    keys = [block.key for block in made]
    client.put(ns, made)
    client.acquire(ns, keys).release()
    _await_promotion(client, blocks)
    tokens = blocks * DS41F_LAYOUT.block_tokens
    device = device_of("cuda" if kind == "cuda" else "cpu")
    leased = LeasedBlocks(client, DS41F_LAYOUT.block_tokens, device)
    rows = [
        torch.empty((tokens // s.ratio, s.row_bytes), dtype=torch.uint8, device=device)
        for s in DS41F_LAYOUT.sections
    ]
    took = []
    for _ in range(size.rounds):
        began = time.perf_counter()
        with client.acquire(ns, keys) as lease:
            for number, section in enumerate(rows):
                leased.load_section(lease, keys, number, 0, section)
            took.append(time.perf_counter() - began)
            assert leased.all_in_hbm(lease)
    return {
        "us": statistics.median(took) * 1e6,
        "bytes": blocks * DS41F_LAYOUT.block_bytes,
    }


def _await_promotion(client: Any, blocks: int) -> None:
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        if any(t.tier is Tier.HBM and t.objects == blocks for t in client.stat().tiers):
            return
        time.sleep(0.01)
    raise RuntimeError("the blocks were not promoted in time")


def run(device: Device, size: Size) -> dict[str, Any]:
    """All rows, on one device."""
    bench = Bench(device, size)
    try:
        rows = bench.run()
    finally:
        bench.close()
    kind = "cupy" if device.kind == "cuda" else device.kind
    return {
        "measured": device.kind == "cuda",
        "device": device.name,
        "results": rows,
        "acquire_to_rows": acquire_to_rows(size, kind),
    }


def print_report(report: dict[str, Any]) -> None:
    """One line per row."""
    note = "" if report["measured"] else "; NOT MEASURED ON A GPU, the numbers mean nothing"
    print(f"on {report['device']}{note}")
    for row in report["results"]:
        print(f"{row['what']:24} {row['gb_s']:8.2f} GB/s  {row['to_bare']:6.3f} of a bare copy")
    lease = report["acquire_to_rows"]
    print(f"acquire to rows: {lease['us']:.0f} µs for {lease['blocks']} blocks")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="bench_gpu_tier", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    size = SMOKE if options.smoke else FULL
    report: dict[str, Any] = {"measured": False, "results": []}
    try:
        device = SimulatedDevice(0) if options.simulated else find_devices([0])[0]
    except NoDevice as e:
        report["reason"] = str(e)
        print(f"not measured: no GPU ({e})")
    else:
        report = run(device, size)
        print_report(report)
    if options.json:
        report = {"benchmark": "gpu_tier", "smoke": options.smoke, **report}
        report["ratio_target"] = RATIO_TARGET
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
