"""A synthetic sequence cache of any length, and a bound on what the process may allocate.

As a program it prints what a decode step at the last of a million positions costs.
"""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from large_weights import status_bytes

from model_adapter import records
from model_adapter.cache import SequenceCache
from model_adapter.model import Model

POSITIONS = 1 << 20
GROWTH_BYTES = 64 << 20
_GROUPS = {"main": 16, "index": 32}
_SCALES = {"main": (0x30, 0x40), "index": (123, 128)}
"""Scale bytes of values of ordinary size: e4m3 of 0.5 … 2, ue8m0 of 1/16 … 1."""


def synthetic_cache(model: Model, tokens: int, seed: int = 0) -> SequenceCache:
    """A cache that looks as if `tokens` tokens had gone through `model`: every record is valid, and
    no two are alike.

    `tokens` must be a multiple of the compression ratios, so that no group is open.
    """
    config, rng = model.config, np.random.default_rng(seed)
    assert tokens % config.group_tokens == 0
    cache = model.new_cache()
    cache.reserve(config.positions_max)
    cache.append_tokens(rng.integers(11, 2000, tokens).astype(np.int32))
    for spec in config.global_caches:
        left, low, high = tokens // spec.ratio, *_SCALES[spec.role]
        dim = config.head_dim if spec.role == "main" else config.index_dim
        while left:
            rows = rng.integers(0, 256, (min(left, 1 << 16), spec.row_bytes), np.uint8)
            scales = rows[:, -(dim // _GROUPS[spec.role]) :]
            scales[:] = scales % (high - low) + low
            cache.rows(spec).append(rows)
            left -= len(rows)
    for window in cache.windows:
        values = rng.standard_normal((config.window, config.head_dim), np.float32)
        window.restart(tokens - config.window)
        window.append(records.pack(records.WINDOW, torch.from_numpy(values)))
    for group in cache.open_groups.values():
        group.restart(tokens)
    cache.length = tokens
    return cache


def index_values(rows: records.Records) -> npt.NDArray[np.float32]:
    """Index keys [N, D], some at a time."""
    return np.concatenate(
        [records.unpack(records.INDEX, rows[i : i + 8192]) for i in range(0, len(rows), 8192)]
    )


@contextmanager
def growth_limited(growth_bytes: int) -> Iterator[None]:
    """The process may allocate so much more private memory and no more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = status_bytes("VmData") + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def main() -> None:
    import released_records

    torch.set_num_threads(1)
    model = released_records.narrow_model()
    cache = synthetic_cache(model, POSITIONS - 2)
    model.decode(cache, 5)
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, starts anew
    held, start = status_bytes("VmRSS"), time.process_time()
    with growth_limited(GROWTH_BYTES):
        model.decode(cache, 6)
    report = {
        "position": cache.length - 1,
        "global_kv_bytes": sum(cache.rows(s).rows.nbytes for s in model.config.global_caches),
        "cpu_s": time.process_time() - start,
        "resident_growth_bytes_max": status_bytes("VmHWM") - held,
        "growth_limit_bytes": GROWTH_BYTES,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
