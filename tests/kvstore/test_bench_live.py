"""Live replays: real bytes against daemons, beside the simulator."""

import json
from pathlib import Path

import numpy as np
import pytest
from daemons import Daemon
from typer.testing import CliRunner

import kvstore
from kvstore.bench import live, replay
from kvstore.bench.cost import PRESETS
from kvstore.bench.live import Contents, LiveRun, continues, layout_for
from kvstore.bench.read import read
from kvstore.bench.report import live_figures, replay_figures
from kvstore.bench.trace import Request, build, head
from kvstore.bench.weka import Users
from kvstore.cli.app import app
from kvstore.config import SsdConfig
from kvstore.errors import InvalidRequest, Unavailable

WEKA = Path(__file__).parent / "traces" / "weka.tar.zst"
BLOCK_TOKENS = 16
SLOT_BYTES = 16 << 10
"""What a block of 16 tokens in the released layout takes in the arena."""


def sessions_trace(seed, sessions=12, turns=9, step_s=0.3):
    """Sessions that grow, in random order, behind one shared first block."""
    random = np.random.default_rng(seed)
    order = random.permutation(np.repeat(np.arange(sessions), turns))
    length = random.integers(2, 8, sessions)
    requests = []
    for i, s in enumerate(order.tolist()):
        length[s] += random.integers(0, 3)
        keys = [-1, *(1000 * s + k for k in range(length[s]))]
        requests.append(Request(i * step_s, keys, BLOCK_TOKENS * len(keys) + 5))
    return build("sessions", BLOCK_TOKENS, requests)


@pytest.fixture(scope="module")
def dram_daemon(tmp_path_factory):
    socket = tmp_path_factory.mktemp("dram") / "d.sock"
    settings = {"dram.budget_bytes": 60 * SLOT_BYTES, "eviction.policy": "lru"}
    daemon = Daemon(f"unix://{socket}", None, settings).start()
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def ssd_daemon(tmp_path_factory):
    place = tmp_path_factory.mktemp("ssd")
    settings = {
        "dram.budget_bytes": 48 * SLOT_BYTES,
        "ssd.budget_bytes": "3MiB",
        "ssd.segment_bytes": 16 * SLOT_BYTES + 4096,
        "ssd.free_floor_bytes": 0,
        "ssd.sync": "false",
        "eviction.policy": "lru",
    }
    if "lifetime_min_s" in SsdConfig.model_fields:
        settings["ssd.lifetime_min_s"] = 0
    daemon = Daemon(f"unix://{place / 'd.sock'}", place / "store", settings).start()
    yield daemon
    daemon.kill()


def played(daemon, trace, **how):
    with kvstore.connect(daemon.url, deadline_s=30.0) as client:
        run = live.play(client, trace, **how)
        assert client.stat().blocks == 0, "the run cleans up after itself"
    assert run.wrong_blocks == 0
    return run


@pytest.mark.parametrize("seed", range(2))
def test_one_at_a_time_hits_exactly_what_the_simulator_says(dram_daemon, seed):
    trace = sessions_trace(seed)
    run = played(dram_daemon, trace, seed=seed)
    assert run.capacities() == (60, 0)
    simulated = run.simulated("lru")
    assert run.hit_dram.tolist() == simulated.hit_store.tolist()
    assert run.evicted == simulated.evicted > 0
    assert run.puts["STORED"] == simulated.added
    assert 0.2 < simulated.hit_rate < trace.unbounded_hit_rate()


def test_two_tiers_agree_with_the_simulator(ssd_daemon):
    trace = sessions_trace(3, sessions=24, turns=8)
    run = played(ssd_daemon, trace)
    figures, simulated = (
        live_figures(run, "lru", PRESETS["h100"]),
        replay_figures(run.simulated("lru"), PRESETS["h100"]),
    )
    assert run.counters["evicted_ssd_blocks"] > 0
    # the log's room comes and goes by segments of 16 blocks, a tenth of it
    assert figures["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.05)
    assert figures["hits"].keys() == {"dram", "ssd", "miss"} == figures["requests"].keys()
    for shares in (figures["hits"], figures["requests"]):
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share > 0 for share in shares.values())
    measured = figures["measured"]
    assert measured["counters"]["lookup_hit_ssd_blocks"] > 0
    assert measured["fetch_s"]["p50"] > 0
    assert measured["fetch_bytes_per_s"] > 0
    assert measured["ttft_s"]["p99"] >= measured["ttft_s"]["p50"] > 0
    assert measured["puts"]["STORED"] == run.counters["put_stored_blocks"]


def test_several_sessions_at_compressed_times(dram_daemon):
    trace = sessions_trace(5)
    alone = played(dram_daemon, trace)
    run = played(dram_daemon, trace, sessions=4, speedup=40.0)
    assert run.seconds > (trace.time_s[-1] - trace.time_s[0]) / 40
    rates = [r.as_replay("").hit_rate for r in (alone, run)]
    assert rates[1] == pytest.approx(rates[0], abs=0.1)
    assert (np.diff(run.start_s) >= 0).all()


def test_a_request_waits_for_the_one_that_it_continues():
    def request(keys):
        return Request(0.0, keys, 99)

    chains = [[1, 2, 3], [1, 20], [1, 2, 3, 4], [1, 20, 21], [1, 2, 3, 4, 5], [7]]
    trace = build("t", 16, map(request, chains))
    # the shared first block alone makes no session
    assert continues(trace) == [-1, -1, 0, 1, 2, -1]


def test_bytes_follow_from_block_and_seed():
    layout = layout_for(sessions_trace(0, 2, 2))
    assert layout.block_bytes == 890 * BLOCK_TOKENS
    contents, again = Contents(layout, 1), Contents(layout, 1)
    seen = {b"".join(s.tobytes() for s in contents.sections(block)) for block in range(2000)}
    assert len(seen) == 2000
    sections = [memoryview(s.tobytes()) for s in again.sections(7)]
    assert contents.same(7, sections)
    assert not contents.same(8, sections)
    assert not contents.same(7, sections[:-1])
    assert not Contents(layout, 2).same(7, sections)
    flipped = bytearray(sections[3])
    flipped[-1] ^= 1
    assert not contents.same(7, [*sections[:3], memoryview(flipped), *sections[4:]])


def test_blocks_that_the_layout_cannot_have_are_named():
    trace = build("odd", 5, [Request(0.0, [1], 5)])
    with pytest.raises(InvalidRequest, match="blocks of odd can't have the released layout"):
        layout_for(trace)


def run_command(*arguments):
    return CliRunner().invoke(app, ["bench", "replay", *arguments])


def generic(path, trace):
    """The trace as a file of the generic format."""
    lines = [
        {"time_s": trace.time_s[r], "block_tokens": BLOCK_TOKENS, "blocks": trace.chain(r).tolist()}
        for r in range(trace.requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_command_plays_and_compares(dram_daemon, tmp_path):
    path = generic(tmp_path / "trace.jsonl", sessions_trace(1))
    how = ("--live", dram_daemon.url, "--policy", "lru", "--sessions", "1", "--requests", "90")
    result = run_command(path, *how, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    lived, simulated = report["replays"]
    assert (lived["policy"], simulated["policy"]) == ("lru, live", "lru, simulated")
    assert lived["hits"] == simulated["hits"]
    assert lived["requests"] == simulated["requests"]
    assert report["trace"]["requests"] == 90
    assert lived["measured"]["counters"]["evicted_dram_blocks"] == lived["blocks"]["evicted"] > 0
    again = json.loads(run_command(path, *how, "--json").stdout)
    assert again["replays"][0]["hits"] == lived["hits"]
    shown = run_command(path, *how, "--png", str(tmp_path / "pictures"))
    assert "0 wrong blocks" in shown.stdout
    assert "fetching a hit" in shown.stdout
    assert (tmp_path / "pictures" / "ttft.png").exists()


def test_the_store_says_what_policy_it_runs(dram_daemon, tmp_path):
    path = generic(tmp_path / "trace.jsonl", sessions_trace(1))
    how = (path, "--live", dram_daemon.url, "--requests", "30", "--sessions", "1")
    report = json.loads(run_command(*how, "--json").stdout)
    assert [r["policy"] for r in report["replays"]] == ["lru, live", "lru, simulated"]
    other = run_command(*how, "--policy", "sieve").exception
    assert isinstance(other, InvalidRequest)
    assert "the store runs the policy lru, not sieve" in str(other)
    assert "1 session at a time" in run_command(*how).stdout


@pytest.fixture
def refusing_daemon(tmp_path):
    """Its SSD holds a few blocks, none of which may go."""
    settings = {
        "dram.budget_bytes": 48 * SLOT_BYTES,
        "ssd.budget_bytes": "1MiB",
        "ssd.segment_bytes": 16 * SLOT_BYTES,
        "ssd.free_floor_bytes": 0,
        "eviction.policy": "lru",
    }
    daemon = Daemon(f"unix://{tmp_path / 'd.sock'}", tmp_path / "store", settings).start()
    yield daemon
    daemon.kill()


def left_in(daemon):
    with kvstore.connect(daemon.url, deadline_s=30.0) as client:
        return client.stat().blocks


def test_a_store_that_refuses_blocks_is_reported_and_left_empty(refusing_daemon, tmp_path):
    path = generic(tmp_path / "trace.jsonl", sessions_trace(1))
    result = run_command(path, "--live", refusing_daemon.url, "--requests", "90")
    assert result.exit_code == 0, result.output
    assert "kept out of an ssd full of blocks younger than ssd.lifetime_min_s" in result.stdout
    # the simulator gets no more room than there was
    row = next(line.split() for line in result.stdout.splitlines() if "lru, live" in line)
    assert int(row[2]) < 120
    assert left_in(refusing_daemon) == 0


def test_an_interrupted_run_takes_its_blocks_out(refusing_daemon, tmp_path):
    def stop(share):
        if share > 0.5:
            raise KeyboardInterrupt

    with kvstore.connect(refusing_daemon.url, deadline_s=30.0) as client:
        with pytest.raises(KeyboardInterrupt):
            live.play(client, sessions_trace(1), 2, progress=stop)
        assert client.stat().counters["put_stored_blocks"] > 0
    assert left_in(refusing_daemon) == 0


def test_other_bytes_than_were_put_fail_the_command(dram_daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(Contents, "same", lambda self, block, sections: block != 2)
    path = generic(tmp_path / "trace.jsonl", sessions_trace(1))
    result = run_command(path, "--live", dram_daemon.url, "--requests", "40")
    assert result.exit_code == replay._EXIT_WRONG
    assert " 0 wrong blocks" not in result.stdout


def test_a_store_that_goes_ends_the_run(tmp_path):
    trace = sessions_trace(2)

    class Gone:
        def __getattr__(self, name):
            raise Unavailable("gone")

    run = live._nothing_yet(trace, 2, 0.0)
    calls = {"look": lambda self: None, "play": lambda self, r: Gone().match() if r == 5 else None}
    player = type("Player", (), calls)()
    with pytest.raises(Unavailable, match="gone"):
        live._dispatch(player, run, lambda share: None)


def test_mistakes_are_named(tmp_path):
    path = generic(tmp_path / "trace.jsonl", sessions_trace(0, 2, 2))
    two = run_command(path, "--live", "unix:///nowhere", "--policy", "lru", "--policy", "arc")
    assert "a store runs one policy, not lru and arc" in str(two.exception)
    assert isinstance(run_command(path, "--live", "unix:///nowhere").exception, Unavailable)


def test_the_head_of_a_trace_is_a_trace():
    whole = read(WEKA, Users(3))
    part = head(whole, 20)
    assert part.requests == 20
    assert head(whole, 10**6) is whole
    assert set(part.blocks.tolist()) == set(range(part.unique))
    for r in range(20):
        chain = part.chain(r)
        assert len(chain) == len(whole.chain(r))
        assert part.parent[chain].tolist() == [-1, *chain[:-1].tolist()][: len(chain)]


def test_a_run_without_hits_has_figures():
    trace = sessions_trace(0, 2, 1)
    run = live._nothing_yet(trace, 1, 0.0)
    assert isinstance(run, LiveRun)
    run.counters = dict.fromkeys(
        ("evicted_dram_blocks", "evicted_ssd_blocks", "promoted_blocks"), 0
    )
    tier = type("T", (), {"tier": kvstore.Tier.DRAM, "objects": 0, "used_bytes": 0})
    tier.budget_bytes = 1 << 20
    run.tiers = (tier,)
    figures = live_figures(run, "lru", PRESETS["h100"])
    assert figures["hits"]["miss"] == figures["requests"]["miss"] == 1
    assert figures["measured"]["fetch_s"] == {}
