"""Where the daemon listens: a unix socket for its owner, or TCP on loopback."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstore.errors import ConfigError
from kvstore.server.address import SOCKET_PATH_BYTES_MAX, join_authority, parse_authority

PROBE_S = 1.0
_FORMS = "unix:///path/of.sock or tcp://127.0.0.1:port"


@dataclass(frozen=True, slots=True)
class Listen:
    """A parsed `listen` setting. `path`: of a unix socket. `host`, `port`: of TCP."""

    kind: Literal["unix", "tcp"]
    path: Path = Path()
    host: str = ""
    port: int = 0

    def grpc_address(self) -> str:
        """The address as `add_insecure_port` wants it."""
        if self.kind == "unix":
            return f"unix:{self.path}"
        return join_authority(self.host, self.port)

    def url(self, port: int) -> str:
        """The URL that clients use. `port`: the one bound."""
        if self.kind == "unix":
            return f"unix://{self.path}"
        return f"dns:///{join_authority(self.host, port)}"


def parse_loopback(text: str, setting: str) -> tuple[str, int]:
    """Host and port of an address that only this machine reaches. Raises `ConfigError`.

    There is no authentication: who reaches the port may read and drop every block.
    """
    try:
        host, port = parse_authority(text)
    except ValueError as e:
        raise ConfigError(f"{setting}: {e}") from e
    address = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"{setting}: {host!r} is not a loopback address; the daemon has no authentication and "
            "listens on 127.0.0.1, ::1 or a unix socket only"
        )
    return address, port


def parse_listen(text: str, setting: str = "server.listen") -> Listen:
    """`setting`: its name, for errors. Raises `ConfigError`."""
    scheme, _, rest = text.partition("://")
    if scheme == "tcp":
        host, port = parse_loopback(rest, setting)
        return Listen("tcp", host=host, port=port)
    path = Path(rest)
    if scheme != "unix" or not path.is_absolute():
        raise ConfigError(f"{setting}: {text!r} is not {_FORMS}")
    if len(bytes(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{setting}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} B, "
            f"this one {len(bytes(path))}: {path}"
        )
    return Listen("unix", path=path)


def clear_stale_socket(path: Path, setting: str = "server.listen") -> None:
    """Make room for a socket at `path`: remove one that nobody serves any more.

    gRPC itself would take over even one that is being served. Raises `ConfigError`.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{setting}: there is no directory {path.parent}; create it first")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{setting}: {path} is there and no socket; move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as e:
            raise ConfigError(f"{setting}: can't use {path}: {e.strerror or e}") from e
    raise ConfigError(f"{setting}: another daemon serves {path}; stop it or choose another")


def bind(listen: Listen, add_port: Callable[[str], int]) -> int:
    """Bind with gRPC's `add_insecure_port`; the socket is its owner's only. Returns the port.

    Raises `ConfigError`.
    """
    if listen.kind == "unix":
        clear_stale_socket(listen.path)
    # The socket must never exist with wider permissions, not even between bind and chmod.
    before = os.umask(0o177)
    try:
        port = add_port(listen.grpc_address())
    except RuntimeError as e:
        raise ConfigError(
            f"server.listen: can't listen at {listen.url(listen.port)}: in use, or not permitted"
        ) from e
    finally:
        os.umask(before)
    if listen.kind == "unix":
        listen.path.chmod(0o600)
    return port


def remove_socket(listen: Listen) -> None:
    """Take the socket away, so that clients see at once that nobody serves it."""
    if listen.kind == "unix":
        with contextlib.suppress(OSError):
            listen.path.unlink()
