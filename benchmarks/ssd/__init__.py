"""What `bench_ssd` measures: the log, the limit of the disk (fio), other ways to keep objects."""
