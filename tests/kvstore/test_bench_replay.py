import builtins
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import bench_policies, policy_constants
from kvstore.bench import pictures
from kvstore.bench.sweep import CLASSICS
from kvstore.cli.app import app, main
from kvstore.errors import InvalidRequest
from kvstore.eviction import block_classes

TRACES = Path(__file__).parent / "traces"
WEKA = str(TRACES / "weka.tar.zst")


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", "replay", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_for_programs():
    arguments = (
        "--users",
        "3",
        "--capacity",
        "0.1",
        "--capacity",
        "300",
        "--json",
        "--dram",
        "0.5",
    )
    printed = json.loads(run(WEKA, *arguments, "--policy", "lru", "--policy", "optimum"))
    assert printed["trace"]["name"] == "weka-256-u3-cap60"
    replays = printed["replays"]
    assert [r["policy"] for r in replays] == ["lru", "lru", "optimum", "optimum"]
    assert [r["capacity_blocks"] for r in replays] == [183, 300, 183, 300]
    assert replays[0]["dram_capacity_blocks"] == 91
    for replay in replays:
        assert sum(replay["hits"].values()) == pytest.approx(1)
        assert replay["hits"]["miss"] == pytest.approx(1 - replay["hit_rate"])
    assert replays[2]["hit_rate"] > replays[0]["hit_rate"] > 0
    assert replays[0]["ttft_s"]["mean"] < replays[0]["ttft_without_cache_s"]["mean"]
    again = json.loads(run(WEKA, *arguments, "--policy", "lru", "--policy", "optimum"))
    assert again == printed


def test_another_seed_plays_the_sessions_in_another_order():
    one, two = (
        json.loads(run(WEKA, "--users", "3", "--seed", s, "--policy", "lru", "--json"))["replays"]
        for s in "01"
    )
    assert one != two


def test_a_table_for_people():
    printed = run(str(TRACES / "mooncake.jsonl"), "--policy", "gittins", "--capacity", "0.25")
    assert "150 requests" in printed
    assert "gittins" in printed
    assert "h100" in printed


def test_a_narrow_terminal_cuts_no_number():
    result = CliRunner().invoke(
        app,
        ["bench", "replay", str(TRACES / "mooncake.jsonl"), "--dram", "0.2"],
        env={"COLUMNS": "40"},
    )
    assert result.exit_code == 0
    assert "…" not in result.stdout


def test_one_offs_and_faster_prefill_show():
    plain = json.loads(run(WEKA, "--policy", "lru", "--json", "--capacity", "0.5"))
    scanned = json.loads(
        run(WEKA, "--policy", "lru", "--json", "--capacity", "0.5", "--one-offs", "0.3")
    )
    assert scanned["trace"]["requests"] > plain["trace"]["requests"]
    fast = json.loads(
        run(WEKA, "--policy", "lru", "--json", "--capacity", "0.5", "--cost", "gb300")
    )
    assert fast["replays"][0]["ttft_s"]["p50"] < plain["replays"][0]["ttft_s"]["p50"]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    run(WEKA, "--capacity", "0.1", "--capacity", "0.3", "--dram", "0.5", "--png", str(tmp_path))
    for name in ("hit_rates", "tiers_over_time", "ttft"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"ds41-kvstore\[model\]"):
        pictures.hit_rates("x", {"lru": [(0.1, 0.5)]}, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "no trace at nowhere.jsonl"),
        ([WEKA, "--policy", "mru"], "no policy 'mru'"),
        ([WEKA, "--policy", "lru", "--capacity", "-1"], "not above 0"),
    ],
)
def test_mistakes_end_with_a_message(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kvstore", "bench", "replay", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_at_its_smoke_size(tmp_path, capsys):
    path = tmp_path / "policies.json"
    assert bench_policies.main(["--smoke", "--json", str(path)]) == 0
    traces = json.loads(path.read_text())["traces"]
    assert traces.keys() == {"mooncake-conversation", "weka-cap60"}
    for one in traces.values():
        assert {r["policy"] for r in one["cells"].values()} >= {*CLASSICS, "gittins", "optimum"}
        assert all(r["us_per_access"] > 0 for r in one["cells"].values())
        assert one["scan"].keys() == {"lru", "gittins", "optimum"}
        assert one["targets"].keys() == {"0.25"}
        for row in one["targets"].values():
            assert row["optimum"] >= row["ours"]
    capsys.readouterr()
    assert bench_policies.main(["--table", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for name, one in traces.items():
        assert f"**{name}**" in printed
        for row in one["cells"].values():
            assert f"| {row['policy']} | {row['hit_rate'] * 100:.1f} |" in printed


def test_a_table_goes_on_with_what_is_missing_or_made_by_other_code(tmp_path, monkeypatch):
    path, made, measure = tmp_path / "policies.json", [], bench_policies.measure
    run = ["--smoke", "--only", "mooncake-conversation", "--json", str(path)]

    def break_off(trace, policy, capacity):
        if policy == "arc" and not made.count("arc"):
            made.append(policy)
            raise KeyboardInterrupt
        made.append(policy)
        return measure(trace, policy, capacity)

    monkeypatch.setattr(bench_policies, "measure", break_off)
    with pytest.raises(KeyboardInterrupt):
        bench_policies.main(run)
    assert made == ["lru", "sieve", "s3_fifo", "arc"]
    made[:] = ["arc"]
    assert bench_policies.main(run) == 0
    assert made[1:] == ["arc", "w_tinylfu", "optimum", "gittins", "lru", "optimum", "gittins"]
    made[:] = ["arc"]
    assert bench_policies.main(run) == 0
    assert made == ["arc"]
    whole = json.loads(path.read_text())
    whole["traces"]["mooncake-conversation"]["cells"]["sieve@0.25"]["version"] = "other"
    path.write_text(json.dumps(whole))
    assert bench_policies.main(run) == 0
    assert made == ["arc", "sieve"]


def test_the_version_of_a_cell_is_that_of_the_code_that_makes_it(monkeypatch):
    names = [*CLASSICS, "optimum", "gittins"]
    versions = {name: bench_policies.version_of(name) for name in names}
    assert len(set(versions.values())) == len(names)
    assert bench_policies.version_of("gittins+hints") == versions["gittins"]
    read_text = Path.read_text

    def differ_with(file):
        def changed(path):
            return read_text(path) + ("\nchanged = 1\n" if path.name == file else "")

        monkeypatch.setattr(Path, "read_text", changed)
        return {n for n in names if bench_policies.version_of(n) != versions[n]}

    assert differ_with("arc.py") == {"arc"}
    assert differ_with("queues.py") == {"sieve", "s3_fifo", "arc", "w_tinylfu"}
    assert differ_with("reuse_times.py") == {"gittins"}
    assert differ_with("belady.py") == {"optimum"}
    assert differ_with("weka.py") == set(names)
    assert differ_with("lease.py") == set()
    monkeypatch.setattr(Path, "read_text", lambda path: read_text(path) + "\n# a comment\n")
    assert all(bench_policies.version_of(name) == versions[name] for name in names)


def test_better_guesses_hit_more(tmp_path):
    path = tmp_path / "policies.json"
    chosen = ["--only", "weka-cap60", "--json", str(path)]
    assert bench_policies.main(["--smoke", "--foresight", *chosen]) == 0
    rates = json.loads(path.read_text())["traces"]["weka-cap60"]["foresight"]["0.02"]
    assert rates["1.0"] > rates["0.0"]


def test_costs_of_every_policy(tmp_path):
    path = tmp_path / "policies.json"
    chosen = ["--only", "mooncake-conversation", "--json", str(path)]
    assert bench_policies.main(["--smoke", "--costs", *chosen]) == 0
    costs = json.loads(path.read_text())["traces"]["mooncake-conversation"]["us_per_access"]
    assert costs.keys() == {*CLASSICS, "gittins", "optimum"}
    assert min(costs.values()) > 0


def test_the_table_needs_traces(capsys):
    assert bench_policies.main([]) == 2
    assert "--traces" in capsys.readouterr().err


def test_constants_are_moved_one_at_a_time_and_put_back(tmp_path, capsys):
    path, gain = tmp_path / "constants.json", block_classes._PACE_GAIN
    assert policy_constants.main(["--smoke", "--json", str(path)]) == 0
    assert gain == block_classes._PACE_GAIN
    for one in json.loads(path.read_text()).values():
        best, worst = one["best and worst"]
        for rate in (one["as they are"], one["chosen on the first half"][1]):
            assert worst <= rate <= best
    printed = capsys.readouterr().out
    assert all(f"{name.strip('_').lower()} " in printed for _, name in policy_constants.MOVES)
    with policy_constants.moved(block_classes, "_PACE_GAIN", 1.0):
        assert block_classes.moved(0.0, 1.5) == math.log(2)
    assert policy_constants.main([]) == 2
