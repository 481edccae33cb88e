"""The data port itself: the listening socket, the connections, and what they share."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvstore.config import ServerConfig
from kvstore.errors import ConfigError
from kvstore.server.listen import Listen, clear_stale_socket, parse_listen, remove_socket
from kvstore.server.metrics import CallMetrics
from kvstore.server.port import sockets
from kvstore.server.port.calls import Calls, Reply
from kvstore.server.port.connection import Connection
from kvstore.server.port.peer import read_only
from kvstore.server.port.tokens import Tokens
from kvstore.server.service import Service
from kvstore.store import Engine
from kvstore.store.types import SharedArena, SharedHbm
from kvstore.store.waiting import ByteBudget

SWEEP_S = 0.25
"""How often connections that stand still are looked for."""
BACKLOG = 128
_SUFFIX = ".data"
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def data_listen(config: ServerConfig, door: Listen) -> Listen | None:
    """Where the data port listens, beside the gRPC door; None for nowhere. Raises `ConfigError`."""
    text = config.data_port.listen
    if text == "off":
        return None
    if text != "auto":
        return parse_listen(text, "server.data_port.listen")
    if door.kind == "unix":
        return parse_listen(f"unix://{door.path}{_SUFFIX}", "server.data_port.listen")
    return Listen("tcp", host=door.host, port=0)


class DataPort:
    """Listens from `open` on, until `close`. Belongs to the engine's event loop."""

    def __init__(
        self,
        listen: Listen,
        config: ServerConfig,
        engine: Engine,
        service: Service,
        metrics: CallMetrics,
        instance_id: bytes,
    ) -> None:
        self._listen, self._server_config = listen, config
        self._engine, self._metrics = engine, metrics
        self.config = config.data_port
        self.instance_id = instance_id
        self.message_bytes_max = config.message_bytes_max
        self.loop = asyncio.get_running_loop()
        self.tokens = Tokens(self.config.token_ttl_s, time.monotonic)
        self.calls = Calls(service, engine, self.config.frame_bytes_max)
        self.receiving = ByteBudget(self.config.receive_bytes_max)
        self.draining = False
        self.arena: SharedArena | None = None
        self.hbm: SharedHbm | None = None
        self.arena_fd = -1
        self.arena_map_bytes = 0
        self._connections: set[Connection] = set()
        self._fds: dict[Connection, list[int]] = {}
        self._work: set[asyncio.Task[Reply]] = set()
        self._workers = ThreadPoolExecutor(self.config.bulk_workers, "kvstore-port")
        self._socket: socket.socket | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    # life

    def open(self) -> None:
        """Begin to listen. Raises `ConfigError`."""
        self._share()
        self._socket = self._bind()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self.loop.add_reader(self._socket, self._accept)
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        _log.info("data port at %s, shared memory %s", self.address, "on" if self.arena else "off")

    def _share(self) -> None:
        if not self.config.share or self._listen.kind != "unix":
            return
        arena = self._engine.arena
        try:
            self.arena_fd = read_only(arena.fd)
        except OSError as e:
            _log.warning("the arena can't be shared: %s", e)
            return
        self.arena = arena
        self.hbm = self._engine.shared_hbm
        self.arena_map_bytes = os.fstat(arena.fd).st_size

    def _bind(self) -> socket.socket:
        listen = self._listen
        if listen.kind == "unix":
            clear_stale_socket(listen.path, "server.data_port.listen")
            sock = socket.socket(socket.AF_UNIX)
        else:
            sock = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # the socket must never exist with wider permissions, not even between bind and chmod
        before = os.umask(0o177)
        try:
            is_unix = listen.kind == "unix"
            sock.bind(os.fspath(listen.path) if is_unix else (listen.host, listen.port))
        except OSError as e:
            sock.close()
            raise ConfigError(
                f"server.data_port.listen: can't listen at {listen.url(listen.port)}: {e.strerror}"
            ) from e
        finally:
            os.umask(before)
        return sock

    @property
    def address(self) -> str:
        """As Hello tells it."""
        if self._listen.kind == "unix":
            return f"unix://{self._listen.path}"
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    async def close(self, timeout_s: float) -> None:
        """Take no more, let calls under way finish for so long, and end every connection."""
        self.draining = True
        if self._socket is not None:
            self.loop.remove_reader(self._socket)
            self._socket.close()
            remove_socket(self._listen)
        for connection in [c for c in self._connections if not c.busy]:
            connection.close()
        ends_s = self.loop.time() + timeout_s
        while (self._connections or self._work) and self.loop.time() < ends_s:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1

    # connections

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError as e:
            # one that went away again, or no descriptor is left; the listening socket stays
            _log.debug("no connection taken: %s", e)
            return
        if len(self._connections) >= self.config.connections_max:
            sock.close()
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sockets.prepare(sock)
        self._connections.add(Connection(self, sock))

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for connection in [c for c in self._connections if c.due_s < now_s]:
            connection.time_out()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        for fd in self._fds.pop(connection, ()):
            os.close(fd)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._connections)

    def keep_fds(self, connection: Connection, fds: list[int]) -> None:
        """File descriptors that came before their message was whole; one is enough for any."""
        kept = self._fds.setdefault(connection, [])
        for fd in fds:
            if kept:
                os.close(fd)
            else:
                kept.append(fd)

    def take_fds(self, connection: Connection) -> list[int]:
        """The descriptors that came so far; the caller closes them."""
        return self._fds.pop(connection, [])

    # what connections need

    async def work(self, function: Callable[..., _T], *args: Any) -> _T:
        """Move bytes on a worker."""
        return await self.loop.run_in_executor(self._workers, function, *args)

    def adopt(self, work: "asyncio.Task[Reply]", body_bytes: int) -> None:
        """Keep a call's work until it ends, whoever waits; its body counts until then."""
        self._work.add(work)

        def ended(task: "asyncio.Task[Reply]") -> None:
            self._work.discard(task)
            if body_bytes:
                self.receiving.give_back(body_bytes)
            if not task.cancelled():
                task.exception()

        work.add_done_callback(ended)

    def timeout_s(self, asked_ms: int) -> float:
        """How long a call may take."""
        asked_s = asked_ms / 1000 if asked_ms else self._server_config.deadline_s_default
        return min(asked_s, self._server_config.deadline_s_max)

    def count(self, name: str) -> None:
        """Add to a counter of `kvstore.metrics`."""
        self._engine.metrics.add(name)

    def observe(self, method: str, result: str, started_s: float) -> None:
        """Count a call."""
        self._metrics.observe(method, result, time.perf_counter() - started_s)
