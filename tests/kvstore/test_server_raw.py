"""The daemon as any gRPC client meets it: generated stubs, health, reflection, refusals."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from daemons import SMALL, STORE_SETTINGS, Daemon, chain, free_port, fresh_namespace
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kvstore import NamespaceHandle, Outcome
from kvstore.server.status import ERROR_METADATA_KEY
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc as pb_grpc

MESSAGE_BYTES_MAX = 64 << 10
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("raw")
    settings = {**STORE_SETTINGS, "server.message_bytes_max": MESSAGE_BYTES_MAX}
    daemon = Daemon(f"unix://{folder}/kv.sock", None, settings)
    yield daemon.start()
    daemon.kill()


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.url) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return pb_grpc.KVStoreStub(channel)


def open_namespace(stub: Any) -> NamespaceHandle:
    descriptor = fresh_namespace()
    request = pb.OpenNamespaceRequest(canonical_json=descriptor.canonical_json())
    return NamespaceHandle(stub.OpenNamespace(request, timeout=DEADLINE_S).namespace_id, descriptor)


def refusal(call: Any, request: Any) -> tuple[grpc.StatusCode, str, str | None]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=DEADLINE_S)
    error: Any = caught.value
    name = dict(error.trailing_metadata()).get(ERROR_METADATA_KEY)
    return error.code(), error.details(), name


def test_an_ordinary_protobuf_client_puts_and_reads(stub: Any) -> None:
    ns = open_namespace(stub)
    blocks = chain(ns, 3)
    put = pb.PutRequest(
        namespace_id=ns.id,
        blocks=[
            pb.BlockPut(
                key=b.key,
                parent=b.parent,
                sections=b.sections,
                checksums=b"".join(xxhash.xxh3_128_digest(s) for s in b.sections),
            )
            for b in blocks
        ],
    )
    assert stub.Put(put, timeout=DEADLINE_S).outcomes == b"\0\0\0"
    keys = b"".join(b.key for b in blocks)
    lease = stub.Acquire(pb.AcquireRequest(namespace_id=ns.id, keys=keys), timeout=DEADLINE_S)
    assert (lease.blocks, lease.match.outcomes) == (3, bytes([Outcome.HIT.value] * 3))
    request = pb.ReadRequest(lease_id=lease.lease_id, keys=keys, sections=[1])
    reply = stub.Read(request, timeout=DEADLINE_S)
    assert [list(b.sections) for b in reply.blocks] == [[b.sections[1]] for b in blocks]
    assert [b.checksums for b in reply.blocks] == [
        xxhash.xxh3_128_digest(b.sections[1]) for b in blocks
    ]


def test_hello_says_the_limits(stub: Any) -> None:
    hello = stub.Hello(pb.HelloRequest(), timeout=DEADLINE_S)
    assert hello.message_bytes_max == MESSAGE_BYTES_MAX
    assert len(hello.instance_id) == 16
    assert hello.deadline_s_max > 0


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "kvstore.v1.KVStore"):
        request = health_pb2.HealthCheckRequest(service=service)
        status = health.Check(request, timeout=DEADLINE_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"kvstore.v1.KVStore", "grpc.health.v1.Health"} <= services


def test_the_socket_is_its_owners(daemon: Daemon) -> None:
    mode = Path(daemon.url.removeprefix("unix://")).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_packed_keys_of_a_wrong_length_are_refused(stub: Any) -> None:
    ns = open_namespace(stub)
    requests = {
        stub.Match: pb.MatchRequest(namespace_id=ns.id, keys=b"x" * 33),
        stub.WaitFor: pb.WaitForRequest(namespace_id=ns.id, keys=b"x" * 31, deadline_s=1),
        stub.Acquire: pb.AcquireRequest(namespace_id=ns.id, keys=b"x"),
        stub.Read: pb.ReadRequest(lease_id=1, keys=b"x" * 65),
        stub.Reserve: pb.ReserveRequest(namespace_id=ns.id, keys=b"x" * 32, parents=b"x" * 8),
        stub.Evict: pb.EvictRequest(namespace_id=ns.id, keys=b"x" * 3),
    }
    for call, request in requests.items():
        code, details, name = refusal(call, request)
        assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
        assert "32-byte keys" in details
    code, details, _ = refusal(
        stub.Reserve, pb.ReserveRequest(namespace_id=ns.id, keys=b"x" * 64, parents=b"x" * 32)
    )
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "2 keys with 1 parents")


def test_nothing_asked_for_is_refused(stub: Any) -> None:
    ns = open_namespace(stub)
    for call, request in (
        (stub.WaitFor, pb.WaitForRequest(namespace_id=ns.id)),
        (stub.Acquire, pb.AcquireRequest(namespace_id=ns.id)),
        (stub.Put, pb.PutRequest(namespace_id=ns.id)),
    ):
        assert refusal(call, request)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("excess", "says"),
    [(0, "passes server.message_bytes_max = 65536 B"), (1 << 20, "Received message larger than")],
)
def test_an_oversized_message_is_refused(stub: Any, excess: int, says: str) -> None:
    ns = open_namespace(stub)
    keys = b"x" * (MESSAGE_BYTES_MAX + excess)
    code, details, _ = refusal(stub.Match, pb.MatchRequest(namespace_id=ns.id, keys=keys))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert says in details


def test_an_answer_that_would_be_oversized_is_refused(stub: Any) -> None:
    ns = open_namespace(stub)
    blocks = chain(ns, 1)
    checksums = b"".join(xxhash.xxh3_128_digest(s) for s in blocks[0].sections)
    block = pb.BlockPut(
        key=blocks[0].key, parent=ns.id, sections=blocks[0].sections, checksums=checksums
    )
    stub.Put(pb.PutRequest(namespace_id=ns.id, blocks=[block]), timeout=DEADLINE_S)
    keys = blocks[0].key
    lease = stub.Acquire(pb.AcquireRequest(namespace_id=ns.id, keys=keys), timeout=DEADLINE_S)
    often = MESSAGE_BYTES_MAX // SMALL.block_bytes + 1
    request = pb.ReadRequest(lease_id=lease.lease_id, keys=keys * often)
    code, details, name = refusal(stub.Read, request)
    assert (code, name) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MessageTooLarge")
    assert "fewer blocks" in details


def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel) -> None:
    for method in ("Match", "Put", "Write", "Read", "OpenNamespace", "Ls"):
        code, _, name = refusal(channel.unary_unary(f"/kvstore.v1.KVStore/{method}"), b"\x0a\xff")
        assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")


def test_unknown_numbers_and_descriptors_are_refused(stub: Any) -> None:
    ns = open_namespace(stub)
    for call, request in (
        (stub.Commit, pb.CommitRequest(reservation_id=1, durability=9)),
        (stub.Evict, pb.EvictRequest(tier=64)),
        (stub.OpenNamespace, pb.OpenNamespaceRequest(canonical_json=b"{}")),
        (stub.OpenNamespace, pb.OpenNamespaceRequest(canonical_json=b"\xff")),
        (stub.ReportCorrupt, pb.ReportCorruptRequest(namespace_id=ns.id, key=b"x")),
    ):
        code, details, _ = refusal(call, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, details


def test_tcp_serves_the_same(tmp_path: Path) -> None:
    daemon = Daemon(f"tcp://127.0.0.1:{free_port()}", None, STORE_SETTINGS).start()
    try:
        with grpc.insecure_channel(daemon.url) as channel:
            assert pb_grpc.KVStoreStub(channel).Stat(pb.StatRequest(), timeout=DEADLINE_S).tiers
    finally:
        daemon.kill()
