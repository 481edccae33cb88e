"""kill -9, for real: a process that writes to a log dies at a random moment, again and again."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from kill_writer import frame_of
from log_workload import CONFIG

from kvstore.testing.tiers_frames import key_of, load, rows
from kvstore.tiers.frame import verify_frame
from kvstore.tiers.ssd import SsdTier

HERE = Path(__file__).parent
START_S_MAX = 60.0


def run_and_kill(directory: Path, first: int, lines: int, after_s: float) -> list[str]:
    """What the process said before it died, a moment after so many lines."""
    command = [sys.executable, str(HERE / "kill_writer.py"), str(directory), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        opened = process.stdout.readline()
        said = [process.stdout.readline() for _ in range(lines)]
        time.sleep(after_s)
        process.kill()
        said += process.stdout.read().splitlines(keepends=True)
        assert process.wait(START_S_MAX) == -9, "it died by itself"
    assert opened == "open \n"
    # The last line may be torn; a promise is one that arrived whole.
    return [line for line in said if line.endswith("\n")]


def check(directory: Path, durable: set[int], ever: range) -> set[int]:
    """Every durable frame is there, and nothing is that was not written; names that are there."""
    by_key = {key_of(name): name for name in ever}
    tier, recovered = SsdTier.open(directory, CONFIG)
    there = set()
    for key, (location, length) in rows(recovered).items():
        frame = load(tier, location, length)
        assert verify_frame(frame, key) is None
        assert frame == frame_of(by_key[key])
        there.add(by_key[key])
    assert durable <= there, f"lost: {sorted(durable - there)}"
    assert tier.used_bytes <= CONFIG.budget_bytes
    tier.check_integrity()
    tier.close()
    return there


def rounds(directory: Path, count: int, random: Random) -> int:
    durable: set[int] = set()
    first = written = 0
    for _ in range(count):
        lines, after_s = random.randint(1, 15), random.random() * 0.01
        for line in run_and_kill(directory, first, lines, after_s):
            word, *names = line.split()
            numbers = {int(name) for name in names}
            if word == "durable":
                durable |= numbers
                written += len(numbers)
                first = max(first, *numbers) + 1
            else:
                durable -= numbers
        # One batch may have been written and not been told of.
        first += 6
        durable = check(directory, durable, range(first))
    return written


def test_killed_at_random_moments_it_keeps_every_promise(tmp_path: Path) -> None:
    assert rounds(tmp_path / "store", 6, Random(1)) > 50


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_two_hundred_times_it_keeps_every_promise(tmp_path: Path) -> None:
    assert rounds(tmp_path / "store", 200, Random(2)) > 2000
