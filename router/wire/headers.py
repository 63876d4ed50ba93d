"""Header names, each written once, and which of them cross the router.

Names are lower-case bytes, values bytes as received. A header list keeps order and repetitions.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

Header = tuple[bytes, bytes]

HOST: Final = b"host"
CONNECTION: Final = b"connection"
CONTENT_LENGTH: Final = b"content-length"
CONTENT_TYPE: Final = b"content-type"
CONTENT_ENCODING: Final = b"content-encoding"
TRANSFER_ENCODING: Final = b"transfer-encoding"
EXPECT: Final = b"expect"
UPGRADE: Final = b"upgrade"
REQUEST_ID: Final = b"x-request-id"
AUTHORIZATION: Final = b"authorization"
#: W3C trace context.
TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
#: vLLM: which data-parallel rank shall serve the request.
DP_RANK: Final = b"x-data-parallel-rank"
#: Our shims' answers: which data-parallel rank served the request.
SERVED_DP_RANK: Final = b"x-dp-rank"

WORKER: Final = b"x-homing-worker"
RANK: Final = b"x-homing-rank"
REASON: Final = b"x-homing-reason"
EXPECTED_CACHED_TOKENS: Final = b"x-homing-expected-cached-tokens"
ATTEMPTS: Final = b"x-homing-attempts"
#: Of a pair of ranks: the one that computed the prompt, WORKER/RANK.
PREFILL_RANK: Final = b"x-homing-prefill-rank"

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
        UPGRADE,
        b"http2-settings",
    }
)
#: A client proves itself to the router, not to the workers.
CREDENTIALS: Final = frozenset(
    {AUTHORIZATION, b"proxy-authorization", b"cookie", b"x-api-key", b"api-key", b"x-goog-api-key"}
)
#: Where the clients of OpenAI and Anthropic, and of Azure, put an API key; the first also as ``Bearer`` or ``Basic``.
_API_KEYS: Final = frozenset({b"x-api-key", b"api-key"})
#: Written anew for each attempt; and SGLang's headers that overrule the body in what the router decides.
_REWRITTEN: Final = frozenset(
    {
        HOST,
        CONTENT_LENGTH,
        EXPECT,
        REQUEST_ID,
        DP_RANK,
        b"x-override-bootstrap-host",
        b"x-override-bootstrap-port",
        b"x-override-bootstrap-room",
        b"x-override-routed-dp-rank",
        b"x-override-disagg-prefill-dp-rank",
    }
)
_REQUEST_DROPPED: Final = HOP_BY_HOP | _REWRITTEN
#: Go on even where an operator lists what may: without them the worker cannot read the body.
_ALWAYS_FORWARDED: Final = frozenset({CONTENT_TYPE, CONTENT_ENCODING})
#: The router's own word on these stands, whatever a worker says.
_RESPONSE_DROPPED: Final = HOP_BY_HOP | {
    CONTENT_LENGTH,
    REQUEST_ID,
    WORKER,
    RANK,
    REASON,
    EXPECTED_CACHED_TOKENS,
    ATTEMPTS,
    PREFILL_RANK,
}

_ACCEPTABLE_ID: Final = re.compile(rb"[!-~]{1,128}")


def first(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of ``name``."""
    for key, value in headers:
        if key == name:
            return value
    return None


#: Headers of nearly every request that tell nobody apart, and those that must not.
_UNTOLD: Final = CREDENTIALS | {
    HOST,
    CONNECTION,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    TRANSFER_ENCODING,
    EXPECT,
    b"accept",
    b"accept-encoding",
}


def as_text(headers: Iterable[Header]) -> dict[str, str]:
    """What may tell who asks, as text. Of a repeated header the last one counts; credentials are left out."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in _UNTOLD}


def id_line(request_id: bytes) -> bytes:
    """The header that tells the client its request's id."""
    return b"%b: %b\r\n" % (REQUEST_ID, request_id)


def acceptable_request_id(value: bytes | None) -> bytes | None:
    """A client's request id if it is visible ASCII of at most 128 characters."""
    return value if value is not None and _ACCEPTABLE_ID.fullmatch(value) else None


def presented_keys(headers: Iterable[Header]) -> Iterator[bytes]:
    """API keys that a client shows: a bearer token, the password of basic credentials, or a key in a header."""
    for name, value in headers:
        if name in _API_KEYS:
            yield value
        elif name == AUTHORIZATION:
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield rest.strip()
            elif scheme.lower() == b"basic":
                try:
                    yield base64.b64decode(rest, validate=True).partition(b":")[2]
                except ValueError:
                    continue


@dataclass(frozen=True, slots=True)
class ForwardingRules:
    """Which of a client's headers go to a worker. ``allowed`` None: all but the dropped."""

    dropped: frozenset[bytes]
    allowed: frozenset[bytes] | None = None

    @classmethod
    def of(
        cls, *, credentials: bool = False, forward: Iterable[str] = (), drop: Iterable[str] = (), traced: bool = False
    ) -> ForwardingRules:
        """Credentials stay here unless ``credentials``. ``traced``: the router writes its own trace context."""
        dropped = _REQUEST_DROPPED | {name.lower().encode() for name in drop}
        if not credentials:
            dropped |= CREDENTIALS
        if traced:
            dropped |= {TRACEPARENT, TRACESTATE}
        allowed = frozenset(name.lower().encode() for name in forward)
        return cls(dropped, allowed | _ALWAYS_FORWARDED if allowed else None)

    def passes(self, name: bytes) -> bool:
        """Whether a client's header of this name goes on."""
        return name not in self.dropped and (self.allowed is None or name in self.allowed)

    def request_lines(self, headers: Iterable[Header]) -> bytes:
        """What of a client's headers goes to a worker, as header lines."""
        if self.allowed is None:
            return _lines(headers, self.dropped)
        kept = self.allowed | {CONNECTION}  # what it names is the connection's, too
        return _lines([header for header in headers if header[0] in kept], self.dropped)


def response_lines(headers: Iterable[Header]) -> bytes:
    """What of a worker's headers goes to the client, but for the length, as header lines; names may be in any case."""
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
