"""kill -9 of the daemon under load: several clients put, read, reserve and evict while it dies at
random moments, right after an acknowledgement, and while it starts. It always comes back, by itself
and soon; no durable block is lost, and no wrong byte is served."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import IO

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S_MAX = 120.0
ANSWER_S_MAX = 240.0
DOORS = ("auto", "grpc", "port")
SETTINGS = {
    "dram.budget_bytes": "4MiB",
    "ssd.budget_bytes": "192MiB",
    "ssd.segment_bytes": "1MiB",
    "ssd.free_floor_bytes": 0,
}


class Server:
    """The daemon, as a process that is started and killed."""

    def __init__(self, directory: Path) -> None:
        self.url = f"unix://{directory}/kv.sock"
        self.log = directory / "log"
        self._command = [sys.executable, "-m", "kvstore", "serve", "--listen", self.url]
        self._command += ["--dir", str(directory / "store")]
        for key, value in SETTINGS.items():
            self._command += ["--set", f"{key}={value}"]
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)

    def start(self) -> float:
        """Seconds until it served."""
        began = time.monotonic()
        self.spawn()
        assert self._process is not None
        while b" serving " not in self.log.read_bytes():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < began + START_S_MAX, self.log.read_text()
            time.sleep(0.01)
        return time.monotonic() - began

    def clear_away(self) -> None:
        """However the test ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """-9, unless it died by itself, which is an error."""
        assert self._process is not None
        self._process.kill()
        self.died()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def died(self) -> None:
        """Somebody has killed it."""
        assert self._process is not None
        assert self._process.wait(START_S_MAX) == -9, self.log.read_text()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(START_S_MAX) == 0, self.log.read_text()


class Client:
    """A `kill_client.py`, and what it says."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        command = [sys.executable, str(HERE / "kill_client.py"), url, name, str(seed)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def ask(self, order: str) -> None:
        stream: IO[str] | None = self.process.stdin
        assert stream is not None
        stream.write(f"{order}\n")
        stream.flush()

    def answer(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(word), f"{word} was expected, and it said {line!r}"
        return line[len(word) :].strip()


@contextmanager
def clients(url: str, count: int, seed: int) -> Iterator[list[Client]]:
    started = [Client(f"{url}?data={DOORS[i % 3]}", f"c{i}", seed) for i in range(count)]
    try:
        for client in started:
            client.answer("ready")
        yield started
    finally:
        for client in started:
            client.process.kill()
            client.process.communicate()


def rounds(directory: Path, count: int, client_count: int, seed: int) -> Counter[str]:
    """Kill it `count` times; what the clients did in all."""
    random, server = Random(seed), Server(directory)
    with ExitStack() as stack:
        stack.callback(server.clear_away)
        slowest_s, checked = server.start(), 0
        loaders = stack.enter_context(clients(server.url, client_count, seed))
        for n in range(count):
            lived_s = random.choice([0.05, 0.4, 1.0]) * (0.2 + random.random())
            time.sleep(lived_s)
            acknowledged = random.random() < 0.5
            if acknowledged:
                killer = random.choice(loaders)
                killer.ask(f"kill {server.pid}")
                killer.answer("killed")
                server.died()
            else:
                server.kill()
            early = random.random() < 0.25
            if early:
                server.spawn()
                time.sleep(random.random() * 1.5)
                server.kill()
            started_s = server.start()
            slowest_s = max(slowest_s, started_s)
            for client in loaders:
                client.ask("check")
            blocks = sum(int(client.answer("checked")) for client in loaders)
            checked += blocks
            print(
                f"round {n}: killed after {lived_s:.2f} s{' and a durable put' * acknowledged}"
                f"{', and while starting' * early}; back in {started_s:.2f} s; "
                f"{blocks} durable blocks there and right",
                flush=True,
            )
        done: Counter[str] = Counter()
        for client in loaders:
            client.ask("end")
            done.update(json.loads(client.answer("end")))
            assert client.process.wait(ANSWER_S_MAX) == 0
        server.stop()
    verify = [sys.executable, "-m", "kvstore", "verify", "--store", f"file://{directory}/store"]
    assert subprocess.run(verify, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0
    print(
        f"{count} rounds, {client_count} clients, seed {seed}: {checked} durable blocks checked, "
        f"none lost, no wrong byte; slowest start {slowest_s:.2f} s; {dict(done)}"
    )
    return done


@pytest.mark.xdist_group("kill")
def test_a_daemon_killed_under_load_keeps_every_promise(tmp_path: Path) -> None:
    done = rounds(tmp_path, 3, 2, 1)
    assert done["blocks promised"] > 20
    assert done["blocks read"] > 20


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_daemon_killed_two_hundred_times_keeps_every_promise(tmp_path: Path) -> None:
    done = rounds(tmp_path, 200, 3, 2)
    assert done["blocks promised"] > 2000
    assert done["calls cut off"] > 20
