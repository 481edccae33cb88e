"""Store URLs: which door, and where it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from kvstore.errors import UnsupportedURL
from kvstore.server.address import SOCKET_PATH_BYTES_MAX, join_authority, parse_authority

Scheme = Literal["file", "unix", "dns"]
_FORMS = "file:///dir, unix:///path/of.sock or dns:///host:port"


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A parsed URL. `path`: of `file` and `unix`. `host`, `port`: of `dns`."""

    text: str
    scheme: Scheme
    path: Path = Path()
    host: str = ""
    port: int = 0

    @property
    def grpc_target(self) -> str:
        """The URL as gRPC's resolvers want it."""
        if self.scheme == "unix":
            return f"unix:{self.path}"
        return f"dns:///{join_authority(self.host, self.port)}"


def _local_path(text: str, netloc: str, path: str) -> Path:
    if netloc:
        raise UnsupportedURL(
            f"{text!r} names the host {netloc!r}; a local path has three slashes: "
            f"{text.split('://')[0]}:///{netloc}{path}"
        )
    local = Path(unquote(path))
    if not local.is_absolute() or local == Path("/"):
        raise UnsupportedURL(f"{text!r} needs an absolute path; the store's URL is {_FORMS}")
    return local


def parse_url(text: str) -> StoreURL:
    """Raises `UnsupportedURL` with the forms that are known."""
    parts = urlsplit(text)
    if parts.query or parts.fragment:
        raise UnsupportedURL(f"{text!r}: a store URL has no ? or # part; it is {_FORMS}")
    if parts.scheme == "file":
        return StoreURL(text, "file", path=_local_path(text, parts.netloc, parts.path))
    if parts.scheme == "unix":
        path = _local_path(text, parts.netloc, parts.path)
        if len(bytes(path)) > SOCKET_PATH_BYTES_MAX:
            raise UnsupportedURL(
                f"{text!r}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} B, "
                f"this one {len(bytes(path))}"
            )
        return StoreURL(text, "unix", path=path)
    if parts.scheme == "dns":
        try:
            host, port = parse_authority(parts.netloc or parts.path.lstrip("/"))
        except ValueError as e:
            raise UnsupportedURL(f"{text!r}: {e}") from e
        return StoreURL(text, "dns", host=host, port=port)
    raise UnsupportedURL(f"{text!r} has no scheme that is known here; a store's URL is {_FORMS}")
