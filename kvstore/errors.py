"""Every error that the store raises to a caller, in one tree.

::

    KVStoreError
    ├── InvalidRequest            the caller's arguments can't be right; nothing was changed
    │   ├── UnknownNamespace      no such namespace is open here
    │   ├── WrongSectionSize      a section's bytes don't fit the namespace's layout
    │   ├── BlockOutOfOrder       a batch names a child before its parent
    │   ├── MessageTooLarge       one message would pass the limit
    │   └── UnsupportedURL        `connect` does not know the scheme
    ├── LeaseExpired              the lease has lapsed or was released
    ├── ReservationExpired        the reservation has lapsed, was committed or was aborted
    ├── Overloaded                a bounded queue is full; try again later
    ├── Unavailable               the daemon can't be reached, is draining, or the deadline passed
    ├── WrongProcess              the client was opened before a fork, by the parent
    ├── StoreLocked               another process holds the store's directory
    ├── StoreFormatError          a file of the store has an unknown format or version
    ├── DiskError                 the medium failed or is full; the message has path and errno
    └── ConfigError               a setting is unknown or out of range

A miss, a pending block or a refused block is not an error: those are outcomes (`kvstore.block`).
"""


class KVStoreError(Exception):
    """Root of the tree. The message says what was wrong, with the value, and what to do."""


class InvalidRequest(KVStoreError):
    """The arguments can't be right; nothing was changed."""


class UnknownNamespace(InvalidRequest):
    """No such namespace is open here; call `open_namespace` first."""


class WrongSectionSize(InvalidRequest):
    """A section's bytes don't fit the namespace's layout."""


class BlockOutOfOrder(InvalidRequest):
    """A batch names a child before its parent, or a block's parent is not the one before it."""


class MessageTooLarge(InvalidRequest):
    """One message would pass the limit that both sides know."""


class UnsupportedURL(InvalidRequest):
    """`connect` knows `file://`, `unix://` and `dns://` only."""


class LeaseExpired(KVStoreError):
    """The lease has lapsed or was released; acquire again."""


class ReservationExpired(KVStoreError):
    """The reservation has lapsed, was committed or was aborted; reserve again."""


class Overloaded(KVStoreError):
    """A bounded queue is full; try again later."""


class Unavailable(KVStoreError):
    """The daemon can't be reached, is draining, or the deadline passed."""


class WrongProcess(KVStoreError):
    """The client was opened before a fork, by the parent; open one of its own in this process."""


class StoreLocked(KVStoreError):
    """Another process holds the store's directory."""


class StoreFormatError(KVStoreError):
    """A file of the store has an unknown format or version."""


class DiskError(KVStoreError):
    """The medium failed or is full; the message has the path and the errno."""


class ConfigError(KVStoreError):
    """A setting is unknown or out of range."""
