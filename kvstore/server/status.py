"""The one table error → gRPC status, and its inverse.

The error's name travels in the trailing metadata, so the inverse is exact between our own two
sides; the status code serves every other client and errors that gRPC itself raises.
"""

import grpc

from kvstore import errors
from kvstore.errors import KVStoreError, MessageTooLarge, Overloaded, Unavailable

ERROR_METADATA_KEY = "kvstore-error"
DETAILS_CHARS_MAX = 2048

_Code = grpc.StatusCode

STATUS_OF_ERROR: dict[type[KVStoreError], grpc.StatusCode] = {
    errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    errors.UnknownNamespace: _Code.NOT_FOUND,
    errors.WrongSectionSize: _Code.INVALID_ARGUMENT,
    errors.BlockOutOfOrder: _Code.INVALID_ARGUMENT,
    errors.MessageTooLarge: _Code.RESOURCE_EXHAUSTED,
    errors.UnsupportedURL: _Code.INVALID_ARGUMENT,
    errors.LeaseExpired: _Code.FAILED_PRECONDITION,
    errors.ReservationExpired: _Code.FAILED_PRECONDITION,
    errors.Overloaded: _Code.RESOURCE_EXHAUSTED,
    errors.Unavailable: _Code.UNAVAILABLE,
    errors.WrongProcess: _Code.FAILED_PRECONDITION,
    errors.StoreLocked: _Code.FAILED_PRECONDITION,
    errors.StoreFormatError: _Code.DATA_LOSS,
    errors.DiskError: _Code.INTERNAL,
    errors.ConfigError: _Code.INVALID_ARGUMENT,
    errors.KVStoreError: _Code.UNKNOWN,
}
"""Every error of the tree (`kvstore.errors`); a test holds it complete."""

_ERROR_OF_NAME = {cls.__name__: cls for cls in STATUS_OF_ERROR}
_ERROR_OF_STATUS: dict[grpc.StatusCode, type[KVStoreError]] = {
    _Code.UNAVAILABLE: Unavailable,
    _Code.DEADLINE_EXCEEDED: Unavailable,
    _Code.CANCELLED: Unavailable,
    _Code.RESOURCE_EXHAUSTED: Overloaded,
    _Code.INVALID_ARGUMENT: errors.InvalidRequest,
    _Code.NOT_FOUND: errors.InvalidRequest,
    _Code.UNIMPLEMENTED: errors.InvalidRequest,
}
_GRPC_TOO_LARGE = "larger than max"
"""Part of the text with which gRPC itself refuses a message over its limit."""


def to_status(error: KVStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, details and trailing metadata that carry `error`."""
    cls = _known_class(error)
    metadata = ((ERROR_METADATA_KEY, cls.__name__),)
    return STATUS_OF_ERROR[cls], str(error)[:DETAILS_CHARS_MAX], metadata


def _known_class(error: KVStoreError) -> type[KVStoreError]:
    for cls in type(error).__mro__:
        if cls in STATUS_OF_ERROR:
            known: type[KVStoreError] = cls
            return known
    raise TypeError(f"{type(error).__name__} is outside the tree of kvstore.errors")


def to_name(error: KVStoreError) -> tuple[str, str]:
    """Name and details that carry `error` where there is no gRPC status."""
    return _known_class(error).__name__, str(error)[:DETAILS_CHARS_MAX]


def from_name(name: str, details: str, peer: str) -> KVStoreError:
    """The inverse of `to_name`."""
    cls = _ERROR_OF_NAME.get(name)
    return cls(details) if cls else KVStoreError(f"{peer}: {name}: {details}")


def from_status(code: grpc.StatusCode, details: str, name: str | None, peer: str) -> KVStoreError:
    """The error that a failed call means.

    `name`: value of the trailing metadata, None where the status is gRPC's own. `peer`: the URL,
    for errors whose text gRPC wrote.
    """
    if name in _ERROR_OF_NAME:
        return _ERROR_OF_NAME[name](details)
    if code is _Code.DEADLINE_EXCEEDED:
        return Unavailable(f"{peer}: no answer within the deadline")
    if code is _Code.RESOURCE_EXHAUSTED and _GRPC_TOO_LARGE in details:
        return MessageTooLarge(f"{peer}: {details}")
    cls = _ERROR_OF_STATUS.get(code, KVStoreError)
    return cls(f"{peer}: {code.name}: {details}")
