"""The bare transports that the data plane is measured against: a stream socket and gRPC, each with
a server in a process of its own that answers a size with so many bytes."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SIZE = struct.Struct("<Q")
BYTES_MAX = 64 << 20
METHOD = "/bare.Bare/Get"
START_S_MAX = 20.0
_OPTIONS = (
    ("grpc.max_receive_message_length", BYTES_MAX),
    ("grpc.max_send_message_length", BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 32 << 20),
)


def _serve_one(sock: socket.socket, data: memoryview) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, suppress(OSError):
        while request := sock.recv(SIZE.size, socket.MSG_WAITALL):
            (size,) = SIZE.unpack(request)
            sock.sendall(data[:size])


def serve_socket(port: int) -> None:
    """Serve until killed."""
    data = memoryview(np.ones(BYTES_MAX, np.uint8))
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(16) as pool:
        while True:
            pool.submit(_serve_one, server.accept()[0], data)


def serve_grpc(port: int) -> None:
    """Serve until killed, on the same kind of server that the daemon has."""
    import asyncio

    data = bytes(BYTES_MAX)

    async def get(request: bytes, context: Any) -> bytes:
        return data[: SIZE.unpack(request)[0]]

    async def run() -> None:
        server = grpc.aio.server(options=_OPTIONS)
        handler = {"Get": grpc.unary_unary_rpc_method_handler(get)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare.Bare", handler),)
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


@contextmanager
def server(kind: str, port: int) -> Iterator[None]:
    """`kind`: socket or grpc."""
    command = [sys.executable, "-m", "benchmarks.dataplane.bare", kind, str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ)
    try:
        ends_s = time.monotonic() + START_S_MAX
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None or time.monotonic() > ends_s:
                raise RuntimeError(f"the bare {kind} server does not start")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


class SocketClient:
    """Asks the bare socket server."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, into: memoryview) -> None:
        """Fill `into`."""
        self._sock.sendall(SIZE.pack(len(into)))
        have = 0
        while have < len(into):
            have += self._sock.recv_into(into[have:])

    def close(self) -> None:
        self._sock.close()


class GrpcClient:
    """Asks the bare gRPC server."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        self._get = self._channel.unary_unary(METHOD)

    def get(self, size: int) -> bytes:
        """So many bytes."""
        reply: bytes = self._get(SIZE.pack(size), wait_for_ready=True)
        return reply

    def close(self) -> None:
        self._channel.close()


if __name__ == "__main__":
    {"socket": serve_socket, "grpc": serve_grpc}[sys.argv[1]](int(sys.argv[2]))
