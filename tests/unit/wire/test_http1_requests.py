"""Requests are read strictly: nothing that h11 refuses passes, and nothing on which two parsers may differ."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.wire.http1 import HttpRequest, Phase, RequestReader
from router.wire.known_heads import KnownHeads


def reader(**limits: int) -> RequestReader:
    limits = {"max_head_bytes": 4096, "max_headers": 32, "max_body_bytes": 4096, **limits}
    return RequestReader(**limits, known=KnownHeads())


def post(*lines: bytes, body: bytes = b"hi", start: bytes = b"POST /a HTTP/1.1", host: bytes = b"Host: a") -> bytes:
    return b"\r\n".join((start, host, *lines, b"", body))


CHUNKED = b"Transfer-Encoding: chunked"
HI = b"2\r\nhi\r\n0\r\n\r\n"

VALID = {
    "length": post(b"Content-Length: 2"),
    "no body": post(body=b"", start=b"GET /a HTTP/1.1"),
    "chunks": post(CHUNKED, body=HI),
    "chunks, other case": post(b"transfer-ENCODING: Chunked", body=HI),
    "chunk extension": post(CHUNKED, body=b"2;a=b\r\nhi\r\n0\r\n\r\n"),
    "trailers": post(CHUNKED, body=b"2\r\nhi\r\n0\r\nX: y\r\n\r\n"),
    "HTTP/1.0": post(b"Content-Length: 2", start=b"POST /a HTTP/1.0"),
    "high bytes in a value": post(b"X: caf\xe9", b"Content-Length: 2"),
    "no space after the colon": post(b"Content-Length:2"),
    "spaces around a value": post(b"Content-Length: \t 2 \t"),
}
REFUSED = {
    "length and chunks": post(b"Content-Length: 2", CHUNKED, body=HI),
    "chunks and length": post(CHUNKED, b"Content-Length: 2", body=HI),
    "two lengths": post(b"Content-Length: 2", b"Content-Length: 3"),
    "same length twice": post(b"Content-Length: 2", b"Content-Length: 2"),
    "length list": post(b"Content-Length: 2, 2"),
    "signed length": post(b"Content-Length: +2"),
    "negative length": post(b"Content-Length: -2"),
    "hex length": post(b"Content-Length: 0x2"),
    "empty length": post(b"Content-Length: "),
    "spaced length": post(b"Content-Length: 1 2"),
    "huge length": post(b"Content-Length: 99999999999999999999999"),
    "bare LF everywhere": post(b"Content-Length: 2").replace(b"\r\n", b"\n"),
    "bare LF after the start": b"POST /a HTTP/1.1\nHost: a\r\nContent-Length: 2\r\n\r\nhi",
    "bare LF after a header": b"POST /a HTTP/1.1\r\nHost: a\nContent-Length: 2\r\n\r\nhi",
    "bare LF at the end": b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\nhi",
    "bare CR": post(b"X: a\rY: b", b"Content-Length: 2"),
    "obs-fold": post(b"X: a\r\n b", b"Content-Length: 2"),
    "folded coding": post(b"Transfer-Encoding:\r\n chunked", body=HI),
    "space before colon": post(b"Content-Length : 2"),
    "tab before colon": post(b"Content-Length\t: 2"),
    "no name": post(b": 2", b"Content-Length: 2"),
    "no colon": post(b"foo", b"Content-Length: 2"),
    "NUL in a value": post(b"X: a\0b", b"Content-Length: 2"),
    "control in a value": post(b"X: a\x01b", b"Content-Length: 2"),
    "DEL in a value": post(b"X: a\x7fb", b"Content-Length: 2"),
    "bracket in a name": post(b"X(y): a", b"Content-Length: 2"),
    "space before the first name": post(b"Content-Length: 2", host=b" Host: a"),
    "unknown coding": post(b"Transfer-Encoding: xchunked", body=HI),
    "two codings": post(b"Transfer-Encoding: gzip, chunked", body=HI),
    "chunked twice": post(b"Transfer-Encoding: chunked, chunked", body=HI),
    "chunked not last": post(b"Transfer-Encoding: chunked, identity", body=HI),
    "two coding headers": post(CHUNKED, CHUNKED, body=HI),
    "vertical tab in the coding": post(b"Transfer-Encoding: \x0bchunked", body=HI),
    "chunks in HTTP/1.0": post(CHUNKED, body=HI, start=b"POST /a HTTP/1.0"),
    "chunk size not hex": post(CHUNKED, body=b"zz\r\nhi\r\n0\r\n\r\n"),
    "negative chunk": post(CHUNKED, body=b"-2\r\nhi\r\n0\r\n\r\n"),
    "0x chunk": post(CHUNKED, body=b"0x2\r\nhi\r\n0\r\n\r\n"),
    "chunk longer than said": post(CHUNKED, body=b"2\r\nhiXX0\r\n\r\n"),
    "LF after chunk size": post(CHUNKED, body=b"2\nhi\r\n0\r\n\r\n"),
    "LF after chunk data": post(CHUNKED, body=b"2\r\nhi\n0\r\n\r\n"),
    "LF in chunk extension": post(CHUNKED, body=b"2;a\nb\r\nhi\r\n0\r\n\r\n"),
    "chunk size overflows": post(CHUNKED, body=b"fffffffffffffffff\r\nhi\r\n0\r\n\r\n"),
    "space after chunk size": post(CHUNKED, body=b"2 \r\nhi\r\n0\r\n\r\n"),
    "length in the trailers": post(CHUNKED, body=b"2\r\nhi\r\n0\r\nContent-Length: 5\r\n\r\n"),
    "no host": b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi",
    "two hosts": post(b"Host: b", b"Content-Length: 2"),
    "HTTP/0.9": b"GET /a\r\n\r\n",
    "HTTP/1.2": post(start=b"GET /a HTTP/1.2", body=b""),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": post(start=b"FOO /a HTTP/1.1", body=b""),
    "space in the target": post(start=b"GET /a b HTTP/1.1", body=b""),
    "tabs in the start line": post(start=b"GET\t/a\tHTTP/1.1", body=b""),
    "NUL in the target": post(start=b"GET /a\0b HTTP/1.1", body=b""),
    "lower-case protocol": post(start=b"GET /a http/1.1", body=b""),
    "space after the version": post(start=b"GET /a HTTP/1.1 ", body=b""),
    "a tunnel": post(start=b"CONNECT a:1 HTTP/1.1", body=b""),
    "TLS": bytes.fromhex("1603010200010001fc0303"),
}
#: h11 refuses these, this reader does not: RFC 9112 2.2 asks servers to skip empty lines before a request and lets a
#: lone LF end one there, and two spaces leave method, target and version what they are.
TOLERATED = {
    "empty line first": b"\r\n" + post(b"Content-Length: 2"),
    "a lone LF first": b"\n" + post(b"Content-Length: 2"),
    "two spaces before the version": post(b"Content-Length: 2", start=b"POST /a  HTTP/1.1"),
    "two spaces after the method": post(b"Content-Length: 2", start=b"POST  /a HTTP/1.1"),
}


def h11_body(data: bytes) -> bytes | None:
    """What h11 takes for the first request's body; None if it refuses the request or waits for more."""
    connection = h11.Connection(h11.SERVER)
    body = b""
    try:
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return body
            elif event is h11.NEED_DATA:
                return None
    except h11.RemoteProtocolError:
        return None


@pytest.mark.parametrize("name", VALID)
def test_valid_requests_mean_what_h11_says(name: str) -> None:
    """A well-formed request is read, with the body that h11 reads."""
    (request,) = reader().feed(VALID[name])
    assert isinstance(request, HttpRequest)
    assert request.body == h11_body(VALID[name])
    assert request.head.target == b"/a"


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_requests_are_refused(name: str) -> None:
    """A request that is malformed, or that two parsers may understand differently, is refused, and what follows is."""
    it = reader()
    (error,) = it.feed(REFUSED[name])
    assert isinstance(error, RequestError)
    assert error.status in (400, 405)
    assert it.phase is Phase.BROKEN
    assert it.feed(VALID["length"]) == []


@pytest.mark.parametrize("name", TOLERATED)
def test_harmless_oddities_are_read(name: str) -> None:
    """Where this reader is more lenient than h11, it is so on purpose."""
    (request,) = reader().feed(TOLERATED[name])
    assert isinstance(request, HttpRequest)
    assert (request.head.target, request.body) == (b"/a", b"hi")
    assert h11_body(TOLERATED[name]) is None


def test_small_chunks_are_kept_as_bytes() -> None:
    """A body weighs what it weighs, however small the chunks that it comes in, and is the same."""
    body = bytes(range(256)) * 2048
    wire = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body), 2))
    it = reader(max_body_bytes=1 << 20)
    it.feed(post(CHUNKED, body=b""))
    tracemalloc.start()
    try:
        for at in range(0, len(wire), 10_000):
            assert it.feed(wire[at : at + 10_000]) == []
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * len(body)
    assert most < 3 * len(body)
    (request,) = it.feed(b"0\r\n\r\n" + post(b"Content-Length: 2"))[:1]
    assert isinstance(request, HttpRequest)
    assert request.body == body


def test_so_many_may_come_at_once() -> None:
    """256 requests in one piece are read; the next is refused."""
    piece = post(body=b"", start=b"GET /a HTTP/1.1")
    assert [type(item) for item in reader().feed(piece * 256)] == [HttpRequest] * 256
    *answered, refusal = reader().feed(piece * 257)
    assert [type(item) for item in answered] == [HttpRequest] * 256
    assert isinstance(refusal, RequestError)
    assert refusal.code == "too_many_pipelined"
    flooded = reader()
    flooded.feed(piece * 300)
    assert flooded.target == b"/a", "what follows the one that is refused adds nothing to it"


ALL = {**VALID, **REFUSED, **TOLERATED}


@given(st.sampled_from(sorted(ALL)), st.lists(st.integers(0, 120), max_size=8))
def test_where_the_bytes_are_split_does_not_matter(name: str, cuts: list[int]) -> None:
    """Any split of the bytes gives the same requests and the same refusal."""
    data = VALID["chunks"] + ALL[name]
    it = reader()
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    split = [item for piece in pieces if piece for item in it.feed(piece)]
    whole = reader().feed(data)
    assert [_summary(item) for item in split] == [_summary(item) for item in whole]


def _summary(item: HttpRequest | RequestError) -> object:
    return item if isinstance(item, HttpRequest) else (item.status, item.code)


def test_an_offer_to_upgrade_is_declined_and_the_body_read() -> None:
    """Java's client offers h2c with every request; its body and what is pipelined after it are read all the same."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAA")
    data = (
        post(*offer, b"Content-Length: 2")
        + post(*offer, CHUNKED, body=HI)
        + post(*offer, body=b"", start=b"GET /b HTTP/1.1")
        + post(b"Content-Length: 3", body=b"end")
    )
    whole = reader().feed(data)
    assert [(item.head.target, item.body) for item in whole if isinstance(item, HttpRequest)] == [
        (b"/a", b"hi"),
        (b"/a", b"hi"),
        (b"/b", b""),
        (b"/a", b"end"),
    ]
    it = reader()
    assert [item for byte in data for item in it.feed(bytes((byte,)))] == whole


def test_keep_alive() -> None:
    """HTTP/1.1 keeps the connection unless told to close; HTTP/1.0 the other way round."""
    cases = [
        (b"HTTP/1.1", b"", True),
        (b"HTTP/1.1", b"close", False),
        (b"HTTP/1.0", b"", False),
        (b"HTTP/1.0", b"keep-alive", True),
    ]
    for version, connection, keep in cases:
        lines = (b"Connection: " + connection,) if connection else ()
        (request,) = reader().feed(post(*lines, body=b"", start=b"GET / " + version))
        assert isinstance(request, HttpRequest)
        assert (request.head.keep_alive, request.head.chunks) == (keep, version == b"HTTP/1.1")


def test_expect_continue_is_noted_until_the_body_has_come() -> None:
    """Whoever serves the connection learns that the client waits; an empty body waits for nothing."""
    it = reader()
    assert it.feed(post(b"Expect: 100-Continue", b"Content-Length: 2", body=b"")) == []
    assert it.awaits_continue
    assert len(it.feed(b"hi")) == 1
    assert not it.awaits_continue
    it.feed(post(b"Expect: 100-continue", b"Content-Length: 0", body=b""))
    assert not it.awaits_continue


@pytest.mark.parametrize(
    ("data", "limits", "status"),
    [
        (post(b"Content-Length: 11", body=b""), {"max_body_bytes": 10}, 413),
        (post(CHUNKED, body=b"b\r\n" + b"x" * 11 + b"\r\n0\r\n\r\n"), {"max_body_bytes": 10}, 413),
        (post(b"X: " + b"y" * 5000, b"Content-Length: 2"), {}, 431),
        (post(*[b"X: y"] * 40, b"Content-Length: 2"), {}, 431),
    ],
    ids=["announced length", "chunks", "head", "headers"],
)
def test_sizes_are_limited(data: bytes, limits: dict[str, int], status: int) -> None:
    """What exceeds a limit is refused with the status that names it."""
    (error,) = reader(**limits).feed(data)
    assert isinstance(error, RequestError)
    assert error.status == status


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\nX: ", b"y"),
        (b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        (post(CHUNKED, body=b"2;"), b"e"),
        (post(CHUNKED, body=b"2\r\nhi\r\n0\r\nX: "), b"z"),
    ],
    ids=["target", "value", "headers", "chunk extension", "trailer"],
)
def test_what_never_ends_is_refused(start: bytes, endless: bytes) -> None:
    """A head, a chunk extension or a trailer that goes on and on is refused soon after its limit."""
    it = reader()
    assert it.feed(start) == []
    refusals = [item for _ in range(10) for item in it.feed(endless * (1000 // len(endless)))]
    assert len(refusals) == 1
    assert it.phase is Phase.BROKEN


def test_body_in_one_byte_chunks_is_read() -> None:
    """The guard against framing without content lets the smallest chunks pass."""
    it = reader(max_head_bytes=1024)
    assert it.feed(post(CHUNKED, body=b"")) == []
    for _ in range(4000):
        assert it.feed(b"1\r\nx\r\n") == []
    (request,) = it.feed(b"0\r\n\r\n")
    assert isinstance(request, HttpRequest)
    assert request.body == b"x" * 4000
