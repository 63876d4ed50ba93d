"""Which headers cross the router, and how request ids are taken."""

from __future__ import annotations

import pytest

from router.wire import headers as names


def test_request_headers() -> None:
    """Hop-by-hop headers, those that Connection names, rewritten ones and credentials stay behind; order is kept."""
    headers = [
        (b"host", b"a"),
        (b"x-b", b"1"),
        (b"connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"authorization", b"Bearer x"),
        (b"x-a", b"2"),
        (b"x-b", b"3"),
        (b"content-length", b"2"),
        (b"transfer-encoding", b"chunked"),
        (b"x-data-parallel-rank", b"1"),
    ]
    kept = b"x-b: 1\r\nx-a: 2\r\nx-b: 3\r\n"
    with_key = kept.replace(b"x-a", b"authorization: Bearer x\r\nx-a")
    assert names.ForwardingRules.of().request_lines(headers) == kept
    assert names.ForwardingRules.of(credentials=True).request_lines(headers) == with_key
    assert names.ForwardingRules.of(drop=["X-B"]).request_lines(headers) == b"x-a: 2\r\n"
    allowed = names.ForwardingRules.of(forward=["X-A", "x-hop", "authorization", "host"])
    assert allowed.request_lines(headers) == b"x-a: 2\r\n", "a list opens no way for what never crosses"


def test_response_headers() -> None:
    """A worker's headers keep their spelling; the length is written anew, and the router's own names are not taken."""
    headers = [
        (b"Content-Type", b"text/plain"),
        (b"Content-Length", b"2"),
        (b"Connection", b"keep-alive"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Homing-Worker", b"evil"),
        (b"X-Request-Id", b"other"),
    ]
    assert names.response_lines(headers) == b"Content-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("value", "accepted"),
    [(b"abc-1", True), (b"x" * 128, True), (b"x" * 129, False), (b"", False), (b"a b", False), (b"\xe9", False)],
)
def test_request_ids(value: bytes, accepted: bool) -> None:
    """Visible ASCII of up to 128 characters is taken."""
    assert names.acceptable_request_id(value) == (value if accepted else None)
