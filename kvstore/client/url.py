"""Store URLs: which door, and where it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from kvstore.errors import UnsupportedURL
from kvstore.server.address import SOCKET_PATH_BYTES_MAX, join_authority, parse_authority

Scheme = Literal["file", "unix", "dns"]
DataPath = Literal["auto", "grpc", "port", "shared"]
_FORMS = "file:///dir, unix:///path/of.sock or dns:///host:port"


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A parsed URL. `path`: of `file` and `unix`. `host`, `port`: of `dns`.

    `data`: how block bytes travel to a daemon: over `grpc`, over the data `port`, or by memory
    `shared` on one host; `auto` takes the best that can be had.
    """

    text: str
    scheme: Scheme
    path: Path = Path()
    host: str = ""
    port: int = 0
    data: DataPath = "auto"

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


def _data_path(text: str, query: str) -> DataPath:
    if not query:
        return "auto"
    name, _, value = query.partition("=")
    known: dict[str, DataPath] = {p: p for p in get_args(DataPath)}
    if name != "data" or value not in known:
        raise UnsupportedURL(f"{text!r}: behind the ? goes data= and one of {', '.join(known)}")
    return known[value]


def parse_url(text: object) -> StoreURL:
    """Raises `UnsupportedURL` with the forms that are known."""
    if not isinstance(text, str) or "\0" in text:
        raise UnsupportedURL(f"{text!r} is no URL; a store's URL is {_FORMS}")
    parts = urlsplit(text)
    data = _data_path(text, parts.query)
    if parts.fragment or (parts.query and parts.scheme == "file"):
        raise UnsupportedURL(f"{text!r}: this store URL has no ? or # part; it is {_FORMS}")
    if parts.scheme == "file":
        return StoreURL(text, "file", path=_local_path(text, parts.netloc, parts.path))
    if parts.scheme == "unix":
        path = _local_path(text, parts.netloc, parts.path)
        if len(bytes(path)) > SOCKET_PATH_BYTES_MAX:
            raise UnsupportedURL(
                f"{text!r}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} B, "
                f"this one {len(bytes(path))}"
            )
        return StoreURL(text, "unix", path=path, data=data)
    if parts.scheme == "dns":
        try:
            host, port = parse_authority(parts.netloc or parts.path.lstrip("/"))
        except ValueError as e:
            raise UnsupportedURL(f"{text!r}: {e}") from e
        if data == "shared":
            raise UnsupportedURL(f"{text!r}: memory is shared over a unix socket; use unix:///path")
        return StoreURL(text, "dns", host=host, port=port, data=data)
    if parts.scheme == "tcp":
        raise UnsupportedURL(f"{text!r}: clients write dns:///{parts.netloc} for a daemon's tcp://")
    raise UnsupportedURL(f"{text!r} has no scheme that is known here; a store's URL is {_FORMS}")
