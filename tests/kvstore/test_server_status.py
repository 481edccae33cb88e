"""The table error → gRPC status is whole, and its inverse exact."""

import grpc
import pytest

from kvstore import errors
from kvstore.errors import KVStoreError, MessageTooLarge, Overloaded, Unavailable
from kvstore.server.status import (
    DETAILS_CHARS_MAX,
    ERROR_METADATA_KEY,
    STATUS_OF_ERROR,
    from_status,
    to_status,
)


def tree(cls: type[KVStoreError]) -> set[type[KVStoreError]]:
    return {cls}.union(
        *(tree(sub) for sub in cls.__subclasses__() if sub.__module__ == errors.__name__)
    )


def test_every_error_of_the_tree_has_a_status() -> None:
    assert set(STATUS_OF_ERROR) == tree(KVStoreError)


@pytest.mark.parametrize("cls", sorted(tree(KVStoreError), key=lambda c: c.__name__))
def test_an_error_crosses_the_wire_as_itself(cls: type[KVStoreError]) -> None:
    code, details, metadata = to_status(cls("what was wrong: 7"))
    back = from_status(code, details, dict(metadata)[ERROR_METADATA_KEY], "unix:///s")
    assert type(back) is cls
    assert str(back) == "what was wrong: 7"


def test_an_error_below_the_tree_crosses_as_its_parent() -> None:
    class Special(errors.DiskError):
        pass

    assert to_status(Special("x"))[2] == ((ERROR_METADATA_KEY, "DiskError"),)


def test_long_texts_are_cut() -> None:
    assert len(to_status(KVStoreError("x" * 10_000))[1]) == DETAILS_CHARS_MAX


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Unavailable),
        (grpc.StatusCode.CANCELLED, "Channel closed!", Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", Overloaded),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (9 vs. 5)",
            MessageTooLarge,
        ),
        (grpc.StatusCode.INTERNAL, "the daemon failed", KVStoreError),
    ],
)
def test_what_grpc_itself_says_has_a_meaning(
    code: grpc.StatusCode, details: str, expected: type[KVStoreError]
) -> None:
    error = from_status(code, details, None, "unix:///s")
    assert type(error) is expected
    assert "unix:///s" in str(error)
