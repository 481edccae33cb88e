"""A peer of the data port that says whatever a test wants, and what a daemon still holds."""

import os
import socket
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from daemons import Daemon

from kvstore.server.messages import method_path
from kvstore.server.port import frames
from kvstore.server.port.frames import HEADER_BYTES, NUMBER_OF_METHOD, Head, Kind
from kvstore.v1 import kvstore_pb2 as pb

TIMEOUT_S = 20.0


def hello(daemon: Daemon) -> Any:
    """What the daemon says of itself."""
    target = daemon.url.replace("unix://", "unix:")
    with grpc.insecure_channel(target) as channel:
        data = channel.unary_unary(method_path("Hello"))(b"", timeout=TIMEOUT_S)
    return pb.HelloReply.FromString(data)


class Peer:
    """A socket to the data port."""

    def __init__(self, daemon: Daemon, token: bytes | None = None, opened: bool = True) -> None:
        port = hello(daemon).data_port
        self.token = port.token if token is None else token
        scheme, _, rest = port.address.partition("://")
        if scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(rest)
        else:
            host, _, number = rest.rpartition(":")
            self.sock = socket.create_connection((host, int(number)))
        self.sock.settimeout(TIMEOUT_S)
        if opened:
            self.send(open_frame(self.token))
            head, _, _ = self.receive()
            assert head.kind is Kind.OPENED

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def call(self, name: str, message: Any, body: bytes = b"") -> tuple[Head, bytes, bytes]:
        self.send(call_frame(name, message, body))
        return self.receive()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise EOFError(f"closed after {len(data)} of {size} B")
            data += more
        return data

    def receive(self) -> tuple[Head, bytes, bytes]:
        """The next frame. Raises `EOFError`."""
        data = self._exactly(HEADER_BYTES)
        head = frames.parse_head(memoryview(data))
        data += self._exactly(head.message_bytes)
        message = frames.check_message(memoryview(data), head)
        return head, message, self._exactly(head.body_bytes)

    def refused(self) -> str:
        """Name of the error with which the daemon ends the connection."""
        head, message, _ = self.receive()
        assert head.kind is Kind.ERROR
        self.ended()
        return pb.PortError.FromString(message).name

    def ended(self) -> None:
        """The daemon has closed; what it still had sent is of no interest."""
        try:
            while self.sock.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_frame(token: bytes, **more: Any) -> bytes:
    message = pb.PortOpenRequest(token=token, **more).SerializeToString()
    return b"".join(frames.encode(Kind.OPEN, message))


def call_frame(name: str, message: Any, body: bytes = b"", **more: Any) -> bytes:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    parts = frames.encode(Kind.CALL, data, [body], method=NUMBER_OF_METHOD[name], **more)
    return b"".join(parts)


def mangled(rng: np.random.Generator, frame: bytes) -> bytes:
    """A frame with bytes changed, cut off or put in, or no frame at all."""
    data = bytearray(frame)
    kind = rng.integers(4)
    if kind == 0:
        for at in rng.integers(0, len(data), rng.integers(1, 8)):
            data[at] = rng.integers(256)
    elif kind == 1:
        del data[rng.integers(0, len(data)) :]
    elif kind == 2:
        at = rng.integers(0, len(data))
        data[at:at] = rng.bytes(int(rng.integers(1, 64)))
    else:
        data = bytearray(rng.bytes(int(rng.integers(1, 200))))
    return bytes(data)


def open_fds(daemon: Daemon) -> int:
    """How many file descriptors the daemon has."""
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def resident_bytes(daemon: Daemon) -> int:
    """Memory of the daemon, the arena's pages included."""
    assert daemon.process is not None
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def arena_of(daemon: Daemon) -> int:
    """A writable descriptor of the daemon's arena; the caller closes it."""
    assert daemon.process is not None
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    for entry in folder.iterdir():
        if "memfd:kvstore-dram" in os.readlink(entry):
            return os.open(entry, os.O_RDWR)
    raise AssertionError("the daemon has no arena")
