"""`ds41f` as processes that can be killed, without each of them importing torch anew."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["model_adapter.commands.run_handover"])
END_S_MAX = 120.0


def _run(arguments: list[str], out: str, at: str | None) -> None:
    import netns
    import torch

    from model_adapter import cli

    if at is not None:
        netns.enter(at)
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.argv = ["ds41f", *arguments]
    cli.main()


class Node:
    """One running `ds41f`; its output goes to files from the start on. `at`: the network namespace
    that it lives in."""

    _count = 0

    def __init__(self, directory: Path, *arguments, at: str | None = None) -> None:
        Node._count += 1
        self._out = directory / f"node-{Node._count}"
        words = [str(a) for a in arguments]
        self._process = _context.Process(target=_run, args=(words, str(self._out), at), daemon=True)
        self._process.start()

    def _text(self, name: str) -> str:
        path = self._out.with_suffix(f".{name}")
        return path.read_text() if path.exists() else ""

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def err(self) -> str:
        return self._text("err")

    @property
    def ids(self) -> list[int]:
        """What was printed so far, whole lines only."""
        return [int(line) for line in self.out.rpartition("\n")[0].split()]

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def end(self) -> int:
        """Exit status."""
        self._process.join(END_S_MAX)
        assert not self.running, self.err
        return self._process.exitcode

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL


def until(condition, what: str) -> None:
    """Wait for it, generously."""
    deadline = time.monotonic() + END_S_MAX
    while not condition():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.005)
