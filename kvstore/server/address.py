"""Addresses as both sides of the wire read them."""

from urllib.parse import urlsplit

SOCKET_PATH_BYTES_MAX = 107
"""What the kernel's `sockaddr_un` holds."""


def parse_authority(text: str) -> tuple[str, int]:
    """Host and port of `host:port` (`[v6]:port`). Raises `ValueError` saying what is wrong."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port is None or parts.username is not None:
        raise ValueError(f"needs host:port, not {text!r}")
    return parts.hostname, parts.port


def join_authority(host: str, port: int) -> str:
    """The inverse of `parse_authority`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
