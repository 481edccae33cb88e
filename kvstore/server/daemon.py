"""`kvstored`: opens the store, opens the door, and closes both in order.

Start: settings are checked and logged once, the store opens (which may take its directory's lock),
then the door opens and health turns to SERVING. Stop (SIGTERM, SIGINT): health turns to
NOT_SERVING, calls that only wait are ended, no new ones are taken, those in flight get
`server.drain_s_max`, and the store writes back what is dirty and closes. A second signal cuts the
calls' time short, never the store's.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from kvstore.config import DaemonConfig, ServerConfig
from kvstore.errors import ConfigError
from kvstore.server.allocator import keep_freed_memory
from kvstore.server.gate import Gate
from kvstore.server.listen import bind, parse_listen, parse_loopback, remove_socket
from kvstore.server.machine import budget_warnings, files_warnings, raise_open_files
from kvstore.server.messages import SERVICE
from kvstore.server.metrics import CallMetrics, StoreCollector, serve_metrics
from kvstore.server.port.port import DataPort, data_listen
from kvstore.server.service import Service
from kvstore.store import Engine
from kvstore.v1 import kvstore_pb2 as pb

MESSAGE_SLACK_BYTES = 64 << 10
"""Above the limit, so that a message little too large gets our error text and not gRPC's."""
WINDOW_BYTES = 32 << 20
"""HTTP/2 flow-control window. Left to its probing, gRPC moves our messages at half the speed."""
INSTANCE_ID_BYTES = 16
_log = logging.getLogger(__name__)


def _version() -> str:
    try:
        return version("ds41-kvstore")
    except PackageNotFoundError:
        return "unknown (running from a source tree)"


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.message_bytes_max + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", config.message_bytes_max + MESSAGE_SLACK_BYTES),
        ("grpc.so_reuseport", 0),  # a second daemon on the port must fail, not share it
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]


class Daemon:
    """One engine behind one gRPC server; `run` is its whole life."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._server_config = config.server
        self._listen = parse_listen(self._server_config.listen)
        self._data_listen = data_listen(self._server_config, self._listen)
        self._data_port: DataPort | None = None
        self._instance_id = os.urandom(INSTANCE_ID_BYTES)
        self._version = _version()
        self._metrics_at: tuple[str, int] | None = None
        if self._server_config.metrics_listen:
            self._metrics_at = parse_loopback(
                self._server_config.metrics_listen, "server.metrics_listen"
            )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._health = health.aio.HealthServicer()

    def stop(self) -> None:
        """Begin to drain; called again, cut the calls' time short."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Open the store and serve until `stop`. `on_ready` gets the URL once calls are answered.

        Raises `ConfigError`, and what `Engine.open` raises.
        """
        text = self._config.model_dump_json()
        _log.info("kvstored %s, effective configuration: %s", _version(), text)
        engine = await self._open()
        if engine is None:
            _log.info("stopped while the store was opening")
            return
        try:
            await self._serve(engine, on_ready)
        finally:
            await engine.close()
            _log.info("the store is closed")

    async def _open(self) -> Engine | None:
        """The store; None where `stop` comes first."""
        opening = asyncio.create_task(Engine.open(self._config))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if opening.done():
            return opening.result()
        opening.cancel()
        await asyncio.wait((opening,))
        return None if opening.cancelled() else opening.result()

    async def _serve(self, engine: Engine, on_ready: Callable[[str], None] | None) -> None:
        registry = CollectorRegistry()
        registry.register(StoreCollector(engine.stat, asyncio.get_running_loop()))
        metrics = CallMetrics(registry)
        service = Service(
            engine, self._hello, self._server_config.message_bytes_max, self._instance_id
        )
        gate = Gate(service, self._server_config, metrics)
        stop_metrics = self._serve_metrics(registry)
        try:
            server, port = self._open_door(gate)
            try:
                self._open_data_port(engine, service, metrics)
                await self._answer(server, self._listen.url(port), on_ready)
            finally:
                await self._drain(server, service, gate)
        finally:
            # A scrape asks this loop, so stopping the metrics on it would wait for itself.
            await asyncio.to_thread(stop_metrics)

    async def _answer(self, server: Any, url: str, on_ready: Callable[[str], None] | None) -> None:
        await server.start()
        for name in (SERVICE, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        _log.info("serving %s", url)
        if on_ready is not None:
            on_ready(url)
        await self._stop.wait()

    def _hello(self) -> Any:
        reply = pb.HelloReply(
            version=self._version,
            instance_id=self._instance_id,
            message_bytes_max=self._server_config.message_bytes_max,
            deadline_s_max=self._server_config.deadline_s_max,
        )
        if self._data_port is not None:
            reply.data_port.address = self._data_port.address
            reply.data_port.token = self._data_port.tokens.make()
            reply.data_port.token_ttl_s = self._data_port.config.token_ttl_s
            reply.data_port.frame_bytes_max = self._data_port.config.frame_bytes_max
            reply.data_port.share = self._data_port.arena is not None
        return reply

    def _open_data_port(self, engine: Engine, service: Service, metrics: CallMetrics) -> None:
        if self._data_listen is None:
            return
        port = DataPort(
            self._data_listen, self._server_config, engine, service, metrics, self._instance_id
        )
        port.open()
        self._data_port = port

    def _open_door(self, gate: Gate) -> tuple[Any, int]:
        server = grpc.aio.server(
            options=_options(self._server_config),
            maximum_concurrent_rpcs=self._server_config.calls_max,
        )
        server.add_generic_rpc_handlers((gate.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._server_config.reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server, bind(self._listen, server.add_insecure_port)

    def _serve_metrics(self, registry: CollectorRegistry) -> Callable[[], None]:
        if self._metrics_at is None:
            return lambda: None
        host, port = self._metrics_at
        try:
            return serve_metrics(host, port, registry)
        except OSError as e:
            raise ConfigError(
                f"server.metrics_listen: can't listen at {host}:{port}: {e.strerror}"
            ) from e

    async def _drain(self, server: Any, service: Service, gate: Gate) -> None:
        ends_s = time.monotonic() + self._server_config.drain_s_max
        _log.info("draining, at most %g s", self._server_config.drain_s_max)
        await self._health.enter_graceful_shutdown()
        service.drain()
        stopping = asyncio.create_task(server.stop(self._server_config.drain_s_max))
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((stopping, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            _log.warning("a second signal: calls in flight are cut off")
            await server.stop(0)
        hurried.cancel()
        await stopping
        if self._data_port is not None:
            await self._data_port.close(max(0.0, ends_s - time.monotonic()))
        await gate.settle(max(0.0, ends_s - time.monotonic()))
        remove_socket(self._listen)


async def serve(config: DaemonConfig, on_ready: Callable[[str], None] | None = None) -> None:
    """Run a daemon, and nothing else in this process, until SIGTERM or SIGINT.

    Raises as `Daemon.run`.
    """
    daemon = Daemon(config)
    keep_freed_memory()
    for warning in (*budget_warnings(config), *files_warnings(config, raise_open_files())):
        _log.warning("%s", warning)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    await daemon.run(on_ready)
