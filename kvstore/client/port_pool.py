"""The connections of one client to its daemon's data port."""

import threading
import time
from typing import Any

from kvstore.client.port_stream import PortStream, PortUnreachable
from kvstore.client.url import StoreURL
from kvstore.errors import InvalidRequest

STREAMS_IDLE_MAX = 16
RETRY_S = 2.0
"""A data port that could not be reached is left alone for so long."""
CONNECT_S_MAX = 2.0
STAGING_BYTES = 16 << 20
_TOKEN_MARGIN_S = 1.0


class PortPool:
    """Opens, keeps and hands out streams. Any thread may call."""

    def __init__(self, url: StoreURL) -> None:
        self._host = url.host
        self._want_share = url.data in ("auto", "shared")
        self.forced = url.data in ("port", "shared")
        self._lock = threading.Lock()
        self._idle: list[PortStream] = []
        self._announced: Any = None
        self._fresh_until_s = 0.0
        self._down_until_s = 0.0
        self.closed = False

    def announce(self, port: Any) -> None:
        """What Hello said: a `DataPort` with a new token, or None."""
        with self._lock:
            self._announced = port
            if port is not None:
                ttl_s = max(port.token_ttl_s - _TOKEN_MARGIN_S, port.token_ttl_s / 2)
                self._fresh_until_s = time.monotonic() + ttl_s

    @property
    def frame_bytes_max(self) -> int:
        """One body. 0 where there is no data port."""
        return self._announced.frame_bytes_max if self._announced is not None else 0

    @property
    def usable(self) -> bool:
        """Whether there is a data port worth trying now."""
        return self._announced is not None and time.monotonic() >= self._down_until_s

    @property
    def needs_token(self) -> bool:
        """Whether a new stream would need another Hello first."""
        return time.monotonic() >= self._fresh_until_s

    def idle(self) -> PortStream | None:
        """A stream that is open already."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def open(self, timeout_s: float) -> PortStream:
        """A new stream. Raises `PortUnreachable`; then the port is left alone for a while."""
        port = self._announced
        if port is None:
            raise PortUnreachable("the daemon has no data port")
        share = self._want_share and port.share
        staging_bytes = min(STAGING_BYTES, port.frame_bytes_max) if share else 0
        try:
            return PortStream.open(
                port.address,
                self._host,
                port.token,
                staging_bytes,
                share,
                min(timeout_s, CONNECT_S_MAX),
            )
        except InvalidRequest as e:
            # the token is stale: the next try asks for another
            self._fresh_until_s = 0.0
            raise PortUnreachable(str(e)) from e
        except PortUnreachable:
            self._fresh_until_s = 0.0
            self._down_until_s = time.monotonic() + RETRY_S
            raise

    def give(self, stream: PortStream) -> None:
        """A stream whose call is over."""
        with self._lock:
            if not self.closed and len(self._idle) < STREAMS_IDLE_MAX:
                self._idle.append(stream)
                return
        stream.close()

    def drop_idle(self) -> None:
        """One was found dead, so the others may be too."""
        with self._lock:
            streams, self._idle = self._idle, []
        for stream in streams:
            stream.close()

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self.drop_idle()
