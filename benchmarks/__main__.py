"""`python -m benchmarks [--smoke]`: every benchmark, one after the other."""

import argparse
from collections.abc import Sequence

from benchmarks import (
    bench_dataplane,
    bench_gpu,
    bench_gpu_adapter,
    bench_gpu_tier,
    bench_index,
    bench_kernels,
    bench_load,
    bench_log_policy,
    bench_policies,
    bench_read_ahead,
    bench_ssd,
    bench_zstd,
)

BENCHMARKS = (
    bench_kernels,
    bench_gpu,
    bench_gpu_tier,
    bench_gpu_adapter,
    bench_index,
    bench_dataplane,
    bench_load,
    bench_policies,
    bench_log_policy,
    bench_ssd,
    bench_zstd,
    bench_read_ahead,
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where all of them ran; otherwise the first failure's exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: do they run at all?")
    arguments = ["--smoke"] if parser.parse_args(argv).smoke else []
    for benchmark in BENCHMARKS:
        print(f"\n{benchmark.__name__.removeprefix('benchmarks.')}", flush=True)
        status = benchmark.main(arguments)
        if status:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
