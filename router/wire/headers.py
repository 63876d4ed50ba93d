"""Header names, each written once, and which of them cross the router.

Names are lower-case bytes, values bytes as received. A header list keeps order and repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

Header = tuple[bytes, bytes]

HOST: Final = b"host"
CONNECTION: Final = b"connection"
CONTENT_LENGTH: Final = b"content-length"
CONTENT_TYPE: Final = b"content-type"
CONTENT_ENCODING: Final = b"content-encoding"
TRANSFER_ENCODING: Final = b"transfer-encoding"
EXPECT: Final = b"expect"
REQUEST_ID: Final = b"x-request-id"
#: vLLM: which data-parallel rank shall serve the request.
DP_RANK: Final = b"x-data-parallel-rank"

WORKER: Final = b"x-homing-worker"
RANK: Final = b"x-homing-rank"
REASON: Final = b"x-homing-reason"
EXPECTED_CACHED_TOKENS: Final = b"x-homing-expected-cached-tokens"
ATTEMPTS: Final = b"x-homing-attempts"

#: RFC 9110 7.6.1, and what older clients send; each end of a connection speaks for itself.
HOP_BY_HOP: Final = frozenset(
    {
        CONNECTION,
        TRANSFER_ENCODING,
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"upgrade",
        b"http2-settings",
    }
)
#: A client proves itself to the router, not to the workers.
CREDENTIALS: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie", b"x-api-key", b"api-key"})
#: Written anew for each attempt.
_REWRITTEN: Final = frozenset({HOST, CONTENT_LENGTH, EXPECT, REQUEST_ID, DP_RANK})
_REQUEST_DROPPED: Final = HOP_BY_HOP | _REWRITTEN
_REQUEST_DROPPED_WITH_CREDENTIALS: Final = _REQUEST_DROPPED | CREDENTIALS
#: The router's own word on these stands, whatever a worker says.
_RESPONSE_DROPPED: Final = HOP_BY_HOP | {REQUEST_ID, WORKER, RANK, REASON, EXPECTED_CACHED_TOKENS, ATTEMPTS}

_ACCEPTABLE_ID: Final = re.compile(rb"[!-~]{1,128}")


def first(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of ``name``."""
    for key, value in headers:
        if key == name:
            return value
    return None


def acceptable_request_id(value: bytes | None) -> bytes | None:
    """A client's request id if it is visible ASCII of at most 128 characters."""
    return value if value is not None and _ACCEPTABLE_ID.fullmatch(value) else None


def request_lines(headers: Iterable[Header], *, credentials: bool) -> bytes:
    """What of a client's headers goes to a worker, as header lines."""
    dropped = _REQUEST_DROPPED if credentials else _REQUEST_DROPPED_WITH_CREDENTIALS
    return _lines(headers, dropped)


def response_lines(headers: Iterable[Header]) -> bytes:
    """What of a worker's headers goes to the client, as header lines; names may be in any case."""
    return _lines(headers, _RESPONSE_DROPPED)


def _lines(headers: Iterable[Header], dropped: frozenset[bytes]) -> bytes:
    kept: list[bytes] = []
    named: set[bytes] = set()
    for name, value in headers:
        lowered = name.lower()
        if lowered not in dropped:
            kept += (name, b": ", value, b"\r\n")
        elif lowered == CONNECTION and value.lower() not in (b"keep-alive", b"close"):
            named |= {token.strip().lower() for token in value.split(b",")}
    if named - dropped:
        return _lines(headers, dropped | named)
    return b"".join(kept)
