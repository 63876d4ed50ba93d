"""Answers in passing: their usage, how many events came, and whether a stream that is over is whole."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire import sse
from router.wire.taps import BodyTap, StreamTap
from router.wire.usage import MAX_TOKENS, Usage, parse_usage

# --- usage ----------------------------------------------------------------------------------------

FULL = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42, "prompt_tokens_details": {"cached_tokens": 32}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (FULL, Usage(40, 2, 32)),
        ({"prompt_tokens": 40, "completion_tokens": 2}, Usage(40, 2, None)),
        ({"prompt_tokens": 40, "completion_tokens": None, "prompt_tokens_details": None}, Usage(40, 0, None)),
        ({"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {}}, Usage(40, 1, None)),
        (None, None),
        ("many", None),
        ({"prompt_tokens": "x"}, None),
        ({"prompt_tokens": -40, "completion_tokens": -1}, Usage(0, 0, None)),
        ({"prompt_tokens": 10**400, "completion_tokens": 10**400}, Usage(MAX_TOKENS, MAX_TOKENS, None)),
        ({**FULL, "prompt_tokens_details": {"cached_tokens": -(10**400)}}, Usage(40, 2, 0)),
        ({**FULL, "prompt_tokens_details": {"cached_tokens": 41}}, Usage(40, 2, 40)),
    ],
)
def test_usage(usage: object, expected: Usage | None) -> None:
    """Counts are read as engines write them; a malformed usage is no usage."""
    assert parse_usage(json.dumps({"id": "x", "usage": usage, "choices": [1]}).encode()) == expected


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"[DONE]", b'{"id": 1}', b"\xff"])
def test_no_usage(document: bytes) -> None:
    """Anything else has no usage."""
    assert parse_usage(document) is None


def chunk(usage: object, text: str = "a") -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], "usage": usage}).encode() + b"\n\n"


@pytest.mark.parametrize("blank", [b"\r\n\r\n", b"\r\r", b"\n\n", b"\n\r\n"])
def test_events_in_one_piece_may_end_otherwise(blank: bytes) -> None:
    """One before another that ends as most do: both are counted."""
    tap = StreamTap()
    piece = b"data: 1" + blank + b"data: 2\n\n"
    for count in (2, 4):
        assert tap.feed(piece) == piece
        assert tap.events == count


@given(st.lists(st.integers(0, 700), max_size=12))
def test_usage_of_a_stream_wherever_it_is_split(cuts: list[int]) -> None:
    """The last usage that is not null counts; text that looks like one does not; no byte is changed."""
    stream = (
        chunk({**FULL, "completion_tokens": 1})
        + chunk(None, '{"usage": {"prompt_tokens": 1}}')
        + chunk(FULL)
        + b"data: [DONE]\n\n"
    )
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    tap = StreamTap()
    passed = b"".join(tap.feed(stream[start:end]) for start, end in pairwise(bounds))
    assert passed + tap.flush() == stream
    assert tap.usage == Usage(40, 2, 32)
    assert tap.events == 4


def test_usage_of_a_stream_without_its_last_blank_line() -> None:
    """A stream that ends in the middle of a line still gives what it said."""
    tap = StreamTap()
    assert tap.feed(chunk(FULL)[:-1]) == b""
    assert tap.flush() == chunk(FULL)[:-1]
    assert tap.usage == Usage(40, 2, 32)


def test_usage_of_a_whole_answer() -> None:
    """A document in pieces is read once whole; one too long to keep passes unread."""
    document = json.dumps({"text": "x" * 1000, "usage": FULL}).encode()
    tap = BodyTap()
    assert b"".join(tap.feed(document[at : at + 100]) for at in range(0, len(document), 100)) == document
    assert tap.usage == Usage(40, 2, 32)
    long = BodyTap()
    long.feed(b'{"text": "' + b"x" * BodyTap.MAX_BYTES + b'", ')
    long.feed(b'"usage": ' + json.dumps(FULL).encode() + b"}")
    assert long.usage is None


# --- events and the last of them ------------------------------------------------------------------

RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["data: a", "data:b", "event: x\ndata: 1\ndata: 2", "id: 1", ": note", "data: " + "x" * 40]),
        st.integers(1, 3),
    ),
    max_size=8,
)


@given(records=RECORDS, end=st.sampled_from(["\n", "\r\n", "\r"]), bytewise=st.booleans())
def test_events_are_counted_whatever_ends_their_lines(
    records: list[tuple[str, int]], end: str, *, bytewise: bool
) -> None:
    """LF, CRLF or CR, in one piece an event or in many: as many as the stream has, comments being none."""
    tap = StreamTap()
    for event, blank_lines in records:
        piece = (event.replace("\n", end) + end * (1 + (blank_lines if bytewise else 1))).encode()
        for at in range(0, len(piece), 1 if bytewise else len(piece)):
            tap.feed(piece[at : at + 1] if bytewise else piece)
    assert tap.events == sum(not event.startswith(":") for event, _ in records)


DONE = b"data: [DONE]\n\n"
COMPLETED = b'event: response.completed\ndata: {"type": "response.completed", "response": {"output": []}}\n\n'


@pytest.mark.parametrize(
    "pieces",
    [
        (DONE,),
        (DONE, b"\n"),
        (DONE, b": bye\n\n"),
        (DONE, b": x"),
        (DONE + b": bye\n\n",),
        (b": hello\n" + DONE,),
        (b"data: [DONE]\n",),
        (b"data:[DONE]",),
        (b"data: [DONE]\r\n", b"\r\n"),
        (b"data: [DONE]\r\r",),
        (b"event:response.completed\ndata:{}\n\n",),
        (b'data: {"type":"response.completed"}\n\n',),
        (b'data: {"type":"message_stop"}\n\n',),
        (COMPLETED.replace(b"\n", b"\r\n"),),
        (COMPLETED.removesuffix(b"\n"),),
        (COMPLETED.replace(b"[]", b"%d" % 7 * sse.MAX_HELD_BYTES),),
        (COMPLETED[:50], b"x" * sse.MAX_HELD_BYTES, b"x" * sse.MAX_HELD_BYTES, b"\n", b"\n"),
        (b"data: " + b"x" * sse.MAX_HELD_BYTES + b"\n", b"\n" + DONE),
        (b'data: {"error": {"message": "out of memory"}}\n\n',),
    ],
    ids=lambda pieces: f"{b'|'.join(pieces)[-24:]!r}",
)
def test_the_last_event_of_a_stream(pieces: tuple[bytes, ...]) -> None:
    """However it is written, whatever blank lines and comments follow, and where its own blank line is missing."""
    tap = StreamTap()
    tap.feed(b'data: {"choices": []}\n\n')
    assert not tap.is_done
    for piece in pieces:
        tap.feed(piece)
    assert tap.is_done


@pytest.mark.parametrize(
    "pieces",
    [
        (b"data: [DON",),
        (b"data: [DONE]x\n\n",),
        (DONE + b"data: {}\n\n",),
        (DONE, b"data: {}\n\n"),
        (b"event: response.completed\n",),
        (COMPLETED[:-9],),
        (COMPLETED[:50], b"x" * sse.MAX_HELD_BYTES),
        (COMPLETED[:50] + b"x" * sse.MAX_HELD_BYTES, b"}\n\ndata: {}\n\n"),
        (b"event: response.completed.not\ndata: {}\n\n",),
        (b'data: {"error": null}\n\n',),
        (b'data: {"type": ["error"]}\n\n',),
        (b": [DONE]\n\n",),
        (b"data: \xff\n\n",),
        (b"data: " + b"[" * 30_000 + b"\n\n",),
    ],
    ids=lambda pieces: f"{b'|'.join(pieces)[-24:]!r}",
)
def test_what_is_not_the_last_event(pieces: tuple[bytes, ...]) -> None:
    """A part of it, another behind it, or what only looks like it."""
    tap = StreamTap()
    for piece in pieces:
        tap.feed(piece)
    assert not tap.is_done


# --- what was generated -----------------------------------------------------------------------------


def told(*ids: int, text: str = "a", index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "token_ids": list(ids)}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_ids_are_read_in_passing(size: int) -> None:
    """However the stream is cut; those of the first choice, and told as they come."""
    seen: list[list[int]] = []
    tap = StreamTap(lambda ids: seen.append(list(ids)))
    stream = (
        b'data: {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}, "token_ids": null}]}\n\n'
        + told(5, 6)
        + told(9, index=1)
        + told(7)
        + b"data: [DONE]\n\n"
    )
    for start in range(0, len(stream), size):
        tap.feed(stream[start : start + size])

    assert (list(tap.ids), seen[-1]) == ([5, 6, 7], [5, 6, 7])
    assert len(seen) == (1 if size == 1000 else 2)


def test_ids_are_not_read_where_nobody_asked() -> None:
    """It is work for each event."""
    tap = StreamTap()
    tap.feed(told(5, 6))
    assert not tap.ids


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["x"], "many", {"a": 1}, [10**400], [None]])
def test_odd_ids_are_none(ids: object) -> None:
    """A worker may say anything."""
    document = json.dumps({"choices": [{"index": 0, "token_ids": ids, "delta": {}}]}).encode()
    tap, body = StreamTap(lambda _: None), BodyTap(reads_ids=True)
    tap.feed(b"data: " + document + b"\n\n")
    body.feed(document)
    assert (list(tap.ids), list(body.ids)) == ([], [])


def test_an_answer_in_one_document_tells_ids_and_words() -> None:
    """Of chats and of completions."""
    for choice, words in (({"message": {"content": "so it is"}}, "so it is"), ({"text": "or not"}, "or not")):
        tap = BodyTap(reads_ids=True)
        tap.feed(json.dumps({"choices": [{"index": 0, "token_ids": [3, 4], **choice}]}).encode())
        assert (list(tap.ids), tap.first_words()()) == ([3, 4], words)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (chunk(None, "") + chunk(None, "so ") + chunk(None, "it is"), "so it is"),
        (b": held\n\n" + chunk(None, "so"), "so"),
        (b'data: {"choices": [{"text": "so"}]}\n\ndata: {"choices": []}\n\n', "so"),
        (b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n', ""),
        (b"data: [DONE]\n\ndata: 5\n\ndata: \xff\n\n", ""),
    ],
)
def test_first_words(stream: bytes, words: str) -> None:
    """The text that a stream begins with."""
    tap = StreamTap()
    tap.feed(stream)
    assert tap.first_words()() == words


def test_of_a_long_stream_the_beginning_is_kept() -> None:
    """Enough to tell whose answer it is."""
    tap = StreamTap()
    for number in range(1000):
        tap.feed(chunk(None, f"{number} "))
    assert len(tap.first_words()()) >= 16
    assert "".join(f"{number} " for number in range(1000)).startswith(tap.first_words()())


def test_who_tells_the_words_keeps_no_more_of_the_answer() -> None:
    """They are kept for seconds, of every answer that has just ended."""
    event = chunk(None, "so it is") + chunk(None, "x" * 400_000)
    document = json.dumps({"choices": [{"message": {"content": "so it is" + "x" * 400_000}}]}).encode()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = []
        for tap, answer in ((StreamTap(), event), (BodyTap(), document)):
            tap.feed(bytes(bytearray(answer)))
            kept.append(tap.first_words())
        del tap
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16_384
    assert [words().startswith("so it is") for words in kept] == [True, True]
