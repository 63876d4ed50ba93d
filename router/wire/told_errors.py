"""Errors that workers tell in an answer whose head was good.

Engines send the head of a stream before they compute, so whatever goes wrong then is told by an event: in OpenAI's
shape under ``error``, with the status that it would have had as its ``code``; older engines have that at the top;
Responses and Anthropic's API name it by the event's ``type``.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from router.wire import sse


class ToldError(NamedTuple):
    """The document that tells an error, and the HTTP status that the error has: 500 if it says none."""

    document: bytes
    status: int


def error_told(answer: bytes, *, is_streamed: bool) -> ToldError | None:
    """The first error that an answer tells, if any. ``answer`` may be a part of a stream, whole events first."""
    if b'"error"' in answer:
        for document in map(sse.event_data, sse.events(answer)) if is_streamed else (answer,):
            if (error := _error_in(document)) is not None:
                code = error.get("code")
                status = code if type(code) is int and 400 <= code < 600 else 500
                return ToldError(document, status)
    return None


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
