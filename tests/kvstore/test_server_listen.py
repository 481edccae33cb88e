"""Where a daemon may listen, and what it does about a socket that is there already."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.server.listen import bind, clear_stale_socket, parse_listen, parse_loopback


def test_unix_and_tcp() -> None:
    unix = parse_listen("unix:///run/kv.sock")
    assert (unix.grpc_address(), unix.url(0)) == ("unix:/run/kv.sock", "unix:///run/kv.sock")
    tcp = parse_listen("tcp://localhost:0")
    assert (tcp.grpc_address(), tcp.url(77)) == ("127.0.0.1:0", "dns:///127.0.0.1:77")
    six = parse_listen("tcp://[::1]:7700")
    assert (six.grpc_address(), six.url(7700)) == ("[::1]:7700", "dns:///[::1]:7700")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not unix:///"),
        ("/run/kv.sock", "is not unix:///"),
        ("unix://kv.sock", "is not unix:///"),
        ("http://127.0.0.1:1", "is not unix:///"),
        ("unix:///" + "s" * 120, "107 B"),
        ("tcp://127.0.0.1", "host:port"),
        ("tcp://0.0.0.0:7700", "not a loopback address"),
        ("tcp://192.168.1.1:7700", "not a loopback address"),
        ("tcp://example.invalid:7700", "not a loopback address"),
        ("tcp://127.0.0.1:70000", "0 to 65535, not '127.0.0.1:70000'"),
        ("tcp://127.0.0.1:-1", "0 to 65535, not '127.0.0.1:-1'"),
        ("tcp://127.0.0.1:http", "0 to 65535, not '127.0.0.1:http'"),
        ("tcp://[::1", "host:port.*not '\\[::1'"),
    ],
)
def test_wrong_addresses_say_what_is_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_listen(text)


def test_metrics_stay_on_loopback() -> None:
    assert parse_loopback("localhost:9100", "server.metrics_listen") == ("127.0.0.1", 9100)
    with pytest.raises(ConfigError, match=r"server\.metrics_listen.*not a loopback"):
        parse_loopback("[::]:9100", "server.metrics_listen")


def test_a_stale_socket_is_cleared_and_a_served_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    clear_stale_socket(path)
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(os.fspath(path))
        served.listen()
        with pytest.raises(ConfigError, match="another daemon serves"):
            clear_stale_socket(path)
        assert path.exists()
    clear_stale_socket(path)
    assert not path.exists()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        clear_stale_socket(file)
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match="create it first"):
        clear_stale_socket(tmp_path / "none" / "kv.sock")


def test_the_socket_never_exists_with_wider_permissions(tmp_path: Path) -> None:
    listen = parse_listen(f"unix://{tmp_path}/kv.sock")
    modes = []
    with socket.socket(socket.AF_UNIX) as server:

        def add_port(address: str) -> int:
            server.bind(address.removeprefix("unix:"))
            modes.append(stat.S_IMODE(listen.path.stat().st_mode))
            return 1

        before = os.umask(0)
        try:
            bind(listen, add_port)
            assert os.umask(0) == 0
        finally:
            os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(listen.path.stat().st_mode) == 0o600


def test_an_address_in_use_is_an_error() -> None:
    def add_port(address: str) -> int:
        raise RuntimeError(f"Failed to bind to address {address}")

    with pytest.raises(ConfigError, match=r"can't listen at dns:///127\.0\.0\.1:7700"):
        bind(parse_listen("tcp://127.0.0.1:7700"), add_port)
