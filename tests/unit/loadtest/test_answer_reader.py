"""A streamed answer is read the same however its bytes are cut, and each ending has its name."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.answer import Answer, AnswerReader, Outcome, Placement, Usage


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    return event(
        {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": None}
    )


DONE = b"data: [DONE]\n\n"
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
    }
)


def read(*parts: bytes, status: int = 200, broken: tuple[Outcome, str] | None = None) -> Answer:
    reader = AnswerReader(started=10.0, status=status)
    for second, part in enumerate(parts, start=11):
        reader.feed(part, float(second))
    return reader.finish(99.0, broken=broken)


def test_times_and_usage_of_a_whole_stream() -> None:
    """The role chunk is no token: first content after 2 s, then 1 s, then 2 s; usage from its own chunk."""
    answer = read(delta(""), delta(" a"), delta(" b"), b": comment\n\n", delta(" c", "length"), USAGE, DONE)
    assert answer == Answer(
        outcome=Outcome.OK,
        status=200,
        first_token_seconds=2.0,
        gap_seconds=(1.0, 2.0),
        total_seconds=89.0,
        usage=Usage(40, 2, 32),
        content=" a b c",
    )


@given(st.lists(st.integers(0, 400), max_size=8))
def test_cuts_between_bytes_change_nothing(cuts: list[int]) -> None:
    """Content, usage and verdict are those of the uncut stream, also with CRLF line ends."""
    stream = (delta(" caf\u00e9") + delta(" b", "stop") + USAGE + DONE).replace(b"\n", b"\r\n")
    reader = AnswerReader(started=0.0, status=200)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, end in pairwise(places):
        reader.feed(stream[start:end], 1.0)
    answer = reader.finish(2.0)
    assert (answer.outcome, answer.content, answer.usage) == (Outcome.OK, " caf\u00e9 b", Usage(40, 2, 32))


@pytest.mark.parametrize(
    ("parts", "status", "broken", "outcome", "detail"),
    [
        ([delta(" a")], 200, None, Outcome.RESET, "without [DONE]"),
        ([delta(" a")], 200, (Outcome.TIMEOUT, "nothing heard"), Outcome.TIMEOUT, "nothing heard"),
        ([delta(" a"), event({"error": {"message": "broke"}})], 200, None, Outcome.FRAME, "broke"),
        ([delta(" a"), b"data: {oops\n\n", DONE], 200, None, Outcome.PROTOCOL, "not a chat completion"),
        ([b'{"error": {"message": "too long"}}'], 400, None, Outcome.REJECTED, "HTTP 400: too long"),
        ([b'{"error": {"message": "busy"}}'], 429, None, Outcome.PUSHBACK, "HTTP 429: busy"),
        ([b""], 503, None, Outcome.PUSHBACK, "HTTP 503: no body"),
        ([b"<html>"], 502, None, Outcome.FAILED, "HTTP 502: <html>"),
        ([b""], 301, None, Outcome.PROTOCOL, "HTTP 301"),
        ([delta(" a"), DONE], 200, (Outcome.RESET, "closed after the end"), Outcome.OK, ""),
    ],
)  # fmt: skip
def test_endings(
    parts: list[bytes], status: int, broken: tuple[Outcome, str] | None, outcome: Outcome, detail: str
) -> None:
    """What was heard decides before how the connection ended."""
    answer = read(*parts, status=status, broken=broken)
    assert answer.outcome is outcome
    assert detail in answer.detail


def test_an_only_token_without_text_still_has_a_time() -> None:
    """One token that decodes to nothing: the chunk that finishes is the first token."""
    answer = read(delta(""), delta("", "length"), USAGE, DONE)
    assert answer.first_token_seconds == 2.0
    assert answer.gap_seconds == ()


def test_the_router_says_where_the_request_went() -> None:
    """Worker, rank, reason and expectation come from the answer's headers; without them there is no placement."""
    reader = AnswerReader(started=0.0, status=200)
    reader.headers |= {
        "x-homing-worker": "w1",
        "x-homing-rank": "3",
        "x-homing-reason": "spill",
        "x-homing-expected-cached-tokens": "128",
    }
    assert reader.finish(1.0).placement == Placement("3", "w1", "spill", 128)
    assert reader.finish(1.0).placement.rank_name == "w1/3"
    assert read(DONE).placement is None


def test_a_lone_worker_says_which_rank_served() -> None:
    """Without a router there is the worker's own header; a router's word on its ranks goes before it."""
    reader = AnswerReader(started=0.0, status=200)
    reader.headers["x-dp-rank"] = "1"
    alone = reader.finish(1.0).placement
    assert (alone, alone.rank_name) == (Placement("1"), "rank 1")
    reader.headers |= {"x-homing-worker": "w1", "x-homing-rank": "3", "x-homing-reason": "home"}
    assert reader.finish(1.0).placement == Placement("3", "w1", "home")
