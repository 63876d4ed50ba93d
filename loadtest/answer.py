"""A streamed chat completion, read as it arrives. Pure: bytes and times in, one ``Answer`` out.

First token and token times are those of the pieces that carry content; a piece may hold more than one token, as
engines batch them. Usage comes in a last chunk without choices. The stream is whole only with ``[DONE]``: one
that stops before is an error, however much of it was heard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import msgspec

from router.wire.headers import EXPECTED_CACHED_TOKENS, RANK, REASON, SERVED_DP_RANK, WORKER


class Outcome(StrEnum):
    """How an exchange ended."""

    OK = "ok"
    CONNECT = "connect"  # no connection: refused, unreachable, or too slow to open
    RESET = "reset"  # the connection broke before the answer was whole
    TIMEOUT = "timeout"
    PUSHBACK = "pushback"  # 429 or 503: try later
    REJECTED = "rejected"  # another 4xx: this request will never do
    FAILED = "failed"  # another 5xx
    FRAME = "frame"  # an error frame inside a stream that had begun
    PROTOCOL = "protocol"  # not an answer that this client can read
    CANCELLED = "cancelled"  # by ourselves, when a run was stopped; not an error


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine reports them; ``cached_tokens`` is None where it does not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """What answer headers tell. From a router: where the request went, why, what it expected to be cached.

    From a worker that is asked directly: the rank alone.
    """

    rank: str
    worker: str | None = None
    reason: str | None = None
    expected_cached_tokens: int | None = None

    @property
    def rank_name(self) -> str:
        return f"rank {self.rank}" if self.worker is None else f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One exchange. Times are seconds after the request began to be written."""

    outcome: Outcome
    detail: str = ""
    status: int | None = None
    first_token_seconds: float | None = None
    gap_seconds: tuple[float, ...] = ()
    total_seconds: float = 0.0
    usage: Usage | None = None
    placement: Placement | None = None
    content: str = ""


@dataclass(slots=True)
class AnswerReader:
    """Accumulates one answer. Feed the body as it comes, then ``finish`` once."""

    started: float
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    _buffer: bytes = b""
    _pieces: list[str] = field(default_factory=list)
    _piece_times: list[float] = field(default_factory=list)
    _usage: Usage | None = None
    _is_done: bool = False
    _trouble: tuple[Outcome, str] | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Body bytes that arrived at ``now``."""
        self._buffer += data
        if self.status != 200:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self, now: float, *, broken: tuple[Outcome, str] | None = None) -> Answer:
        """The answer as it stands; ``broken`` says how the exchange was cut short, if it was."""
        outcome, detail = self._verdict(broken)
        times = self._piece_times
        return Answer(
            outcome=outcome,
            detail=detail,
            status=self.status,
            first_token_seconds=times[0] - self.started if times else None,
            gap_seconds=tuple(later - earlier for earlier, later in pairwise(times)),
            total_seconds=now - self.started,
            usage=self._usage,
            placement=_placement(self.headers),
            content="".join(self._pieces),
        )

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = _CHUNK.decode(payload)
        except msgspec.MsgspecError as error:
            self._trouble = self._trouble or (Outcome.PROTOCOL, f"a chunk that is not a chat completion: {error}")
            return
        if chunk.error is not None:
            self._trouble = self._trouble or (Outcome.FRAME, chunk.error.message)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._usage = Usage(
                prompt_tokens=chunk.usage.prompt_tokens,
                completion_tokens=chunk.usage.completion_tokens,
                cached_tokens=details.cached_tokens if details is not None else None,
            )
        pieces = [choice.delta.content or choice.delta.reasoning_content or "" for choice in chunk.choices]
        is_first_and_last = not self._piece_times and any(choice.finish_reason for choice in chunk.choices)
        if any(pieces) or is_first_and_last:  # an only token may have no text of its own
            self._pieces += pieces
            self._piece_times.append(now)

    def _verdict(self, broken: tuple[Outcome, str] | None) -> tuple[Outcome, str]:
        if self._trouble is not None:
            return self._trouble
        if self.status is not None and self.status != 200:
            return _refusal(self.status), f"HTTP {self.status}: {_error_message(self._buffer)}"
        if self._is_done:
            return Outcome.OK, ""
        return broken or (Outcome.RESET, "the stream ended without [DONE]")


def _refusal(status: int) -> Outcome:
    if status in (429, 503):
        return Outcome.PUSHBACK
    if 400 <= status < 500:
        return Outcome.REJECTED
    return Outcome.FAILED if status >= 500 else Outcome.PROTOCOL


def _placement(headers: dict[str, str]) -> Placement | None:
    if WORKER.decode() not in headers:
        rank = headers.get(SERVED_DP_RANK.decode())
        return Placement(rank) if rank is not None else None
    expected = headers.get(EXPECTED_CACHED_TOKENS.decode(), "")
    return Placement(
        worker=headers[WORKER.decode()],
        rank=headers.get(RANK.decode(), "?"),
        reason=headers.get(REASON.decode(), "unknown"),
        expected_cached_tokens=int(expected) if expected.isdecimal() else None,
    )


# The parts of a chunk that are read. Everything else may be there, and is not looked at.


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


def _error_message(body: bytes) -> str:
    try:
        error = _CHUNK.decode(body).error
    except msgspec.MsgspecError:
        error = None
    text = error.message if error is not None else body.decode(errors="replace").strip()
    return text[:200] or "no body"
