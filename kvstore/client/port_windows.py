"""Window snapshots and hand-over records over a stream of the data port."""

import time

from kvstore.block import PutOutcome
from kvstore.client.port_stream import PortStream, StreamLost
from kvstore.client.transport import ArrivedWindow
from kvstore.server import messages, wire
from kvstore.store.types import WindowPut
from kvstore.v1 import kvstore_pb2 as pb


def put_window(
    stream: PortStream, namespace_id: bytes, put: WindowPut, timeout_s: float
) -> PutOutcome:
    """The payload goes as the body."""
    deadline = time.monotonic() + timeout_s
    request = messages.put_window_to_pb(namespace_id, put.head)
    stream.send("PutWindow", request.SerializeToString(), [wire.byte_view(put.payload)], deadline)
    _, message = stream.receive(deadline)
    return PutOutcome(pb.PutWindowReply.FromString(message).outcome)


def get_window(
    stream: PortStream, namespace_id: bytes, name: bytes | str, timeout_s: float
) -> ArrivedWindow | None:
    """The payload comes as the body."""
    deadline = time.monotonic() + timeout_s
    request = messages.named_to_pb(pb.GetWindowRequest, namespace_id, name)
    stream.send("GetWindow", request.SerializeToString(), [], deadline)
    head, message = stream.receive(deadline)
    reply = pb.GetWindowReply.FromString(message)
    if head.body_bytes != reply.payload_bytes:
        raise StreamLost("a body of another size", answered=True)
    payload = bytearray(head.body_bytes)
    stream.receive_body(memoryview(payload), deadline)
    return ArrivedWindow(bytes(payload), reply.checksum) if reply.found else None
