"""Parts of `benchmarks.bench_dataplane`."""
