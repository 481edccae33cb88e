"""Redis, over its unix socket and over TCP. Needs `redis` and `hiredis`; REDIS_SERVER names the
server's binary if it is not on the path."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis
import timing


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        binary = os.environ.get("REDIS_SERVER", "redis-server")
        server = subprocess.Popen(
            [binary, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path),
             "--save", "", "--appendonly", "no", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            clients = {
                "redis unix": redis.Redis(unix_socket_path=str(path)),
                "redis tcp": redis.Redis(port=port),
            }
            for _ in range(100):
                try:
                    clients["redis unix"].ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.1)
            result = []
            for name, client in clients.items():
                result += timing.rows(name, client.set, client.get)
            timing.tell(result)
        finally:
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    sys.exit(main())
