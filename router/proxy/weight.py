"""What a request may cost the event loop: which bodies are read, rendered and keyed beside it.

Strings are cheap by the megabyte; values are not. Each message, part, tool and field of a schema is a turn of a
template's loop, some microseconds, so an honest conversation stays on the loop and a body of nothing but brackets
does not.
"""

from __future__ import annotations

from typing import Final

from router.wire.openai import Endpoint, InferenceRequest

#: Bodies larger than this are never light.
_MOST_BYTES: Final = 1024 * 1024
#: Nor are conversations of more values than this, however few bytes they take: agents' have some hundred messages.
_MOST_VALUES: Final = 16 * 1024
#: Items that are made messages of while the body is read, a microsecond each: counted where there may be so many.
_MOST_ITEMS: Final = 16 * 1024
_MANY_ITEMS_BYTES: Final = 256 * 1024
_TRANSLATED: Final = frozenset({Endpoint.MESSAGES, Endpoint.RESPONSES})


def is_quickly_read(endpoint: Endpoint, body: bytes) -> bool:
    """Whether the loop has the time to decode it."""
    if len(body) <= _MANY_ITEMS_BYTES or endpoint not in _TRANSLATED:
        return len(body) <= _MOST_BYTES
    return len(body) <= _MOST_BYTES and body.count(b"{") <= _MOST_ITEMS


def is_light(request: InferenceRequest) -> bool:
    """Whether the loop has the time to render it, and to key it by its text."""
    return is_short(request) and (
        request.chat is None or len(request.body) <= 2 * _MOST_VALUES or _has_few_values(request.chat)
    )


def is_short(request: InferenceRequest) -> bool:
    """Whether others may be asked to wait while it is rendered."""
    return len(request.body) <= _MOST_BYTES


def _has_few_values(value: object) -> bool:
    left = _MOST_VALUES
    level = [value]
    while level:
        left -= sum(map(len, level))  # type: ignore[arg-type]
        if left < 0:
            return False
        level = [
            child
            for outer in level
            for child in (outer.values() if type(outer) is dict else outer)  # type: ignore[attr-defined]
            if type(child) is dict or type(child) is list
        ]
    return True
