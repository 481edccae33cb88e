"""`ds41f make-checkpoint` and `ds41f generate`."""

import re
import shutil

import pytest
import tiny_checkpoint as tiny
import torch

from model_adapter import cli
from model_adapter.demo.conversations import training_texts

TEXT = " ".join(training_texts())[:3000]


@pytest.fixture
def ds41f(monkeypatch, capsys):
    """Run the command line; returns exit status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["ds41f", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as e:
            status = e.code or 0
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


def shown(report: str, name: str) -> str:
    """A line of the report."""
    (value,) = re.findall(rf"^ *{name} +(.*?) *$", report, re.MULTILINE)
    return value


def test_makes_a_checkpoint(ds41f, tmp_path):
    status, out, _ = ds41f("make-checkpoint", "--preset", "tiny", "--seed", 3, tmp_path / "c")
    assert status == 0
    assert "preset tiny, seed 3" in out
    assert (tmp_path / "c" / "config.json").is_file()
    status, _, err = ds41f("make-checkpoint", "--preset", "tiny", tmp_path / "c")
    assert status == 2
    assert "holds a checkpoint already" in err
    status, _, err = ds41f("make-checkpoint", "--preset", "big", tmp_path / "d")
    assert status == 2
    assert "unknown preset 'big'" in err


def test_a_second_run_hits_what_the_first_left(ds41f, tmp_path, prompt_file):
    arguments = ["generate", "--checkpoint", tiny.checkpoint(), "--prompt-file", prompt_file]
    arguments += ["--store", f"file://{tmp_path / 'store'}", "--max-tokens", 4]
    runs = [ds41f(*arguments, *more) for more in ((), (), ("--no-snapshots",))]
    assert [status for status, _, _ in runs] == [0, 0, 0]
    cold, warm, again = (err for _, _, err in runs)
    tokens = int(shown(cold, "prompt").split()[0])
    hit = (tokens - 1) // 256 * 256
    assert shown(cold, "prefix") == "miss"
    assert shown(cold, "computed").startswith(f"{tokens} encoder, 16 decoder")
    assert shown(warm, "hit") == f"{hit} tokens (ssd {hit // 256})"
    assert shown(warm, "replayed") == "16 tokens"
    assert shown(warm, "computed").startswith(f"{16 + tokens - hit} encoder, 16 decoder")
    assert shown(warm, "fetched") == f"{hit * 106:,} B"
    assert runs[1][1] == runs[2][1] != ""
    # snapshots are in memory alone, and the first run's store is closed
    none = "none before the prompt's last token"
    assert [shown(r, "snapshot") for r in (cold, warm, again)] == [none, none, "off"]
    assert shown(warm, "snapshots") == "0 B fetched, 2 stored"
    assert shown(again, "stored") == "0 B in 0 blocks, 0 present"


def test_exact_bfloat16_without_a_store(ds41f, prompt_file):
    prompt_file.write_text("short")
    status, out, err = ds41f(
        *("generate", "--checkpoint", tiny.checkpoint(), "--prompt-file", prompt_file),
        *("--max-tokens", 2, "--mode", "exact", "--dtype", "bfloat16"),
    )
    assert status == 0
    assert out.strip("\n")
    assert shown(err, "prefix") == "no store"


def test_a_daemon_that_is_not_there_is_no_reason_not_to_answer(
    ds41f, tmp_path, prompt_file, caplog
):
    prompt_file.write_text("short")
    status, out, err = ds41f(
        *("generate", "--checkpoint", tiny.checkpoint(), "--prompt-file", prompt_file),
        *("--store", f"unix://{tmp_path}/none.sock", "--max-tokens", 1, "--deadline-s", 2),
    )
    assert status == 0
    assert out
    assert shown(err, "prefix") == "no store"
    assert "going on without the store" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--store": "ftp://x"}, "ftp"),
        ({"--prompt-file": "/nowhere/p"}, "can't read the prompt /nowhere/p"),
        ({"--checkpoint": "/nowhere"}, "/nowhere"),
        ({"--block-tokens": 7}, "block_tokens 7 is not a multiple of the ratio 2"),
    ],
)
def test_what_the_caller_can_mend_is_one_line(ds41f, tmp_path, prompt_file, change, message):
    arguments = {
        "--checkpoint": tiny.checkpoint(),
        "--prompt-file": prompt_file,
        "--store": f"file://{tmp_path / 'store'}",
    } | change
    status, out, err = ds41f("generate", *(part for pair in arguments.items() for part in pair))
    assert status == 2
    assert out == ""
    assert err.startswith("ds41f: ")
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_an_empty_prompt_and_a_damaged_checkpoint_are_named(ds41f, tmp_path, prompt_file):
    prompt_file.write_text("")
    status, _, err = ds41f(
        "generate", "--checkpoint", tiny.checkpoint(), "--prompt-file", prompt_file
    )
    assert (status, err) == (2, f"ds41f: the prompt {prompt_file} is empty\n")
    prompt_file.write_text("x")
    copy = tmp_path / "copy"
    shutil.copytree(tiny.checkpoint(), copy)
    (shard,) = copy.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])
    status, _, err = ds41f("generate", "--checkpoint", copy, "--prompt-file", prompt_file)
    assert status == 2
    assert shard.name in err


@pytest.mark.parametrize("command", ["generate", "prefill", "decode", "serve", "check-golden"])
def test_a_device_that_can_not_be_had_is_one_line(ds41f, monkeypatch, tmp_path, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("word")
    store = ["--store", f"file://{tmp_path}/store", "--request-id", "r"]
    arguments = {
        "generate": ["--prompt-file", prompt],
        "prefill": [*store, "--prompt-file", prompt],
        "decode": store,
        "serve": ["--listen", "127.0.0.1:0"],
        "check-golden": [tiny.checkpoint()],
    }[command]
    if command == "check-golden":
        arguments += ["--device", "cuda"]
    else:
        arguments += ["--checkpoint", tiny.checkpoint(), "--device", "cuda"]
    status, _, err = ds41f(command, *arguments)
    assert status == 2
    assert err.startswith("ds41f: device 'cuda': torch sees no CUDA device here")
    assert err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_the_store_may_come_from_the_environment(ds41f, tmp_path, prompt_file, monkeypatch):
    monkeypatch.setenv("KVSTORE_URL", f"file://{tmp_path / 'store'}")
    arguments = ["generate", "--checkpoint", tiny.checkpoint(), "--prompt-file", prompt_file]
    status, _, err = ds41f(*arguments, "--max-tokens", 1)
    assert status == 0
    assert shown(err, "prefix") == "miss"
