"""Streams are cut at event boundaries, whatever their line ends and wherever the network splits them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire.sse import MAX_HELD_BYTES, EventCutter, event_data, events


def reference(stream: str) -> list[str]:
    """The events of a whole stream, read line by line as WHATWG HTML 9.2.6 says."""
    lines = stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found: list[str] = []
    current: list[str] = []
    for line in lines[:-1]:
        if line:
            current.append(line)
        elif current:
            found.append("\n".join(current))
            current = []
    return found


LINES = st.lists(st.sampled_from(["data: a", "data:b", ": note", "id: 1", "", ""]), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw: st.DrawFn) -> str:
    return "".join(line + draw(ENDS) for line in draw(LINES))


def normal(event: bytes) -> str:
    return event.decode().replace("\r\n", "\n").replace("\r", "\n")


@given(streams(), st.lists(st.integers(0, 100), max_size=10))
def test_any_split_gives_the_same_events(stream: str, cuts: list[int]) -> None:
    """Cut anywhere, the stream yields the events of the standard, and not a byte is lost."""
    data = stream.encode()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    cutter = EventCutter()
    passed = [cutter.feed(data[start:end]) for start, end in pairwise(bounds)]
    found = [normal(event) for piece in passed for event in events(piece)]
    rest = cutter.flush()
    assert b"".join(passed) + rest == data
    # A lone CR at the end may be half a CRLF, so the last event may still be held.
    assert found + [normal(event) for event in events(rest)][: len(reference(stream)) - len(found)] == reference(stream)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_what_passed_always_ends_between_events(pieces: list[bytes]) -> None:
    """Whatever bytes come, what has been passed on ends with a blank line, or is nothing."""
    cutter = EventCutter()
    passed = b""
    for piece in pieces:
        passed += cutter.feed(piece)
        assert not cutter.midway
        assert passed == b"" or passed.endswith((b"\n\n", b"\n\r", b"\r\r", b"\n\r\n", b"\r\r\n"))
    assert passed + cutter.flush() == b"".join(pieces)


def test_a_whole_event_is_not_held() -> None:
    """An event that has its blank line passes at once, its unfinished successor waits."""
    cutter = EventCutter()
    assert cutter.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert cutter.feed(b"data: 2\n\ndata:") == b"data: 2\n\n"
    assert cutter.feed(b" 3\n") == b""
    assert cutter.feed(b"\n") == b"data: 3\n\n"


def test_an_event_too_long_to_hold_passes_in_pieces() -> None:
    """Beyond the limit bytes are passed on uncut; the cutter knows that it stands inside an event until it ends."""
    cutter = EventCutter()
    assert cutter.feed(b"data: ") == b""
    assert len(cutter.feed(b"x" * MAX_HELD_BYTES)) == MAX_HELD_BYTES + 6
    assert cutter.midway
    assert cutter.feed(b"y\n\n") == b"y\n\n"
    assert not cutter.midway


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x", b"x"),
        (b"data:x", b"x"),
        (b"data:  x", b" x"),
        (b"event: message\ndata: 1\nid: 7\ndata: 2", b"1\n2"),
        (b"data: 1\r\ndata: 2", b"1\n2"),
        (b": comment", b""),
    ],
)
def test_data_of_an_event(event: bytes, data: bytes) -> None:
    """The data lines are joined by LF; one space after the colon is not part of them."""
    assert event_data(event) == data
