"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import re
from typing import Any

from model_adapter.errors import AdapterError, InputError

INVALID = "invalid_request_error"
SERVER = "server_error"
_PATH = re.compile(r"(?:messages|tools|response_format|reasoning_effort)\b[\w.\[\]]*")


class ApiError(Exception):
    """An answer with an HTTP status of 4xx or 5xx.

    `param`: the parameter that is wrong, if it is one. `code`: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can't be right."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """Any error as the client is to see it; what is not the client's doing tells no detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        path = _PATH.match(str(error))
        return invalid(str(error), param=path[0] if path else None)
    message = str(error) if isinstance(error, AdapterError) else "the server failed; see its log"
    return ApiError(500, message, kind=SERVER)
