"""The messages of the window pool from peers that are ordinary, wrong, slow, hostile or gone."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from daemons import STORE_SETTINGS, Daemon, fresh_namespace, until
from port_peer import Peer, call_frame, mangled, open_fds, open_frame

from kvstore import NamespaceHandle, PutOutcome, connect
from kvstore.server.port.frames import Kind
from kvstore.server.status import ERROR_METADATA_KEY
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc as pb_grpc

SETTINGS = {
    **STORE_SETTINGS,
    "windows.budget_bytes": "4MiB",
    "windows.payload_bytes_max": "3MiB",
    "windows.fill_s_max": 2.0,
    "server.deadline_s_default": 2.0,
    "server.message_bytes_max": "64KiB",
    "server.data_port.frame_bytes_max": "1MiB",
    "server.data_port.stall_s_max": 0.6,
}
DEADLINE_S = 20.0
STORED = pb.PUT_OUTCOME_STORED
KEPT = np.random.default_rng(5).bytes(50_000)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("wire")
    with Daemon(f"unix://{folder}/kv.sock", None, SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[Any]:
    with grpc.insecure_channel(daemon.url) as channel:
        yield pb_grpc.KVStoreStub(channel)


@pytest.fixture
def ns(daemon: Daemon) -> Iterator[NamespaceHandle]:
    """A namespace with one record, which is there afterwards, and nothing else is."""
    with connect(f"{daemon.url}?data=grpc") as client:
        ns = client.open_namespace(fresh_namespace())
        client.put_handover(ns, "kept", KEPT)
        yield ns
        until(lambda: client.stat().windows.used_bytes == 13 * 4096)
        assert client.wait_handover(ns, "kept", 0.0) == KEPT
        client.drop_handover(ns, "kept")
        windows = client.stat().windows
        assert (windows.objects, windows.used_bytes) == (0, 0)


def put_messages(ns: NamespaceHandle, payload: bytes, step: int = 30_000, **head: Any) -> list[Any]:
    given = {
        "request_id": "r",
        "payload_bytes": len(payload),
        "checksum": xxhash.xxh3_128_digest(payload),
    } | head
    parts = [payload[at : at + step] for at in range(0, len(payload), step)] or [b""]
    first = pb.PutWindowRequest(namespace_id=ns.id, chunk=parts[0], **given)
    return [first, *(pb.PutWindowRequest(chunk=part) for part in parts[1:])]


def refusal(call: Callable[[], Any]) -> tuple[str, str | None]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.details(), dict(error.trailing_metadata()).get(ERROR_METADATA_KEY)


def test_an_ordinary_protobuf_client_puts_and_gets(stub: Any, ns: NamespaceHandle) -> None:
    payload = np.random.default_rng(0).bytes(200_000)
    place = pb.PutWindowRequest.Place(parent=ns.id, blocks=0, tail_tokens=3)
    head = {"request_id": None, "key": b"k" * 32, "place": place}
    messages = put_messages(ns, payload, **head)
    assert stub.PutWindow(iter(messages), timeout=DEADLINE_S).outcome == STORED
    match = stub.Match(pb.MatchRequest(namespace_id=ns.id), timeout=DEADLINE_S)
    assert [(r.key, r.payload_bytes) for r in match.snapshots] == [(b"k" * 32, 200_000)]
    request = pb.GetWindowRequest(namespace_id=ns.id, key=b"k" * 32)
    replies = list(stub.GetWindow(request, timeout=DEADLINE_S))
    assert (replies[0].found, replies[0].payload_bytes) == (True, 200_000)
    assert replies[0].checksum == xxhash.xxh3_128_digest(payload)
    assert b"".join(reply.chunk for reply in replies) == payload
    drop = pb.DropWindowRequest(namespace_id=ns.id, key=b"k" * 32)
    assert [stub.DropWindow(drop, timeout=DEADLINE_S).found for _ in range(2)] == [True, False]
    assert [r.found for r in stub.GetWindow(request, timeout=DEADLINE_S)] == [False]


PAYLOAD = bytes(range(250)) * 400


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"request_id": None}, "InvalidRequest", "neither a key nor a request id"),
        ({"request_id": ""}, "InvalidRequest", "1 to 256 bytes"),
        ({"request_id": "x" * 257}, "InvalidRequest", "not 257"),
        ({"request_id": None, "key": b"short"}, "InvalidRequest", "32 bytes, not 5"),
        ({"request_id": None, "key": b"k" * 32}, "InvalidRequest", "a key and a place"),
        ({"place": pb.PutWindowRequest.Place()}, "InvalidRequest", "a key and a place"),
        ({"checksum": b"x"}, "InvalidRequest", "16 bytes, not 1"),
        ({"ttl_s": 0.0}, "InvalidRequest", "above 0"),
        ({"payload_bytes": 99_999}, "InvalidRequest", "more than the 99999 B"),
        ({"payload_bytes": 100_001}, "InvalidRequest", "100000 B of payload came, 100001 B"),
        ({"payload_bytes": 1 << 62}, "MessageTooLarge", "windows.payload_bytes_max"),
        ({"namespace_id": b"n" * 32}, "UnknownNamespace", "open_namespace"),
    ],
    ids=str,
)
def test_a_put_that_can_not_be_right_is_refused(
    stub: Any, ns: NamespaceHandle, change: dict[str, Any], error: str, says: str
) -> None:
    change = dict(change)
    owner = NamespaceHandle(change.pop("namespace_id", ns.id), ns.namespace)
    messages = put_messages(owner, PAYLOAD, **change)
    details, name = refusal(lambda: stub.PutWindow(iter(messages), timeout=DEADLINE_S))
    assert name == error, details
    assert says in details


def test_streams_that_are_none_are_refused(daemon: Daemon, ns: NamespaceHandle) -> None:
    with grpc.insecure_channel(daemon.url) as channel:
        put = channel.stream_unary("/kvstore.v1.KVStore/PutWindow")
        first = put_messages(ns, PAYLOAD)[0].SerializeToString()
        for messages, error in (
            ([], "InvalidRequest"),
            ([b"\x0a\xff"], "InvalidRequest"),
            ([first, b"\x0a\xff"], "InvalidRequest"),
            ([first, b"\x42" + b"\xa0\x9c\x01" + bytes(20_000)], "InvalidRequest"),
            ([first, pb.PutWindowRequest(chunk=bytes(65_530)).SerializeToString()], None),
            ([first, bytes(70_000)], "MessageTooLarge"),
            ([first, bytes(1 << 20)], None),
        ):
            _, name = refusal(lambda m=messages: put(iter(m), timeout=DEADLINE_S))
            assert error is None or name == error


def test_wrong_bytes_are_corrupt_on_both_ways(
    daemon: Daemon, stub: Any, ns: NamespaceHandle
) -> None:
    messages = put_messages(ns, PAYLOAD, checksum=bytes(16))
    outcome = stub.PutWindow(iter(messages), timeout=DEADLINE_S).outcome
    assert outcome == pb.PUT_OUTCOME_CORRUPT
    with Peer(daemon) as peer:
        (message,) = put_messages(ns, PAYLOAD, step=1 << 20, checksum=bytes(16))
        message.chunk = b""
        head, reply, _ = peer.call("PutWindow", message, PAYLOAD)
        assert head.kind is Kind.REPLY
        assert pb.PutWindowReply.FromString(reply).outcome == pb.PUT_OUTCOME_CORRUPT


def test_errors_on_the_data_port_leave_the_connection_open(
    daemon: Daemon, ns: NamespaceHandle
) -> None:
    (good,) = put_messages(ns, PAYLOAD, step=1 << 20)
    good.chunk = b""
    nameless = pb.GetWindowRequest(namespace_id=ns.id)
    with Peer(daemon) as peer:
        for name, message, body, error in (
            ("PutWindow", good, b"", "InvalidRequest"),
            ("PutWindow", good, PAYLOAD[:-1], "InvalidRequest"),
            ("PutWindow", b"\xff\xff", PAYLOAD, "InvalidRequest"),
            ("GetWindow", nameless, b"", "InvalidRequest"),
            ("GetWindow", pb.GetWindowRequest(namespace_id=ns.id, key=b"x"), b"", "InvalidRequest"),
            ("GetWindow", pb.GetWindowRequest(request_id="kept"), b"", "UnknownNamespace"),
            (
                "GetWindow",
                pb.GetWindowRequest(namespace_id=ns.id, request_id="kept"),
                b"a body it has not",
                "InvalidRequest",
            ),
            ("DropWindow", pb.DropWindowRequest(namespace_id=ns.id), b"", "InvalidRequest"),
        ):
            head, reply, _ = peer.call(name, message, body)
            assert head.kind is Kind.ERROR, name
            assert pb.PortError.FromString(reply).name == error, name
        head, reply, body = peer.call(
            "GetWindow", pb.GetWindowRequest(namespace_id=ns.id, request_id="kept")
        )
        assert (head.kind, body) == (Kind.REPLY, KEPT)


def test_more_than_a_frame_is_told_and_comes_over_grpc(daemon: Daemon, ns: NamespaceHandle) -> None:
    payload = np.random.default_rng(1).bytes((1 << 20) + 1)
    with connect(f"{daemon.url}?data=port") as client:
        client.open_namespace(ns.namespace)
        assert client.put_handover(ns, "large", payload) is PutOutcome.STORED
        with Peer(daemon) as peer:
            head, reply, _ = peer.call(
                "GetWindow", pb.GetWindowRequest(namespace_id=ns.id, request_id="large")
            )
            assert head.kind is Kind.ERROR
            assert pb.PortError.FromString(reply).name == "MessageTooLarge"
        assert client.wait_handover(ns, "large", 0.0) == payload
        client.drop_handover(ns, "large")


def test_a_writer_that_stalls_or_leaves_gives_its_room_back(
    daemon: Daemon, stub: Any, ns: NamespaceHandle
) -> None:
    first = put_messages(ns, bytes(2 << 20))[0]
    hold = threading.Event()

    def stalling() -> Iterator[Any]:
        yield first
        hold.wait(DEADLINE_S)

    with connect(f"{daemon.url}?data=grpc") as client:
        before = client.stat().windows.used_bytes
        stalled = stub.PutWindow.future(stalling(), timeout=DEADLINE_S)
        until(lambda: client.stat().windows.used_bytes == before + (2 << 20))
        details, name = refusal(stalled.result)
        assert (name, "windows.fill_s_max" in details) == ("Unavailable", True)
        until(lambda: client.stat().windows.used_bytes == before)
        leaving = stub.PutWindow.future(stalling(), timeout=DEADLINE_S)
        until(lambda: client.stat().windows.used_bytes == before + (2 << 20))
        leaving.cancel()
        until(lambda: client.stat().windows.used_bytes == before)
        late = stub.PutWindow.future(stalling(), timeout=0.2)
        # whichever side's clock was first
        assert late.exception().code() in (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.UNAVAILABLE,
        )
        until(lambda: client.stat().windows.used_bytes == before)
    hold.set()


def test_a_peer_that_stops_in_a_body_or_takes_none_leaves_nothing(
    daemon: Daemon, ns: NamespaceHandle
) -> None:
    (message,) = put_messages(ns, PAYLOAD, step=1 << 20)
    message.chunk = b""
    frame = call_frame("PutWindow", message, PAYLOAD)
    get = call_frame("GetWindow", pb.GetWindowRequest(namespace_id=ns.id, request_id="large"))
    with connect(f"{daemon.url}?data=grpc") as client:
        client.put_handover(ns, "large", bytes(1 << 20))
        with Peer(daemon) as stalled, Peer(daemon) as gone, Peer(daemon) as full:
            stalled.send(frame[:-1])
            gone.send(frame[:-1])
            gone.close()
            full.send(get * 16)
            stalled.ended()
            # nothing of it is taken: the record stays in use until the peer is given up
            until(lambda: client.stat().counters["port_stalled"] >= 2)
        client.drop_handover(ns, "large")


def test_a_reader_that_takes_nothing_lets_go_at_its_deadline(
    daemon: Daemon, ns: NamespaceHandle
) -> None:
    with connect(f"{daemon.url}?data=grpc") as client:
        client.put_handover(ns, "large", bytes(3 << 20))
        narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        with grpc.insecure_channel(daemon.url, narrow) as channel:
            request = pb.GetWindowRequest(namespace_id=ns.id, request_id="large")
            # the daemon's own deadline, since this peer sets none
            replies = pb_grpc.KVStoreStub(channel).GetWindow(request)
            next(replies)
            client.drop_handover(ns, "large")
            until(lambda: client.stat().windows.used_bytes == 13 * 4096)
            replies.cancel()


def test_fuzzed_peers_leave_no_trace(
    daemon: Daemon, ns: NamespaceHandle, seed: int, long: bool
) -> None:
    rng = np.random.default_rng(seed)
    (put,) = put_messages(ns, PAYLOAD, step=1 << 20, request_id="fuzz", ttl_s=1.0)
    put.chunk = b""
    calls = [
        call_frame("PutWindow", put, PAYLOAD),
        call_frame("GetWindow", pb.GetWindowRequest(namespace_id=ns.id, request_id="kept")),
        call_frame("DropWindow", pb.DropWindowRequest(namespace_id=ns.id, request_id="fuzz")),
        call_frame("Match", pb.MatchRequest(namespace_id=ns.id)),
    ]
    fds = open_fds(daemon)
    for _ in range(3000 if long else 80):
        opened = bool(rng.integers(8))
        try:
            with Peer(daemon, opened=opened) as peer:
                frame = calls[rng.integers(4)] if opened else open_frame(peer.token)
                if rng.integers(2):
                    peer.send(frame)
                peer.send(mangled(rng, frame))
                if rng.integers(2):
                    peer.sock.settimeout(0.02)
                    peer.sock.recv(1 << 16)
        except (OSError, EOFError):
            pass
    until(lambda: open_fds(daemon) <= fds)


def test_fuzzed_streams_leave_no_trace(
    daemon: Daemon, ns: NamespaceHandle, seed: int, long: bool
) -> None:
    rng = np.random.default_rng(seed)
    whole = [
        message.SerializeToString()
        for message in put_messages(ns, PAYLOAD, request_id="fuzz", ttl_s=1.0)
    ]
    outcomes = set()
    with grpc.insecure_channel(daemon.url) as channel:
        put = channel.stream_unary("/kvstore.v1.KVStore/PutWindow")
        get = channel.unary_stream("/kvstore.v1.KVStore/GetWindow")
        request = pb.GetWindowRequest(namespace_id=ns.id, request_id="kept").SerializeToString()
        for _ in range(3000 if long else 80):
            messages = [
                mangled(rng, m) if rng.integers(4) == 0 else m
                for m in whole
                if rng.integers(8) or not messages_needed(rng)
            ]
            try:
                outcomes.add(put(iter(messages), timeout=DEADLINE_S))
            except grpc.RpcError as e:
                outcomes.add(e.code())
            try:
                for data in get(mangled(rng, request), timeout=DEADLINE_S):
                    pb.GetWindowReply.FromString(data)
            except grpc.RpcError as e:
                outcomes.add(e.code())
    assert grpc.StatusCode.INVALID_ARGUMENT in outcomes
    assert grpc.StatusCode.UNKNOWN not in outcomes
    assert grpc.StatusCode.INTERNAL not in outcomes


def messages_needed(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))
