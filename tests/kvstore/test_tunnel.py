"""A daemon on loopback, reached through forwarded ports as through an SSH tunnel."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
from daemons import STORE_SETTINGS, Daemon, chain, free_port, fresh_namespace, keys_of

from kvstore import Outcome, connect

FAR, NEAR = "127.0.0.1", "127.0.0.2"
"""The daemon's side of the tunnel, and the client's."""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def tunnel(ports: list[int]) -> Iterator[list[int]]:
    """Ports of `NEAR` that lead to the same ones of `FAR`; the port of each connection made."""
    made: list[int] = []
    loop = asyncio.new_event_loop()

    async def listen(port: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            made.append(port)
            far_reader, far_writer = await asyncio.open_connection(FAR, port)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

        await asyncio.start_server(serve, NEAR, port)

    for port in ports:
        loop.run_until_complete(listen(port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(_cancel_others())
        loop.close()


@pytest.mark.parametrize("both", [True, False], ids=["both ports", "gRPC's alone"])
def test_blocks_pass_a_tunnel(both: bool) -> None:
    port, data_port = free_port(), free_port()
    settings = {**STORE_SETTINGS, "server.data_port.listen": f"tcp://{FAR}:{data_port}"}
    url = f"dns:///{NEAR}:{port}"
    with (
        Daemon(f"tcp://{FAR}:{port}", None, settings),
        tunnel([port, data_port] if both else [port]) as made,
    ):
        with connect(url, deadline_s=20.0) as client:
            ns = client.open_namespace(fresh_namespace())
            blocks = chain(ns, 5)
            client.put(ns, blocks)
            with client.acquire(ns, keys_of(blocks)) as lease:
                read = client.read(lease, keys_of(blocks))
                assert [b.outcome for b in read] == [Outcome.HIT] * 5
                for block, came in zip(blocks, read, strict=True):
                    assert [bytes(s) for s in came.sections] == list(block.sections)
            # without the data port's, gRPC carries the bytes
            assert (client.stat().counters["port_connections"] > 0) == both
        assert (data_port in made) == both
