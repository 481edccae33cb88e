"""Addresses as both sides of the wire read them."""

from urllib.parse import urlsplit

SOCKET_PATH_BYTES_MAX = 107
"""What the kernel's `sockaddr_un` holds."""


def parse_authority(text: str) -> tuple[str, int]:
    """Host and port of `host:port` (`[v6]:port`). Raises `ValueError` saying what is wrong."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ValueError(f"needs host:port with a port from 0 to 65535, not {text!r}") from e
    if not host or port is None or parts.username is not None:
        raise ValueError(f"needs host:port, not {text!r}")
    return host, port


def join_authority(host: str, port: int) -> str:
    """The inverse of `parse_authority`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
