"""The demo on the smallest preset: what it plays, what it writes, and that it can fail."""

import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore import Layout, SectionSpec, Tier
from model_adapter.demo.conversations import load_conversations, parse_conversation
from model_adapter.demo.daemon import Daemon
from model_adapter.demo.picture import draw
from model_adapter.demo.play import Played, play_checked, play_plain
from model_adapter.demo.present import turn_table
from model_adapter.demo.reference import ProcessBlocks
from model_adapter.demo.results import DemoResults, Totals
from model_adapter.demo.schedule import Turn, schedule
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import PrefixOutcome, RequestReport, namespace_of
from model_adapter.tokenizer import load_tokenizer

SMALL_DEMO = ["--preset", "tiny", "--sessions", "2", "--turns", "1", "--max-tokens", "3"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "checkpoint"
    make_checkpoint("tiny", 0, path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return Model.load(checkpoint)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "model_adapter.demo", "--out", str(out), *SMALL_DEMO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    return out, done


def test_a_run_passes_and_leaves_its_picture_and_numbers(played):
    out, done = played
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASSED: ")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((out / "demo.json").read_text())
    assert numbers["problems"] == []
    plain, empty, warm = (numbers["passes"][name] for name in ("plain", "empty", "warm"))
    assert [t["session"] for t in plain] == ["189f0222", "8f7920a2"]
    first, second = empty
    # nothing was there for the first session; the second finds the system prompt that they share
    assert first["hit_tokens"] == 0
    assert 0 < second["hit_tokens"] < second["prompt_tokens"]
    for turn in warm:
        assert turn["hit_tokens"] > 0.8 * turn["prompt_tokens"]
        suffix = turn["prompt_tokens"] - turn["hit_tokens"]
        assert turn["encoder_positions"] == turn["replayed_tokens"] + suffix
        assert turn["fetched_bytes"] == turn["hit_tokens"] * numbers["bytes_per_token"]
    assert warm[0]["hit_blocks"].keys() == {"ssd"}
    assert numbers["lookup_blocks_after_restart"]["miss"] == 0


def test_it_runs_with_hbm_on_a_simulated_device_and_says_so(tmp_path):
    command = [sys.executable, "-m", "model_adapter.demo", "--out", str(tmp_path), *SMALL_DEMO]
    command += ["--tiers", "hbm,dram,ssd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASSED: ")
    assert "hbm: simulated device 0 (host memory, no GPU)" in done.stdout
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert "simulated" in numbers["hbm"]
    first, second = numbers["passes"]["warm"]
    assert first["hit_blocks"].keys() == {"ssd"}
    # the prompt's beginning that both sessions share was promoted twice by then
    assert second["hit_blocks"]["hbm"] > 0
    assert numbers["lookup_blocks_after_restart"]["hit_hbm"] > 0


def test_the_schedule_is_one_turn_of_each_session_after_another(checkpoint):
    turns = schedule(load_conversations(), load_tokenizer(checkpoint), 7)
    assert [t.label for t in turns[:5]] == ["189f·1", "8f79·1", "ae5b·1", "c7d0·1", "189f·2"]
    # two of the sessions end after six turns
    assert [t.label for t in turns[-3:]] == ["c7d0·6", "8f79·7", "ae5b·7"]
    of_first = [t.prompt_ids for t in turns if t.session == turns[0].session]
    for before, after in itertools.pairwise(of_first):
        assert np.array_equal(after[: len(before)], before)


def test_a_transcript_that_does_not_grow_is_refused():
    lines = [
        {"timestamp": 2, "input": "other <instructions>", "output": "b", "session_id": "s"},
        {"timestamp": 1, "input": "task <instructions>", "output": "a", "session_id": "s"},
    ]
    with pytest.raises(ValueError, match="session s: a call does not go on"):
        parse_conversation("\n".join(map(json.dumps, lines)))


def short_turns() -> list[Turn]:
    ids = np.random.default_rng(0).integers(11, 500, 600).astype(np.uint32)
    return [Turn("aaaa", 1, ids[:520]), Turn("aaaa", 2, ids)]


class FlippedBit(ProcessBlocks):
    """A store that hands out what it has, one bit of one block apart."""

    def load(self, found, blocks, cache):
        sections = self._blocks[found.keys[0]]
        sections[0][3, 2] ^= 1
        try:
            return super().load(found, blocks, cache)
        finally:
            sections[0][3, 2] ^= 1


@pytest.mark.parametrize("kind", [ProcessBlocks, FlippedBit])
def test_a_wrong_bit_from_the_store_is_found(model, checkpoint, kind):
    layout = namespace_of(model, checkpoint).layout
    source = kind(layout)
    source.hit_blocks = 0
    turns = short_turns()
    first = play_checked(model, turns[:1], 2, source, reference := ProcessBlocks(layout), int)
    source.hit_blocks = 2
    second = play_checked(model, turns[1:], 2, source, reference, int)
    assert first[0].equal
    assert second[0].report.hit_tokens == 512
    assert second[0].equal == (kind is ProcessBlocks)


def make_results(**changes) -> DemoResults:
    turn = Turn("aaaa", 1, np.zeros(600, np.uint32))
    report = {
        "outcome": PrefixOutcome.HIT,
        "prompt_tokens": 600,
        "generated_tokens": 2,
        "hit_tokens": 512,
        "replayed_tokens": 16,
        "encoder_positions": 104,
        "decoder_positions": 16,
        "hit_blocks": Counter({Tier.SSD: 2}),
        "fetched_bytes": 1000,
        "stored_blocks": 0,
        "present_blocks": 0,
        "refused_blocks": 0,
        "stored_bytes": 0,
        "fetch_s": 0.01,
        "ttft_s": 0.5,
        "store_s": 0.0,
        "total_s": 0.6,
    }
    plain = RequestReport(**(report | {"hit_tokens": 0, "ttft_s": 2.0, "hit_blocks": Counter()}))
    equal = changes.pop("equal", True)
    warm = Played(turn, [1, 2], RequestReport(**(report | changes)), equal)
    return DemoResults(
        preset="tiny",
        layout=Layout((SectionSpec(0, "main", 1, 2),)),
        plain=[Played(turn, [1, 2], plain)],
        empty=[warm],
        warm=[warm],
        lookup_blocks={"hit_ssd": 2, "miss": 0},
        seconds=1.0,
    )


def test_the_verdict_names_what_was_won():
    results = make_results()
    assert results.problems == []
    assert results.verdict.startswith("PASSED: 85% of the prompt tokens")
    assert "÷ 4.0 (2.0 s → 0.5 s)" in results.verdict
    assert Totals.of(results.warm).hit_share == 512 / 600


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"equal": False}, "empty pass, turn aaaa·1: the answer differs"),
        ({"store_error": "Unavailable"}, "empty pass, turn aaaa·1: Unavailable"),
        ({"refused_blocks": 3}, "empty pass, turn aaaa·1: 3 blocks refused"),
        ({"hit_blocks": Counter({Tier.DRAM: 2})}, "warm pass: nothing came from SSD"),
    ],
)
def test_the_verdict_names_what_failed(changes, problem):
    results = make_results(**changes)
    assert results.verdict.startswith(f"FAILED: {problem}")


def test_a_failed_demo_exits_with_an_error(tmp_path, monkeypatch):
    import typer

    from model_adapter.demo import __main__ as entry

    class Failing:
        def __init__(self, *_):
            pass

        def run(self):
            return make_results(equal=False)

    monkeypatch.setattr(entry, "Demo", Failing)
    app = typer.Typer()
    app.command()(entry.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "FAILED" in done.stdout
    assert json.loads((tmp_path / "demo.json").read_text())["verdict"].startswith("FAILED")


def test_the_table_has_a_row_per_turn_and_the_picture_draws(tmp_path):
    results = make_results()
    assert turn_table(results).row_count == 1
    draw(results, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_daemon_that_can_not_start_says_why(tmp_path):
    (tmp_path / "store").write_text("not a directory")
    with pytest.raises((RuntimeError, FileExistsError)):
        Daemon(tmp_path, 4 << 20, 256 << 20).__enter__()
    (tmp_path / "other").mkdir()
    with (
        pytest.raises(RuntimeError, match=r"did not come up.*(?s:.)*budget_bytes"),
        Daemon(tmp_path / "other", 4 << 20, 1 << 20),
    ):
        pass


def test_plain_play_asks_no_store(model):
    (played,) = play_plain(model, short_turns()[:1], 2, int)
    assert played.equal is None
    assert played.report.outcome is PrefixOutcome.NO_STORE
