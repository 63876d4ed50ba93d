"""HTTP/1.1 as bytes, no sockets: requests read strictly, heads and chunks written.

The parser is llhttp (through httptools) in its strict mode. It already refuses conflicting or repeated lengths,
bare LF, obs-fold, spaces before colons, control characters and malformed chunks. ``RequestReader`` refuses in
addition what llhttp lets pass: transfer codings other than ``chunked`` alone, a missing or repeated Host, HTTP/0.9,
and whatever exceeds the limits on sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final, cast

import httptools

from router.errors import (
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    PayloadTooLarge,
    RequestError,
    TooManyRequests,
)
from router.wire import headers as names
from router.wire.headers import Header
from router.wire.known_heads import KnownHeads

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
#: Chunk framing and trailers may weigh this many times the body they carry; one-byte chunks weigh six times.
_MAX_FRAMING_RATIO: Final = 8
#: A body that comes in more pieces is put together meanwhile: small chunks weigh much more apart than as bytes.
_MAX_PIECES: Final = 64
#: Requests that are taken out of one piece of what a client sends; each is an object, and is served before others are.
_MAX_AT_ONCE: Final = 256
#: Headers that decide how a request is framed and whether it is valid.
_CHECKED: Final = frozenset({names.HOST, names.CONTENT_LENGTH, names.TRANSFER_ENCODING, names.EXPECT})
#: With one of these a head has to go through the parser each time.
_UNREPEATABLE: Final = frozenset({names.TRANSFER_ENCODING, names.EXPECT, names.UPGRADE})


@dataclass(slots=True, init=False)
class RequestHead:
    """What stands before a body. Header names are lower-case. Requests may share one: it is not changed.

    ``chunks``: it is HTTP/1.1, so the answer may be chunked. ``keep_alive``: the connection may be used again.
    """

    method: str
    target: bytes
    headers: list[Header]
    chunks: bool
    keep_alive: bool
    path: bytes
    #: The client's own name for its requests, if it is one that can be passed on.
    request_id: bytes | None
    #: What may tell who asks; see ``headers.as_text``.
    text: Mapping[str, str]
    #: What goes on to a worker, once it has been written; see ``headers.ForwardingRules``.
    forwarded: bytes | None

    def __init__(
        self, method: str, target: bytes, headers: list[Header], *, chunks: bool = True, keep_alive: bool = True
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.chunks = chunks
        self.keep_alive = keep_alive
        self.path = target.partition(b"?")[0]
        self.request_id = names.acceptable_request_id(names.first(headers, names.REQUEST_ID))
        self.text = names.as_text(headers)
        self.forwarded = None

    @property
    def is_repeatable(self) -> bool:
        """Whether what its bytes mean does not depend on what came before, or on the body's length."""
        if not (self.chunks and self.keep_alive):
            return False
        present = [name for name, _ in self.headers]
        return present.count(names.CONTENT_LENGTH) == 1 and _UNREPEATABLE.isdisjoint(present)


@dataclass(slots=True)
class HttpRequest:
    """A request as read from the wire."""

    head: RequestHead
    body: bytes = b""


class Phase(Enum):
    """What the reader waits for."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    BROKEN = auto()  # a request was refused; the rest of the connection means nothing


class RequestReader:
    """Turns a client's bytes into requests. A refusal is the last thing it returns."""

    def __init__(
        self, *, max_head_bytes: int, max_headers: int, max_body_bytes: int, known: KnownHeads[RequestHead]
    ) -> None:
        """``known`` are the heads of all readers that have these limits."""
        self._known = known
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self.phase = Phase.IDLE
        #: The client waits for ``100 Continue`` before it sends the body. Whoever sends it clears this.
        self.awaits_continue = False
        self._target = b""
        self._headers: list[Header] = []
        self._request: HttpRequest | None = None
        self._ready: list[HttpRequest | RequestError] = []
        # A body: what has been put together, and the pieces that follow.
        self._whole = bytearray()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._framing: bytes | None = None
        self._unfinished_bytes = 0
        self._fed_bytes = 0
        self._resuming = False
        #: The last request did not say that it is the last.
        self._is_open = True

    @property
    def target(self) -> bytes:
        """What the request that is being read, or was refused last, asks for, as far as it has come."""
        return _origin_form(self._target) or self._target

    @property
    def headers(self) -> Sequence[Header]:
        """Those that have come of the request that is being read, or was refused last."""
        return self._headers

    @property
    def head(self) -> RequestHead:
        """Of the request whose body is being read."""
        assert self._request is not None, "no head has been read"
        return self._request.head

    @property
    def body_bytes(self) -> int:
        """What has been read of a body that is not whole."""
        return self._body_bytes if self.phase is Phase.BODY else 0

    def feed(self, data: bytes) -> list[HttpRequest | RequestError]:
        """Requests that ``data`` completed, in order, and the refusal that ends the connection, if any."""
        if self.phase is Phase.BROKEN:
            return []
        phase = self.phase
        if phase is Phase.IDLE and self._is_open:
            known = self._known.whole(data)
            if known is not None and len(known[1]) <= self._max_body_bytes:
                return [HttpRequest(known[0], known[1])]
        self._fed_bytes = len(data)
        self._parse(data)
        ready = self._ready
        if ready:
            self._ready = []
            self._unfinished_bytes = 0
            if len(ready) == 1 and phase is Phase.IDLE and self.phase is Phase.IDLE:
                self._learn(data, ready[0])
        elif self.phase is not Phase.IDLE:
            self._check_unfinished(len(data), same_phase=self.phase is phase)
            if self._ready:
                ready, self._ready = self._ready, []
        return ready

    def _learn(self, data: bytes, ready: HttpRequest | RequestError) -> None:
        """Know a request again that came by itself."""
        if isinstance(ready, RequestError) or len(data) > self._max_head_bytes + len(ready.body):
            return
        if ready.head.is_repeatable:
            self._known.learn(data, ready.head)

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self.phase is Phase.BROKEN:
                        return
                    data = data[upgrade.args[0] :]
                    self._resume()
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"The request is not valid HTTP: {error}.", code="invalid_http"))

    def _resume(self) -> None:
        """Go on after an offer to upgrade (``Upgrade: h2c`` of some clients), which the router declines.

        llhttp stops there and forgets the body, so another parser is told of its framing and continues.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._framing is not None:
            self._resuming = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n")
            self._resuming = False

    def _check_unfinished(self, received_bytes: int, *, same_phase: bool) -> None:
        """Bound what a head, or framing around a body, may weigh before it is complete."""
        self._unfinished_bytes = self._unfinished_bytes + received_bytes if same_phase else 0
        if self.phase is Phase.HEAD and self._unfinished_bytes > self._max_head_bytes:
            self._refuse(self._head_too_large())
        elif self.phase is Phase.BODY:
            allowed = _MAX_FRAMING_RATIO * self._body_bytes + self._max_head_bytes
            if self._unfinished_bytes > allowed:
                self._refuse(BadRequest("The body's chunks are mostly framing.", code="invalid_http"))

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"The request's head exceeds {self._max_head_bytes} bytes.")

    def _refuse(self, error: RequestError) -> None:
        if self.phase is not Phase.BROKEN:
            self.phase = Phase.BROKEN
            self._ready.append(error)
            self._forget_body()

    def _forget_body(self) -> None:
        self._body = []
        if self._whole:
            self._whole = bytearray()

    # --- called by the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._resuming or self.phase is Phase.BROKEN:
            return
        self.phase = Phase.HEAD
        self._target = b""
        self._headers = []
        self._framing = None

    def on_url(self, url: bytes) -> None:
        if self.phase is Phase.HEAD:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is Phase.HEAD:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resuming or self.phase is Phase.BROKEN:
            return
        parser = self._parser
        version = parser.get_http_version()
        target = self._target if self._target.startswith(b"/") else _origin_form(self._target)
        head = RequestHead(
            parser.get_method().decode("ascii"),
            target or b"",
            self._headers,
            chunks=version == "1.1",
            keep_alive=parser.should_keep_alive(),
        )
        self._request = HttpRequest(head)
        self._is_open = head.keep_alive
        self._body_bytes = 0
        refusal = self._check_head(head, version)
        if target is None:
            refusal = BadRequest("The target of the request is not a URL.", code="invalid_http")
        if refusal is not None:
            self._refuse(refusal)
        else:
            self.phase = Phase.BODY

    def on_body(self, body: bytes) -> None:
        if self.phase is not Phase.BODY:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self._refuse(self._body_too_large())
        else:
            self._body.append(body)
            if len(self._body) == _MAX_PIECES:
                self._whole += b"".join(self._body)
                self._body.clear()

    def on_message_complete(self) -> None:
        if self.phase is not Phase.BODY or (self._parser.should_upgrade() and self._framing is not None):
            return
        assert self._request is not None
        body = self._body
        if self._whole:
            self._whole += b"".join(body)
            self._request.body = bytes(self._whole)
            self._forget_body()
        elif body:
            self._request.body = body[0] if len(body) == 1 else b"".join(body)
            self._body = []
        if len(self._ready) == _MAX_AT_ONCE:
            message = f"No more than {_MAX_AT_ONCE} requests may be sent at once."
            self._refuse(TooManyRequests(message, code="too_many_pipelined"))
            return
        self.phase = Phase.IDLE
        self.awaits_continue = False
        self._ready.append(self._request)
        self._request = None

    # --- rules ----------------------------------------------------------------------------------

    def _check_head(self, head: RequestHead, version: str) -> RequestError | None:
        """What is wrong with a head, beyond what llhttp has refused. Notes the body's framing."""
        hosts = 0
        length: int | None = None
        codings: list[bytes] = []
        expects_continue = False
        for name, value in head.headers:
            if name not in _CHECKED:
                continue
            if name == names.HOST:
                hosts += 1
            elif name == names.CONTENT_LENGTH:
                length = int(value)
                self._framing = b"content-length: %b\r\n" % value
            elif name == names.TRANSFER_ENCODING:
                codings.append(value.lower())
                self._framing = b"transfer-encoding: chunked\r\n"
            elif name == names.EXPECT:
                expects_continue = value.lower() == b"100-continue"
        if version not in ("1.0", "1.1"):
            return BadRequest("The router speaks HTTP/1.1.", code="invalid_http")
        if head.method == "CONNECT":
            return MethodNotAllowed("The router opens no tunnels.")
        # Only a head that came with more bytes than the limit needs to be weighed.
        if self._unfinished_bytes + self._fed_bytes > self._max_head_bytes < _head_bytes(head):
            return self._head_too_large()
        if len(head.headers) > self._max_headers:
            return HeadersTooLarge(f"The request has more than {self._max_headers} headers.")
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            return BadRequest("The request must have one Host header.", code="invalid_http")
        if codings and (codings != [b"chunked"] or version != "1.1"):
            return BadRequest("The only transfer coding understood is 'chunked'.", code="invalid_http")
        if length is not None and length > self._max_body_bytes:
            return self._body_too_large()
        self.awaits_continue = expects_continue and version == "1.1" and bool(length or codings)
        return None

    def _body_too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body exceeds {self._max_body_bytes} bytes.")


def _head_bytes(head: RequestHead) -> int:
    return len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers)


def _origin_form(target: bytes) -> bytes | None:
    """Path and query of a target that names the server as well (``http://host/path``), None where it is no URL.

    Other targets are left alone.
    """
    if not target.startswith((b"http://", b"https://")):
        return target
    try:
        url = cast("Any", httptools.parse_url(target))  # its parts may be None, which it does not declare
    except httptools.HttpParserError:
        return None
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


# --- writing ------------------------------------------------------------------------------------

_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


def status_line(status: int, reason: bytes | None = None) -> bytes:
    """``HTTP/1.1 200 OK``, with the standard's phrase unless another is given."""
    return b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"") if reason is None else reason)


def chunk(data: bytes) -> bytes:
    """``data`` (not empty) as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def header_lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Headers of the router's own making as header lines."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


def bodiless(status: int) -> bool:
    """An answer with this status never has a body (RFC 9110 6.4.1)."""
    return status in (204, 304) or status < 200
