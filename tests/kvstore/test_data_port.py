"""The data port against peers that are wrong, slow, half gone or hostile."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import STORE_SETTINGS, Daemon, chain, free_port, fresh_namespace, keys_of, until
from port_peer import Peer, call_frame, hello, mangled, open_fds, open_frame

from kvstore import DS41F_LAYOUT, Outcome, PutOutcome, connect
from kvstore.errors import Unavailable
from kvstore.server.port import frames, sockets
from kvstore.server.port.frames import HEADER_BYTES, NUMBER_OF_METHOD, Kind
from kvstore.server.port.peer import is_own_user
from kvstore.server.port.tokens import TOKEN_BYTES, Tokens, Verdict
from kvstore.v1 import kvstore_pb2 as pb

SETTINGS = {
    **STORE_SETTINGS,
    "dram.budget_bytes": "64MiB",
    "server.data_port.stall_s_max": 0.6,
    "server.data_port.handshake_s_max": 0.6,
    "server.data_port.connections_max": 8,
    "server.message_bytes_max": "1MiB",
    "server.data_port.frame_bytes_max": "8MiB",
}
STORED = PutOutcome.STORED


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("port")
    with Daemon(f"unix://{folder}/kv.sock", None, SETTINGS) as daemon:
        yield daemon


def counters(daemon: Daemon) -> dict[str, int]:
    with connect(f"{daemon.url}?data=grpc") as client:
        return client.stat().counters


def still_serves(daemon: Daemon) -> None:
    with connect(f"{daemon.url}?data=port") as client:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, 3)
        assert client.put(ns, blocks) == [STORED] * 3
        with client.acquire(ns, keys_of(blocks)) as lease:
            read = client.read(lease, lease.keys)
        assert [list(map(bytes, d.sections)) for d in read] == [b.sections for b in blocks]


# tokens


def test_a_token_holds_for_its_time_and_its_daemon_alone() -> None:
    now = [100.0]
    tokens = Tokens(30.0, lambda: now[0])
    token = tokens.make()
    assert tokens.check(token) is Verdict.GOOD
    assert Tokens(30.0, lambda: now[0]).check(token) is Verdict.WRONG
    for at in range(TOKEN_BYTES):
        flipped = token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :]
        assert tokens.check(flipped) is Verdict.WRONG
    assert tokens.check(token[:-1]) is Verdict.WRONG
    assert tokens.check(b"") is Verdict.WRONG
    now[0] += 30.0
    assert tokens.check(token) is Verdict.STALE


def test_a_wrong_token_opens_nothing(daemon: Daemon) -> None:
    before = counters(daemon)["port_refused_tokens"]
    for token in (b"", bytes(TOKEN_BYTES), hello(daemon).data_port.token[::-1]):
        with Peer(daemon, token, opened=False) as peer:
            peer.send(open_frame(token))
            assert peer.refused() == "InvalidRequest"
    assert counters(daemon)["port_refused_tokens"] == before + 3


def test_a_stale_token_costs_its_client_another_hello(tmp_path: Path) -> None:
    settings = {**STORE_SETTINGS, "server.data_port.token_ttl_s": 0.3}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        token = hello(daemon).data_port.token
        with connect(f"{daemon.url}?data=port") as client:
            client._client._transport._pool.drop_idle()
            time.sleep(0.4)
            client.stat()
            with Peer(daemon, token, opened=False) as peer:
                peer.send(open_frame(token))
                assert peer.refused() == "InvalidRequest"
            client.open_namespace(fresh_namespace())
            assert client.stat().counters["port_refused_tokens"] == 1
    finally:
        daemon.kill()


# frames


def valid_call() -> bytes:
    return call_frame("Match", pb.MatchRequest(namespace_id=bytes(32), keys=bytes(32)))


def header(kind: int, message: bytes = b"", body_bytes: int = 0, **more: int) -> bytes:
    """A frame that claims a body which does not follow."""
    (data,) = frames.encode(Kind(kind), message, **more)
    fields = bytearray(data[: HEADER_BYTES - 8])
    fields[24:32] = body_bytes.to_bytes(8, "little")
    checksum = frames._checksum(bytes(fields), message)
    return bytes(fields) + checksum.to_bytes(8, "little") + message


MALFORMED = {
    "no magic": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(40),
    "unknown kind": valid_call()[:4] + b"\x09" + valid_call()[5:],
    "an answer": header(Kind.REPLY),
    "a second opening": open_frame(b"x"),
    "a flipped message": valid_call()[:-1] + bytes([valid_call()[-1] ^ 1]),
    "a flipped header": valid_call()[:8] + b"\x07" + valid_call()[9:],
    "an unknown method": header(Kind.CALL, method=999),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_frame_ends_its_connection(daemon: Daemon, name: str) -> None:
    before = counters(daemon)["port_malformed_frames"]
    with Peer(daemon) as peer:
        peer.send(MALFORMED[name])
        assert peer.refused() == "InvalidRequest"
    assert counters(daemon)["port_malformed_frames"] == before + 1
    still_serves(daemon)


@pytest.mark.parametrize("opened", [False, True])
def test_a_frame_over_the_limit_is_refused_before_it_comes(daemon: Daemon, opened: bool) -> None:
    with Peer(daemon, opened=opened) as peer:
        peer.send(header(Kind.CALL if opened else Kind.OPEN, body_bytes=1 << 62))
        assert peer.refused() == "MessageTooLarge"
    with Peer(daemon, opened=opened) as peer:
        data = bytearray(header(Kind.CALL if opened else Kind.OPEN))
        data[12:16] = (0xFFFFFFFF).to_bytes(4, "little")
        peer.send(bytes(data))
        assert peer.refused() == "MessageTooLarge"


def test_errors_of_calls_leave_the_connection_open(daemon: Daemon) -> None:
    with Peer(daemon) as peer:
        for name, message, error in (
            ("Match", pb.MatchRequest(namespace_id=bytes(32), keys=bytes(32)), "UnknownNamespace"),
            ("Match", b"\xff\xff\xff", "InvalidRequest"),
            ("Renew", pb.RenewRequest(lease_id=1), "LeaseExpired"),
            ("BulkRead", pb.BulkReadRequest(lease_id=1, keys=bytes(31)), "InvalidRequest"),
            ("BulkPut", pb.BulkPutRequest(keys=bytes(32)), "InvalidRequest"),
            (
                "BulkPut",
                pb.BulkPutRequest(keys=bytes(32), parents=bytes(32), section_bytes=[8]),
                "InvalidRequest",
            ),
            (
                "BulkPut",
                pb.BulkPutRequest(
                    keys=bytes(32), parents=bytes(32), section_bytes=[8], staging_offset=0
                ),
                "InvalidRequest",
            ),
        ):
            head, reply, _ = peer.call(name, message)
            assert head.kind is Kind.ERROR
            assert head.method == NUMBER_OF_METHOD[name]
            assert pb.PortError.FromString(reply).name == error, name
        head, _, _ = peer.call("Release", pb.ReleaseRequest(lease_id=1), b"a body it has not")
        assert head.kind is Kind.ERROR
        head, _, _ = peer.call("Release", pb.ReleaseRequest(lease_id=1), b"")
        assert head.kind is Kind.REPLY


def test_calls_sent_ahead_are_answered_in_order(daemon: Daemon) -> None:
    with Peer(daemon) as peer:
        message = pb.ReleaseRequest(lease_id=1)
        peer.send(b"".join(call_frame("Release", message, call=n) for n in range(3000)))
        assert [peer.receive()[0].call for _ in range(3000)] == list(range(3000))


def test_a_frame_may_come_byte_by_byte(daemon: Daemon) -> None:
    with Peer(daemon) as peer:
        for byte in valid_call():
            peer.send(bytes([byte]))
        assert peer.receive()[0].kind is Kind.ERROR


# peers that are slow or gone


def test_a_half_closed_peer_still_gets_its_answer(daemon: Daemon) -> None:
    with Peer(daemon) as peer:
        peer.send(valid_call())
        peer.sock.shutdown(socket.SHUT_WR)
        assert peer.receive()[0].kind is Kind.ERROR
        peer.ended()


@pytest.mark.parametrize(
    ("opened", "part"),
    [
        (False, b""),
        (False, open_frame(bytes(TOKEN_BYTES))[:17]),
        (False, open_frame(bytes(TOKEN_BYTES))[:-1]),
        (True, valid_call()[:17]),
        (True, valid_call()[:-1]),
    ],
)
def test_a_stalled_peer_is_let_go(daemon: Daemon, opened: bool, part: bytes) -> None:
    before = counters(daemon)["port_stalled"]
    with Peer(daemon, opened=opened) as peer:
        peer.send(part)
        peer.ended()
    assert counters(daemon)["port_stalled"] == before + 1


def big_lease(client: Any, blocks: int = 100) -> tuple[Any, Any]:
    ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
    put = chain(ns, blocks)
    assert client.put(ns, put) == [STORED] * blocks
    return ns, client.acquire(ns, keys_of(put))


def test_a_peer_that_takes_nothing_holds_no_blocks(daemon: Daemon) -> None:
    with connect(f"{daemon.url}?data=port") as client:
        ns, lease = big_lease(client)
        before = client.stat().counters["port_stalled"]
        with Peer(daemon) as peer:
            message = pb.BulkReadRequest(lease_id=lease.id, keys=b"".join(lease.keys[:30]))
            for _ in range(4):
                peer.send(call_frame("BulkRead", message))
            until(lambda: client.stat().counters["port_stalled"] == before + 1)
        lease.release()
        assert client.evict(ns) == 100


def test_a_peer_that_stops_in_a_body_leaves_nothing(daemon: Daemon) -> None:
    with connect(f"{daemon.url}?data=port") as client:
        ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
        (block,) = chain(ns, 1)
        message = pb.BulkPutRequest(
            namespace_id=ns.id,
            keys=block.key,
            parents=block.parent,
            section_bytes=ns.layout.section_bytes,
        )
        frame = call_frame("BulkPut", message, b"".join(block.sections))
        before = client.stat().counters
        with Peer(daemon) as stalled, Peer(daemon) as gone:
            stalled.send(frame[:-5])
            gone.send(frame[:-5])
            gone.close()
            stalled.ended()
        after = client.stat()
        assert after.counters["port_stalled"] == before["port_stalled"] + 1
        until(lambda: client.stat().counters["port_broken"] > before["port_broken"])
        assert after.reservations == 0
        assert client.match(ns, [block.key]).hit_blocks == 0
        assert client.put(ns, [block]) == [STORED]
        client.evict(ns)


def test_connections_have_a_limit(daemon: Daemon) -> None:
    peers = [Peer(daemon) for _ in range(8)]
    with Peer(daemon, opened=False) as one_more:
        one_more.ended()
    # the client finds the port closed and goes over gRPC
    with connect(daemon.url) as client:
        client.open_namespace(fresh_namespace())
    for peer in peers:
        peer.close()
    until(lambda: open_fds(daemon) < 60)
    still_serves(daemon)


# staging


def test_staging_that_could_be_cut_short_is_refused(daemon: Daemon) -> None:
    token = hello(daemon).data_port.token
    for seal, size, ok in (
        (0, 1 << 16, False),
        (fcntl.F_SEAL_SHRINK, 1 << 16, True),
        (fcntl.F_SEAL_SHRINK, 1 << 20, False),
    ):
        fd = os.memfd_create("staging", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 16)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        with Peer(daemon, opened=False) as peer:
            peer.sock.sendmsg(
                [open_frame(token, share=True, staging_bytes=size)], sockets.with_fd(fd)
            )
            if ok:
                assert peer.receive()[0].kind is Kind.OPENED
            else:
                assert peer.refused() == "InvalidRequest"
        os.close(fd)


def test_the_own_user_is_known_by_the_socket() -> None:
    a, b = socket.socketpair()
    assert is_own_user(a)
    a.close()
    b.close()
    tcp = socket.socket()
    assert not is_own_user(tcp)
    tcp.close()


# ways around


def test_without_a_data_port_grpc_carries_everything(tmp_path: Path) -> None:
    settings = {**STORE_SETTINGS, "server.data_port.listen": "off"}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, settings).start()
    try:
        assert not hello(daemon).HasField("data_port")
        with connect(daemon.url) as client:
            ns = client.open_namespace(fresh_namespace())
            blocks = chain(ns, 20)
            assert client.put(ns, blocks) == [STORED] * 20
            with client.acquire(ns, keys_of(blocks)) as lease:
                read = client.read(lease, lease.keys)
            assert [d.outcome for d in read] == [Outcome.HIT] * 20
        for forced in ("port", "shared"):
            with pytest.raises(Unavailable, match="data port"):
                connect(f"{daemon.url}?data={forced}")
    finally:
        daemon.kill()


def test_a_data_port_that_can_not_be_reached_is_gone_around(tmp_path: Path) -> None:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, STORE_SETTINGS).start()
    try:
        (tmp_path / "kv.sock.data").unlink()
        with connect(daemon.url) as client:
            ns = client.open_namespace(fresh_namespace())
            blocks = chain(ns, 20)
            assert client.put(ns, blocks) == [STORED] * 20
            assert client.stat().counters["port_connections"] == 0
        with pytest.raises(Unavailable, match="data port"):
            connect(f"{daemon.url}?data=port")
    finally:
        daemon.kill()


def test_tcp_has_a_data_port_of_its_own(tmp_path: Path) -> None:
    daemon = Daemon(f"tcp://127.0.0.1:{free_port()}", None, STORE_SETTINGS).start()
    try:
        with connect(f"{daemon.url}?data=port") as client:
            ns = client.open_namespace(fresh_namespace(DS41F_LAYOUT))
            blocks = chain(ns, 30)
            assert client.put(ns, blocks) == [STORED] * 30
            room = np.zeros(30 * DS41F_LAYOUT.block_bytes, np.uint8)
            with client.acquire(ns, keys_of(blocks)) as lease:
                read = client.read(lease, lease.keys, into=room)
            assert room.tobytes() == b"".join(s for b in blocks for s in b.sections)
            assert [d.outcome for d in read] == [Outcome.HIT] * 30
            counts = client.stat().counters
            assert (counts["port_connections"], counts["located_blocks"]) == (1, 0)
    finally:
        daemon.kill()


# fuzz


def test_fuzzed_peers_leave_no_trace(daemon: Daemon, seed: int, long: bool) -> None:
    rng = np.random.default_rng(seed)
    with connect(f"{daemon.url}?data=grpc") as client:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, 4)
        client.put(ns, blocks)
        keys = b"".join(keys_of(blocks))
        lease = client.acquire(ns, keys_of(blocks))
        calls = [
            call_frame("Match", pb.MatchRequest(namespace_id=ns.id, keys=keys)),
            call_frame("BulkRead", pb.BulkReadRequest(lease_id=lease.id, keys=keys)),
            call_frame(
                "BulkPut",
                pb.BulkPutRequest(
                    namespace_id=ns.id,
                    keys=keys[:32],
                    parents=ns.id,
                    section_bytes=ns.layout.section_bytes,
                ),
                b"".join(blocks[0].sections),
            ),
        ]
        fds, leases = open_fds(daemon), client.stat().leases
        for _ in range(4000 if long else 150):
            opened = bool(rng.integers(4))
            try:
                with Peer(daemon, opened=opened) as peer:
                    frame = calls[rng.integers(3)] if opened else open_frame(peer.token)
                    if rng.integers(2):
                        peer.send(frame)
                    peer.send(mangled(rng, frame))
                    if rng.integers(2):
                        peer.sock.settimeout(0.02)
                        peer.sock.recv(1 << 16)
            except (OSError, EOFError):
                pass
        lease.release()
        until(lambda: open_fds(daemon) <= fds)
        stat = client.stat()
        assert (stat.leases, stat.reservations) == (leases - 1, 0)
        report = client.verify()
        assert report.clean
        read_lease = client.acquire(ns, keys_of(blocks))
        read = client.read(read_lease, read_lease.keys)
        assert [list(map(bytes, d.sections)) for d in read] == [b.sections for b in blocks]
        read_lease.release()
    still_serves(daemon)
