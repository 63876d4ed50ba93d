"""The token counts of an answer, in all endpoints' spellings. Never compiled: msgspec reads the annotations."""

from __future__ import annotations

from typing import Final

import msgspec

#: More than this no model's context holds, and nothing is priced or charged for more, whatever is asked for or told.
MAX_TOKENS: Final = 1 << 27


class Usage(msgspec.Struct, frozen=True):
    """Token counts a worker reports. ``cached_tokens`` is None where the engine does not say.

    A worker may say anything: as read, none is negative or beyond ``MAX_TOKENS``, and no more of a prompt is cached
    than it has.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """All endpoints' spellings. Only the Anthropic API counts reused tokens apart from ``input_tokens``."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def read(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached_tokens = details.cached_tokens if details else self.cache_read_input_tokens
        apart_tokens = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        prompt_tokens = _bounded(self.prompt_tokens or (self.input_tokens or 0) + apart_tokens)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=_bounded(self.completion_tokens or self.output_tokens or 0),
            cached_tokens=None if cached_tokens is None else min(prompt_tokens, _bounded(cached_tokens)),
        )


def _bounded(tokens: int) -> int:
    return max(0, min(tokens, MAX_TOKENS))


class _Nested(msgspec.Struct):
    usage: _Usage | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None
    #: Responses: in the events ``response.created`` ... ``response.completed``.
    response: _Nested | None = None
    #: Messages: in the event ``message_start``.
    message: _Nested | None = None


_DECODE_USAGE: Final = msgspec.json.Decoder(_WithUsage).decode


def parse_usage(document: bytes) -> Usage | None:
    """The ``usage`` of an answer or of one streamed chunk; None where it is absent, null or malformed."""
    try:
        decoded = _DECODE_USAGE(document)
    except (msgspec.DecodeError, RecursionError):
        return None
    nested = decoded.response or decoded.message
    usage = decoded.usage or (nested.usage if nested else None)
    return usage.read() if usage is not None else None


def later_usage(earlier: Usage | None, later: Usage | None) -> Usage | None:
    """What two events of a stream say together: Anthropic's last one may count the output alone."""
    if later is None or earlier is None:
        return later or earlier
    if later.prompt_tokens == 0:
        return Usage(earlier.prompt_tokens, later.completion_tokens, earlier.cached_tokens)
    return later
