"""`python -m benchmarks` knows every benchmark."""

from pathlib import Path

from benchmarks import __main__ as every


def test_every_benchmark_is_in_the_list():
    files = {p.stem for p in Path(every.__file__).parent.glob("bench_*.py")}
    assert files == {b.__name__.rpartition(".")[2] for b in every.BENCHMARKS}


def test_a_failure_ends_the_run_with_its_status(monkeypatch):
    ran = []
    for n, benchmark in enumerate(every.BENCHMARKS):
        status = 3 if n == 1 else 0
        monkeypatch.setattr(benchmark, "main", lambda argv, s=status: ran.append((s, argv)) or s)
    assert every.main(["--smoke"]) == 3
    assert ran == [(0, ["--smoke"]), (3, ["--smoke"])]
