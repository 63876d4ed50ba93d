"""Every error the router raises on purpose, and the one map from an error to an HTTP answer.

HomingError
├── ConfigError            a setting that refuses to start; names the key
├── WireError              bytes that do not follow their format
├── CaptureError           a recorded event stream cannot be read; names file and line
├── WorkerError            a worker cannot be reached, or not understood; a plain sentence says why
└── RequestError           answered to the client; has status, type, code, param
    ├── BadRequest             400  invalid_request_error
    ├── Unauthorized           401  authentication_error, with WWW-Authenticate
    ├── Forbidden              403  permission_error: the key is known, but not for this
    ├── NotFound               404  unknown path, model_not_found
    ├── MethodNotAllowed       405
    ├── RequestTimeout         408  the client was too slow in sending
    ├── Conflict               409  the admin plane: such a thing exists already, or is in use
    ├── PayloadTooLarge        413
    ├── HeadersTooLarge        431
    ├── TooManyRequests        429  with Retry-After
    ├── WorkerRefused          as the worker has it: told again where its answer cannot be passed on as it is
    ├── UpstreamFailed         502  the worker broke before its first byte, on every attempt
    ├── NoWorker               503  nothing can serve the model now; with Retry-After
    └── UpstreamTimeout        504
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class HomingError(Exception):
    """Root of the tree."""


class ConfigError(HomingError):
    """A setting is unknown or has a bad value. The message names the key and the remedy."""


class WireError(HomingError):
    """Bytes from a peer do not follow their format."""


class CaptureError(HomingError):
    """A recorded event stream, or the requests beside it, cannot be read. The message names the file and the line."""


class WorkerError(HomingError):
    """A worker cannot be reached, or what it says of itself cannot be used. The message is a plain sentence."""


class RequestError(HomingError):
    """An error the client sees, in the OpenAI shape ``{"error": {message, type, param, code}}`` or Anthropic's."""

    status = 500
    type = "server_error"
    code = "internal_error"
    retry_after_seconds: int | None = None
    #: Further headers of the answer. A name may come more than once.
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def counted_as(self) -> str:
        """The code in metrics: one of this router's, whoever chose the other."""
        return self.code


class BadRequest(RequestError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class Unauthorized(RequestError):
    status, type, code = 401, "authentication_error", "invalid_api_key"
    headers: tuple[tuple[str, str], ...] = (("www-authenticate", 'Bearer realm="homing"'),)


class Forbidden(RequestError):
    status, type, code = 403, "permission_error", "key_not_allowed"


class NotFound(RequestError):
    status, type, code = 404, "invalid_request_error", "unknown_url"


class MethodNotAllowed(RequestError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTimeout(RequestError):
    status, type, code = 408, "invalid_request_error", "request_timeout"


class Conflict(RequestError):
    status, type, code = 409, "invalid_request_error", "conflict"


class PayloadTooLarge(RequestError):
    status, type, code = 413, "invalid_request_error", "request_body_too_large"


class HeadersTooLarge(RequestError):
    status, type, code = 431, "invalid_request_error", "request_headers_too_large"


class TooManyRequests(RequestError):
    status, type, code = 429, "rate_limit_error", "overloaded"
    retry_after_seconds = 1


class WorkerRefused(RequestError):
    """``code`` and ``type`` are the worker's, where it gives any."""

    type, code = "invalid_request_error", "worker_refused"

    def __init__(self, message: str, *, status: int, type_: str | None, code: str | None, param: str | None) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status
        self.type = type_ or (self.type if status < 500 else "server_error")

    @property
    def counted_as(self) -> str:
        return "worker_refused"


class UpstreamFailed(RequestError):
    status, type, code = 502, "server_error", "upstream_failed"


class NoWorker(RequestError):
    status, type, code = 503, "server_error", "no_worker_available"
    retry_after_seconds = 1


class UpstreamTimeout(RequestError):
    status, type, code = 504, "server_error", "upstream_timeout"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What goes on the wire for an error: status, extra headers, JSON body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Dialect(Enum):
    """Whose shape an error has."""

    OPENAI = auto()
    ANTHROPIC = auto()


#: The Anthropic API's names for statuses; others are ``api_error`` or ``invalid_request_error``.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error_body(error: RequestError, **more: int) -> bytes:
    """The OpenAI error object as JSON bytes, with these fields besides."""
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": error.code, **more}
    return json.dumps({"error": detail}).encode()


def anthropic_error_body(error: RequestError, **more: int) -> bytes:
    """The Anthropic error object as JSON bytes; ``code`` is added, as stable as in the OpenAI shape."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    type_ = _ANTHROPIC_TYPES.get(error.status, default)
    return json.dumps(
        {"type": "error", "error": {"type": type_, "message": error.message, "code": error.code, **more}}
    ).encode()


def wait_field(error: RequestError) -> dict[str, int]:
    """After how many seconds to come again, if that is known: of an event, which has no ``Retry-After``."""
    seconds = error.retry_after_seconds
    return {} if seconds is None else {"retry_after_seconds": seconds}


def to_answer(error: BaseException, *, dialect: Dialect = Dialect.OPENAI) -> ErrorAnswer:
    """Map any exception to what the client is told. Unknown exceptions tell nothing of the inside."""
    if not isinstance(error, RequestError):
        error = RequestError("The router failed on this request; its log has the cause.")
    headers: list[tuple[str, str]] = [("content-type", "application/json")]
    if error.retry_after_seconds is not None:
        headers.append(("retry-after", str(error.retry_after_seconds)))
    headers += error.headers
    body = anthropic_error_body(error) if dialect is Dialect.ANTHROPIC else openai_error_body(error)
    return ErrorAnswer(status=error.status, headers=tuple(headers), body=body)
