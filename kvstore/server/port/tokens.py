"""Tokens that open connections to the data port: expiry, nonce, and a seal over both.

Whoever may call Hello gets one. Nothing is kept per token; the key dies with the daemon, and so do
all that it sealed.
"""

import hmac
import secrets
import struct
from collections.abc import Callable
from enum import Enum

_BODY = struct.Struct("<d16s")
_SEAL_BYTES = 32
TOKEN_BYTES = _BODY.size + _SEAL_BYTES


class Verdict(Enum):
    """What a token is worth."""

    GOOD = "good"
    STALE = "stale"
    WRONG = "wrong"


class Tokens:
    """Makes and checks tokens. `clock`: monotonic seconds."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._key = secrets.token_bytes(32)

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")

    def make(self) -> bytes:
        """A token that holds from now on for `ttl_s`."""
        body = _BODY.pack(self._clock() + self._ttl_s, secrets.token_bytes(16))
        return body + self._seal(body)

    def check(self, token: bytes) -> Verdict:
        """Whether a connection may be opened with it now."""
        body, seal = token[: _BODY.size], token[_BODY.size :]
        if len(token) != TOKEN_BYTES or not hmac.compare_digest(seal, self._seal(body)):
            return Verdict.WRONG
        expires_s, _ = _BODY.unpack(body)
        return Verdict.GOOD if self._clock() < expires_s else Verdict.STALE
