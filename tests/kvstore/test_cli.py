"""The command line: what it prints, its exit codes, and errors without tracebacks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
from daemons import ROOT, SMALL, STORE_SETTINGS, Daemon, chain, fresh_namespace, keys_of

from kvstore import Client, Durability, NamespaceHandle, connect
from kvstore.block import Tier
from kvstore.cli import main, serve_main
from kvstore.cli.named import find
from kvstore.cli.output import human_bytes, shares_percent, tier_name
from kvstore.errors import InvalidRequest

BLOCKS = 6


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def kvstore(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("KVSTORE_URL", raising=False)

    def run(*arguments: object, command: Callable[[], None] = main) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            command()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture
def directory(tmp_path: Path) -> tuple[str, NamespaceHandle, list[bytes]]:
    """A store with blocks that nobody has open."""
    url = f"file://{tmp_path}/store"
    with connect(url, **STORE_SETTINGS) as client:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, BLOCKS)
        client.put(ns, blocks, Durability.DURABLE)
    return url, ns, keys_of(blocks)


@pytest.fixture
def served(
    directory: tuple[str, NamespaceHandle, list[bytes]], tmp_path: Path
) -> Iterator[tuple[str, NamespaceHandle, list[bytes]]]:
    """The same store behind a daemon."""
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", STORE_SETTINGS).start()
    yield daemon.url, *directory[1:]
    daemon.kill()


def corrupt_one_frame(store: Path, key: bytes) -> None:
    """Flip a bit in the payload that lies behind a key in a segment."""
    for segment in sorted(store.rglob("*.seg")):
        data = bytearray(segment.read_bytes())
        at = data.find(key)
        if at >= 0:
            data[at - at % 4096 + 512 + SMALL.block_bytes // 2] ^= 1
            segment.write_bytes(data)
            return
    raise AssertionError("no segment holds the key")


def test_stat_shows_tiers_and_shares_that_sum_to_100(
    kvstore: Callable[..., Ran], served: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    url, ns, keys = served
    with connect(url) as client:
        ns = client.open_namespace(ns.namespace)
        client.match(ns, [*keys, b"\1" * 32])
        client.put_handover(ns, "request", bytes(5000))
        client.wait_handover(ns, "request", 0.0)
    ran = kvstore("stat", "--store", url)
    assert ran.code == 0
    for text in ("dram", "ssd", "hit on ssd", "100.0 %", "64.00 MiB", "6 blocks in 1 namespace;"):
        assert text in ran.out
    assert "1 window snapshots and hand-over records take 8.00 KiB of" in ran.out
    assert "1 hits, 0 misses, 0 expired, 0 evicted, 0 refused" in " ".join(ran.out.split())
    # whether this machine has a device, and if not, why not
    assert "hbm: " in ran.out
    stat = json.loads(kvstore("stat", "--store", url, "--json").out)
    assert stat["notes"][0].startswith("hbm: ")
    assert stat["windows"]["payload_bytes"] == 5000
    assert stat["tiers"]["ssd"]["objects"] == BLOCKS
    assert stat["tiers"]["ssd"]["payload_bytes"] == BLOCKS * SMALL.block_bytes
    assert sum(stat["lookup_blocks"].values()) == BLOCKS + 1
    assert sum(stat["lookup_percent"].values()) == pytest.approx(100.0)


def test_offline_commands_read_the_directory(
    kvstore: Callable[..., Ran], directory: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    url, _ns, keys = directory
    stat = json.loads(kvstore("stat", "--store", url, "--json").out)
    assert stat["tiers"]["ssd"]["objects"] == BLOCKS
    listed = json.loads(kvstore("ls", "--store", url, "--json").out)
    assert {info["key"] for info in listed} == {key.hex() for key in keys}
    ran = kvstore("verify", "--store", url)
    assert (ran.code, "everything is as it was written" in ran.out) == (0, True)
    assert f"ssd: {BLOCKS} frames" in ran.out


def test_ls_pages(
    kvstore: Callable[..., Ran], served: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    url, ns, keys = served
    first = kvstore("ls", "--store", url, "--limit", 4, "--namespace", ns.id.hex())
    assert first.code == 0
    assert sum(key.hex() in first.out.split("perhaps more")[0] for key in keys) == 4
    after = first.out.split("--after ")[1].strip()
    rest = kvstore("ls", "--store", url, "--limit", 4, "--after", after)
    assert "perhaps more" not in rest.out
    assert all((key.hex() in first.out) or (key.hex() in rest.out) for key in keys)


@pytest.mark.parametrize("door", ["offline", "online"])
def test_verify_finds_a_flipped_bit(
    kvstore: Callable[..., Ran],
    directory: tuple[str, NamespaceHandle, list[bytes]],
    tmp_path: Path,
    door: str,
) -> None:
    url, _ns, keys = directory
    corrupt_one_frame(tmp_path / "store", keys[-1])
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", STORE_SETTINGS)
    if door == "online":
        url = daemon.start().url
    try:
        ran = kvstore("verify", "--store", url, "--json")
        report = json.loads(ran.out)
        assert ran.code == 1
        assert not report["clean"]
        assert report["corrupt"] == [keys[-1].hex()]
        # It is quarantined now, and the rest is sound.
        again = kvstore("verify", "--store", url)
        assert (again.code, f"ssd: {BLOCKS - 1} frames" in again.out) == (0, True)
    finally:
        daemon.kill()


def test_verify_says_what_is_corrupt(
    kvstore: Callable[..., Ran],
    directory: tuple[str, NamespaceHandle, list[bytes]],
    tmp_path: Path,
) -> None:
    url, _ns, keys = directory
    corrupt_one_frame(tmp_path / "store", keys[2])
    ran = kvstore("verify", "--store", url)
    assert ran.code == 1
    assert f"corrupt, quarantined: {keys[2].hex()}" in ran.out


def test_evict_takes_a_key_a_namespace_or_all(
    kvstore: Callable[..., Ran], served: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    url, ns, keys = served
    where = ("--store", url, "--namespace", ns.id.hex())
    assert (
        kvstore("evict", *where, "--key", keys[-1].hex()).out
        == "1 block evicted, 5 left in the store\n"
    )
    refused = kvstore("evict", "--store", url)
    assert (refused.code, "--all" in refused.err) == (2, True)
    assert kvstore("evict", "--store", url, "--all", "--tier", "ssd").code == 0
    kvstore("evict", "--store", url, "--all")
    stat = json.loads(kvstore("stat", "--store", url, "--json").out)
    assert stat["blocks"] == 0


def test_evict_takes_the_first_digits_of_a_key_and_what_is_behind_it(
    kvstore: Callable[..., Ran], served: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    url, _ns, keys = served
    evict = ("evict", "--store", url)
    digits = keys[2].hex()[:20]
    kept = kvstore(*evict, "--key", digits)
    assert kept.code == 1
    assert kept.out == "0 blocks evicted, 6 left in the store\n"
    assert f"{keys[2].hex()} has 3 blocks behind; they go first: add --with-children" in kept.err
    gone = kvstore(*evict, "--key", digits.upper(), "--with-children")
    assert (gone.code, gone.out) == (0, "4 blocks evicted, 2 left in the store\n")
    for text, says in (
        (digits, f"no block's key begins with {digits}"),
        ("key", "'key' is not 64 hex digits, nor the first of them"),
        ("", "'' is not 64 hex digits"),
        (64 * "0", "no block's key begins with 000"),
        (65 * "0", "is not 64 hex digits"),
    ):
        wrong = kvstore(*evict, "--key", text)
        assert (wrong.code, says in wrong.err) == (2, True), text
    kept = kvstore(*evict, "--key", keys[1].hex(), "--tier", "dram")
    assert (kept.code, "they are not on that tier" in kept.err) == (1, True)


def test_digits_that_begin_several_keys_name_them() -> None:
    keys = [b"\x12" + bytes([n]) + bytes(30) for n in range(7)]

    class Listing:
        def ls(self, namespace_id: object, limit: int, after: object) -> list[SimpleNamespace]:
            return [] if after else [SimpleNamespace(key=key, namespace_id=b"n") for key in keys]

    client = cast(Client, Listing())
    assert find(client, ["1203"], None) == {keys[3]: b"n"}
    with pytest.raises(InvalidRequest, match=r"7 blocks' keys begin with 12: 1200.*, 1204.* …"):
        find(client, ["12"], None)


def test_a_stopped_store_says_nothing_of_budgets_and_devices(
    kvstore: Callable[..., Ran], directory: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    shown = kvstore("stat", "--store", directory[0]).out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert rows["dram"].count("–") == rows["ssd"].count("–") == 3
    assert "hbm: " not in shown
    assert "dead frames, reclaimed when room is needed" in shown


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_loses_no_digit(
    kvstore: Callable[..., Ran],
    served: tuple[str, NamespaceHandle, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = kvstore("stat", "--store", served[0]).out
    assert "…" not in shown
    head, dram, ssd = shown.splitlines()[:3]
    assert head.split()[-1] == "state"
    assert dram.endswith("accepting")
    assert ssd.endswith("accepting")
    assert served[2][0].hex() in kvstore("ls", "--store", served[0]).out


def test_the_store_may_come_from_the_environment(
    kvstore: Callable[..., Ran],
    directory: tuple[str, NamespaceHandle, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_URL", directory[0])
    assert kvstore("stat", "--json").code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stat", "--store", "redis://localhost"), "UnsupportedURL: 'redis://localhost' has no"),
        (("stat", "--store", "unix:///nowhere/kv.sock"), "Unavailable: no daemon answers at"),
        (("ls", "--store", "dns:///127.0.0.1:1"), "Unavailable: no daemon answers at"),
        (("verify", "--store", "file:///nowhere"), "UnsupportedURL: file:///nowhere: there is no"),
        (("ls", "--store", "unix:///s", "--namespace", "xyz"), "'xyz' is not 64 hex digits"),
        (("ls", "--store", "unix:///s", "--after", "00"), "'00' is not 64 hex digits"),
        (("evict", "--store", "unix:///s", "--all", "--tier", "tape"), "tier 'tape' is none of"),
        (("serve", "--listen", "tcp://0.0.0.0:1"), "ConfigError: server.listen: '0.0.0.0' is not"),
        (("serve", "--dram", "lots"), "ConfigError: dram.budget_bytes: "),
        (("serve", "--set", "lease.ttl=1"), "unknown key 'lease.ttl'; known here: lease_ttl_s_"),
        (("serve", "--dir", "/dev/null"), "(EEXIST); a file stands where a directory should"),
        (("serve", "--dir", "/dev/null/x"), "(ENOTDIR); a file stands where a directory should"),
        (("serve", "--dir", "/proc/x"), "no directory can be made there: choose another"),
        (("serve", "--dir", ""), "ConfigError: dir: an empty path is no directory; name one"),
        (("serve", "--set", "dir="), "ConfigError: dir: an empty path is no directory; name one"),
        (("serve", "--set", "lease"), "write it as key=value"),
        (("serve", "--config", "/nowhere.toml"), "can't read the configuration /nowhere.toml"),
        (("serve", "--metrics", "10.0.0.1:1"), "server.metrics_listen: '10.0.0.1' is not a loop"),
    ],
)
def test_errors_are_one_line(
    kvstore: Callable[..., Ran], arguments: tuple[str, ...], says: str
) -> None:
    ran = kvstore(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert says in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_directory_without_a_store_is_left_alone(
    kvstore: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = kvstore("stat", "--store", f"file://{tmp_path}")
    assert (ran.code, "holds no store" in ran.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_locked_store_says_who_holds_it(
    kvstore: Callable[..., Ran],
    served: tuple[str, NamespaceHandle, list[bytes]],
    tmp_path: Path,
) -> None:
    for arguments in (
        ("stat", "--store", f"file://{tmp_path}/store"),
        ("serve", "--dir", tmp_path / "store", "--listen", f"unix://{tmp_path}/other.sock"),
    ):
        ran = kvstore(*arguments)
        assert ran.code == 2
        assert "StoreLocked" in ran.err
        assert "Traceback" not in ran.err


def test_a_socket_in_use_is_left_alone(
    kvstore: Callable[..., Ran], served: tuple[str, NamespaceHandle, list[bytes]]
) -> None:
    ran = kvstore("serve", "--listen", served[0])
    assert (ran.code, "another daemon serves" in ran.err) == (2, True)
    assert kvstore("stat", "--store", served[0]).code == 0


def test_unknown_keys_of_a_file_name_the_known_ones(
    kvstore: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text("[ssd]\nbudget = 1\n")
    ran = kvstore("--config", file, command=serve_main)
    assert ran.code == 2
    assert "unknown key 'ssd.budget'; known here: budget_bytes" in ran.err
    assert str(file) in ran.err


@pytest.mark.parametrize("module", ["kvstore", "kvstore.cli"])
def test_it_runs_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("serve", "stat", "ls", "verify", "evict"):
        assert name in done.stdout


def test_shares_always_sum_to_100() -> None:
    assert shares_percent({"a": 1, "b": 1, "c": 1}) == {"a": 33.4, "b": 33.3, "c": 33.3}
    assert shares_percent({"a": 0, "b": 0}) == {"a": 0.0, "b": 0.0}
    for counts in ({"a": 7, "b": 11, "c": 1, "d": 0}, {"a": 1, "b": 999_999}):
        assert sum(shares_percent(counts).values()) == pytest.approx(100.0, abs=1e-9)


def test_names_and_sizes() -> None:
    assert tier_name(Tier.DRAM | Tier.SSD) == "dram+ssd"
    assert tier_name(Tier.NONE) == "-"
    assert [human_bytes(n) for n in (0, 1023, 1024, 227840, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "222.50 KiB",
        "5.00 TiB",
    ]
