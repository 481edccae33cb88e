"""What `bench_zstd` measures: cache records, and what compression makes of them."""
