"""Sockets and the server on them."""

import ipaddress
import signal
import socket

import uvicorn
from starlette.types import ASGIApp

from model_adapter.errors import InputError
from model_adapter.serve.limits import ServeLimits

BACKLOG_CONNECTIONS = 64
LOOPBACK_HOSTS = ["127.0.0.1", "[::1]", "localhost"]


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; port 0 takes a free one. Raises `InputError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"--listen {text!r} must be host:port, such as 127.0.0.1:8041")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name counts by what it resolves to."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as e:
        raise InputError(f"--listen: the host {host!r} is unknown: {e}") from e
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `InputError` where the address can't be had."""
    family = socket.getaddrinfo(host, port)[0][0]
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG_CONNECTIONS)
    except OSError as e:
        raise InputError(f"can't listen on {host}:{port}: {e.strerror}") from e


def url_of(listener: socket.socket) -> str:
    """What a client takes as its base URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def make_server(app: ASGIApp, limits: ServeLimits) -> uvicorn.Server:
    """A server for `app`; `run(sockets=[…])` serves until `should_exit`."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=limits.connections_max,
        timeout_graceful_shutdown=limits.shutdown_s_max,
    )
    return uvicorn.Server(config)


def run_until_signal(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then return; for the main thread."""
    # The server raises the signal that ended it once more, for the handler that was there before.
    before = {sig: signal.signal(sig, _nothing) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _nothing(sig: int, frame: object) -> None:
    """The server has stopped already."""
