"""What the endpoint takes and how long it waits."""

from dataclasses import dataclass

from model_adapter.errors import InputError


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Limits of one server. Raises `InputError` for one below 1.

    `requests_max`: requests in the house, the running one included; more get 503.
    `connections_max`: open sockets, idle ones included. `body_bytes_max`, `body_s_max`: of a
    request's body; with `requests_max` they bound the memory that bodies take. `images_max`: per
    request. `stop_strings_max`, `stop_chars_max`: how many, and of each. `answer_tokens_default`:
    of a chat answer that sets no limit. `send_s_max`: a client that takes nothing for so long is
    given up. `keep_alive_s`: a stream without news says so after that long. `shutdown_s_max`: that
    running requests have when the server is asked to stop.
    """

    requests_max: int = 16
    connections_max: int = 128
    body_bytes_max: int = 64 << 20
    body_s_max: float = 60.0
    images_max: int = 64
    stop_strings_max: int = 4
    stop_chars_max: int = 1024
    answer_tokens_default: int = 4096
    send_s_max: float = 60.0
    keep_alive_s: float = 15.0
    shutdown_s_max: int = 10

    def __post_init__(self) -> None:
        for name in ("requests_max", "connections_max", "body_bytes_max", "answer_tokens_default"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
