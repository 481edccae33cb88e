"""The client of a store: one class over three doors.

`connect` and `connect_async` choose the door by the URL:

- `file:///dir`: the store runs inside this process, in that directory, which it locks;
- `unix:///path/of.sock`, `dns:///host:port`: a daemon (`kvstored`), over gRPC and, where it can be
  reached, its data port; `?data=grpc`, `port` or `shared` leaves the client no choice.
"""

from typing import Any

from kvstore.client.aio import DEADLINE_S_DEFAULT, AsyncClient
from kvstore.client.arguments import check_deadline
from kvstore.client.lease import AsyncLease
from kvstore.client.namespaces import NamespaceHandle
from kvstore.client.sync import Client, Lease
from kvstore.client.transport import Transport, run_now
from kvstore.client.url import StoreURL, parse_url
from kvstore.errors import ConfigError, Unavailable

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "Client",
    "Lease",
    "NamespaceHandle",
    "connect",
    "connect_async",
]


async def _embedded(
    url: StoreURL, settings: dict[str, Any], deadline_s: float, blocking: bool
) -> Transport:
    from kvstore.client.embedded import EmbeddedTransport, LoopRunner, ThreadRunner
    from kvstore.config import StoreConfig, build_config

    config = build_config(StoreConfig, {"dir": url.path}, settings)
    runner = ThreadRunner() if blocking else LoopRunner()
    return await EmbeddedTransport.open(config, runner, deadline_s)


async def _daemon(url: StoreURL, deadline_s: float, blocking: bool) -> Transport:
    from kvstore.client.data_transport import DataTransport
    from kvstore.client.grpc_carrier import GrpcCarrier, SuspendingGrpcCarrier

    carrier = GrpcCarrier(url) if blocking else SuspendingGrpcCarrier(url)
    transport = DataTransport(carrier, url, blocking)
    try:
        await transport.meet(deadline_s)
    except Unavailable as e:
        await transport.close()
        raise Unavailable(f"no daemon answers at {url.text}; does kvstored run there? ({e})") from e
    except BaseException:
        await transport.close()
        raise
    return transport


async def _transport(
    text: str, deadline_s: float, settings: dict[str, Any], blocking: bool
) -> Transport:
    url = parse_url(text)
    deadline_s = check_deadline(deadline_s)
    if url.scheme == "file":
        return await _embedded(url, settings, deadline_s, blocking)
    if settings:
        raise ConfigError(
            f"{', '.join(sorted(settings))}: the store at {text} has its settings from its daemon; "
            "only file:// takes some here"
        )
    return await _daemon(url, deadline_s, blocking)


def connect(url: str, *, deadline_s: float = DEADLINE_S_DEFAULT, **settings: Any) -> Client:
    """Open a store.

    `deadline_s`: for every message to it and back. `settings`: of `kvstore.config.StoreConfig`, for
    `file://` only (`dram={"budget_bytes": "4GiB"}`).

    Raises `UnsupportedURL`, `ConfigError`; for a daemon `Unavailable`; for a directory
    `StoreLocked`, `StoreFormatError`, `DiskError`.
    """
    return Client(run_now(_transport(url, deadline_s, settings, blocking=True)), deadline_s)


async def connect_async(
    url: str, *, deadline_s: float = DEADLINE_S_DEFAULT, **settings: Any
) -> AsyncClient:
    """`connect` for asynchronous programs; an embedded store runs on the running event loop."""
    transport = await _transport(url, deadline_s, settings, blocking=False)
    return AsyncClient(transport, deadline_s)
