"""A reader that knows a head reads no request otherwise than one that does not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.errors import RequestError
from router.wire import known_heads
from router.wire.http1 import HttpRequest, RequestHead, RequestReader
from router.wire.known_heads import KnownHeads

LINES = [
    b"Content-Length: %d",
    b"content-length: %d",
    b"CONTENT-LENGTH: %d",
    b"Content-Length:  %d",
    b"content-length:%d ",
    b"Content-Length: 0%d",
    b"Content-Length: +%d",
    b"x-content-length: %d",
    b"X: content-length: %d",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: upgrade",
    b"Upgrade: h2c",
    b"Host: b",
    b"X-Session-Id: s",
    b" folded",
]
LENGTHS = st.sampled_from([0, 1, 7, 12, 200, 4000])


def reader(known: KnownHeads[RequestHead]) -> RequestReader:
    return RequestReader(max_head_bytes=300, max_headers=8, max_body_bytes=1000, known=known)


def outcome(item: HttpRequest | RequestError) -> object:
    """All that is to be known of it but the number that is left out of a known head."""
    if isinstance(item, RequestError):
        return item.status, item.code, str(item)
    head = item.head
    headers = [header for header in head.headers if header[0] != b"content-length"]
    return head.method, head.target, headers, head.chunks, head.keep_alive, item.body


def message(start: bytes, lines: list[bytes], length: int, extra: bytes) -> bytes:
    """``extra`` follows the body, or ends it early."""
    filled = [line % length if b"%d" in line else line for line in lines]
    body = b"x" * length
    whole = b"\r\n".join((start, b"Host: a", *filled, b"", body))
    return whole[:-1] if extra == b"-" else whole + extra


messages = st.builds(
    message,
    st.sampled_from([b"POST /a HTTP/1.1", b"POST /b HTTP/1.1", b"GET /a HTTP/1.1", b"POST /a HTTP/1.0"]),
    st.lists(st.sampled_from(LINES), max_size=3),
    LENGTHS,
    st.sampled_from([b"", b"", b"", b"-", b"\r\n", b"x", b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"]),
)


PLAIN = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nxxx"
LAST = PLAIN.replace(b"Host: a", b"Host: a\r\nConnection: close")
CUT = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: "
MISLEADING = PLAIN.replace(b"Host: a", b"Host: a\r\nx-content-length: 3")


@example(before=[PLAIN], after=[LAST, PLAIN])
@example(before=[CUT + b"3\r\n\r\nxxx"], after=[CUT + b"%d\r" % len(CUT)])
@example(before=[MISLEADING], after=[MISLEADING.replace(b"th: 3", b"th: 9", 1) + b"x" * 6])
@given(before=st.lists(messages, min_size=1, max_size=4), after=st.lists(messages, min_size=1, max_size=4))
def test_what_is_known_changes_nothing(before: list[bytes], after: list[bytes]) -> None:
    """Whatever other connections have sent, a connection's bytes mean what they mean to a fresh parser."""
    known: KnownHeads[RequestHead] = KnownHeads()
    for data in (*before, *after):
        reader(known).feed(data)
    with_, without = reader(known), reader(KnownHeads())
    for data in after:
        # A reader without memory of its own messages either, so that the parser reads every one.
        without._known = KnownHeads()
        assert list(map(outcome, with_.feed(data))) == list(map(outcome, without.feed(data)))
        assert with_.phase is without.phase
        assert with_.awaits_continue == without.awaits_continue


def test_another_length_is_the_same_head() -> None:
    """The second request of a client is found by its head, and has its own body."""
    known: KnownHeads[RequestHead] = KnownHeads()
    first, second = (message(b"POST /a HTTP/1.1", [b"Content-Length: %d"], length, b"") for length in (3, 12))
    (one,) = reader(known).feed(first)
    (other,) = reader(known).feed(second)
    assert isinstance(one, HttpRequest)
    assert isinstance(other, HttpRequest)
    assert other.head is one.head
    assert (one.body, other.body) == (b"xxx", b"x" * 12)


@pytest.mark.parametrize(
    "lines",
    [
        [b"CONTENT-LENGTH: %d"],
        [b"Content-Length:  %d"],
        [b"content-length:%d "],
        [b"Transfer-Encoding: chunked"],
        [b"Content-Length: %d", b"Expect: 100-continue"],
        [b"Content-Length: %d", b"Connection: close"],
        [b"Content-Length: %d", b"Upgrade: h2c"],
    ],
)
def test_unusual_heads_are_not_known(lines: list[bytes]) -> None:
    """Only a head with its length in a usual spelling, and nothing that steers the connection, is remembered."""
    known: KnownHeads[RequestHead] = KnownHeads()
    reader(known).feed(message(b"POST /a HTTP/1.1", lines, 3, b""))
    assert len(known) == 0


def test_so_many_are_kept() -> None:
    """The earliest is forgotten."""
    known: KnownHeads[int] = KnownHeads()
    heads = [b"POST /%d HTTP/1.1\r\ncontent-length: 0\r\n\r\n" % number for number in range(known_heads.MAX_HEADS + 1)]
    for number, head in enumerate(heads):
        known.learn(head, number)
    assert len(known) == known_heads.MAX_HEADS
    assert known.whole(heads[0]) is None
    assert known.whole(heads[1]) == (1, b"")
    assert known.whole(heads[-1]) == (known_heads.MAX_HEADS, b"")
