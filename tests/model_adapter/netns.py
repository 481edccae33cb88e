"""Two hosts on one machine: network namespaces with a line between them that can be made bad.

The daemon listens on loopback alone, so both ends of the line have addresses within 127/8, routed
over it.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
NEAR, FAR = "127.77.0.1", "127.77.0.2"


def enter(name: str) -> None:
    """Move this thread, and those that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter network namespace {name}")


def _do(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why this machine can't have any; None where it can."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return "needs root, ip and tc"
    name = f"kv-probe-{os.getpid()}"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "netns", "del", name)
    except subprocess.CalledProcessError as e:
        return f"no network namespaces here: {e.stderr.strip()}"
    return None


@dataclass
class Line:
    """`near`, `far`: the namespaces at its ends, with the addresses `NEAR` and `FAR`."""

    near: str
    far: str
    device: str

    def _both(self, *words: str) -> None:
        for name in (self.near, self.far):
            _do("ip", "netns", "exec", name, *words)

    def shape(self, *discipline: str) -> None:
        """`tc` words for both directions. Raises `CalledProcessError` where there is no such."""
        self._both("tc", "qdisc", "replace", "dev", self.device, "root", *discipline)

    def dropped(self) -> int:
        """Packets that the near end's queue lost."""
        words = ("tc", "-s", "qdisc", "show", "dev", self.device)
        found = re.search(r"dropped (\d+)", _do("ip", "netns", "exec", self.near, *words))
        assert found
        return int(found[1])

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        nobody = "02:00:00:00:00:01"
        for name, peer in ((self.near, FAR), (self.far, NEAR)):
            words = ("lladdr", nobody, "dev", self.device, "nud", "permanent")
            _do("ip", "-n", name, "neigh", "replace", peer, *words)


@contextmanager
def line() -> Iterator[Line]:
    made = Line(f"kv-near-{os.getpid()}", f"kv-far-{os.getpid()}", "kv0")
    try:
        for name in (made.near, made.far):
            _do("ip", "netns", "add", name)
        names = ("type", "veth", "peer", "name", made.device, "netns", made.far)
        _do("ip", "link", "add", made.device, "netns", made.near, *names)
        for name, address in ((made.near, NEAR), (made.far, FAR)):
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{address}/24", "dev", made.device),
                ("link", "set", made.device, "up"),
                ("route", "del", "local", "127.0.0.0/8", "dev", "lo", "table", "local"),
            ):
                _do("ip", "-n", name, *words)
            setting = f"net/ipv4/conf/{made.device}/route_localnet"
            _do("ip", "netns", "exec", name, "sh", "-c", f"echo 1 > /proc/sys/{setting}")
        yield made
    finally:
        for name in (made.near, made.far):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
