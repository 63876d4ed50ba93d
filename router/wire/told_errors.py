"""Errors that workers tell in an answer whose head was good.

Engines send the head of a stream before they compute, so whatever goes wrong then is told by an event: in OpenAI's
shape under ``error``, with the status that it would have had as its ``code``; older engines have that at the top;
Responses and Anthropic's API name it by the event's ``type``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from router.wire import sse

#: What Anthropic's API has for statuses. Where an error has neither, the worker is at fault.
_STATUSES: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_timeout_error": 408,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}


class ToldError(NamedTuple):
    """The document that tells an error, and the HTTP status that the error has."""

    document: bytes
    status: int


def error_told(answer: bytes, *, is_streamed: bool) -> ToldError | None:
    """The first error that an answer tells, if any. ``answer`` may be a part of a stream, whole events first."""
    if b'"error"' in answer:
        for document in map(sse.event_data, sse.events(answer)) if is_streamed else (answer,):
            if (error := _error_in(document)) is not None:
                return ToldError(document, _status(error))
    return None


def _status(error: dict[str, object]) -> int:
    code, kind = error.get("code"), error.get("type")
    if type(code) is int and 400 <= code < 600:
        return code
    return _STATUSES.get(kind, 500) if isinstance(kind, str) else 500


def _error_in(document: bytes) -> dict[str, object] | None:
    try:
        said = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    if error := said.get("error"):
        return error if isinstance(error, dict) else said
    return said if "error" in (said.get("type"), said.get("object")) or said.get("type") == "response.failed" else None
