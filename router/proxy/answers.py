"""What a worker's answer means for the request it answers."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.errors import NoWorker, RequestError, UpstreamFailed, UpstreamTimeout, WorkerRefused
from router.proxy.exchange import Exchange
from router.proxy.receiver import AnswerHead, Failure
from router.proxy.types import Outcome
from router.wire import http1, sse
from router.wire.told_errors import ToldError, error_told

#: A worker's refusal longer than this is not kept for passing on.
_MAX_REFUSAL_BYTES: Final = 256 * 1024
_ERROR_FIELDS: Final = ("message", "type", "code", "param")
_RETRY_AFTER: Final = re.compile(rb"^retry-after:[ \t]*(\d{1,9})[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
#: Better asked of another rank first.
REFUSALS: Final = frozenset({Outcome.PUSHBACK, Outcome.SERVER_ERROR})


class Refusal:
    """A worker's whole answer that is not passed on as it comes."""

    __slots__ = ("_pieces", "head", "lines", "size")

    def __init__(self, head: AnswerHead) -> None:
        self.head = head
        #: Say where it came from.
        self.lines = b""
        self.size = 0
        self._pieces: list[bytes] = []

    def add(self, data: bytes) -> bool:
        """Keep a piece of the body; False when it has become too long."""
        self.size += len(data)
        self._pieces.append(data)
        return self.size <= _MAX_REFUSAL_BYTES

    @property
    def all_lines(self) -> bytes:
        """The headers with which it is passed on."""
        lines = self.lines + self.head.lines
        return lines if http1.bodiless(self.head.status) else b"%bcontent-length: %d\r\n" % (lines, self.size)

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)


class Told(Refusal):
    """An error that a worker tells in an answer whose head was good, as the refusal that it would have been before its
    head. What follows it says nothing more.
    """

    __slots__ = ()

    def __init__(self, error: ToldError) -> None:
        head = AnswerHead(error.status, http1.status_line(error.status), b"content-type: application/json\r\n")
        super().__init__(head)
        super().add(error.document)

    def add(self, data: bytes) -> bool:
        return True


def told_in(answer: bytes, *, is_streamed: bool) -> Told | None:
    """The error that an answer tells, if any, or a part of a stream with whole events first."""
    error = error_told(answer, is_streamed=is_streamed)
    return None if error is None else Told(error)


def refusal_of(head: AnswerHead, begins: bytes, *, is_held_open: bool) -> Refusal | None:
    """An answer that is not passed on, or not before other ranks have been asked. A stream that begins with the error
    that another rank may not have is one; where the stream to the client has begun, whatever is none is one.
    """
    if is_good_stream(head):
        told = told_in(begins, is_streamed=True)
        return told if told is not None and outcome_of(told.head.status) in REFUSALS else None
    return Refusal(head) if is_held_open or outcome_of(head.status) in REFUSALS else None


def outcome_of(status: int, *, told: ToldError | None = None) -> Outcome:
    """How an attempt ended that was answered with ``status``, and perhaps ``told`` of an error behind a good one."""
    if status < 400 and told is not None:
        status = told.status
    if status < 400:
        return Outcome.OK
    if status in (408, 429, 503):
        return Outcome.PUSHBACK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR


def is_stream(head: AnswerHead) -> bool:
    """The answer comes in events that can be read."""
    return head.content_type.startswith(b"text/event-stream") and not head.encoded


def is_good_stream(head: AnswerHead) -> bool:
    """The same, and no error."""
    return head.status < 400 and is_stream(head)


def begins_well(head: AnswerHead, begins: bytes) -> bool:
    """The answer is no error, nor begins with one: its prompt has been computed."""
    return head.status < 400 and error_told(begins, is_streamed=is_stream(head)) is None


def show_head(exchange: Exchange, head: AnswerHead, lines: bytes, *, length: int | None) -> None:
    """Let the client have the head of its answer, and ``lines`` that say where it comes from; where it is too late for
    headers, these as a comment.
    """
    client = exchange.client
    if not client.begun:
        sized = b"" if length is None else b"content-length: %d\r\n" % length
        client.start(head.status_line, head.lines + lines + sized, has_length=head.has_length)
    elif exchange.is_held_open:
        client.write(sse.comment(lines))


def show_refusal(exchange: Exchange, refusal: Refusal) -> None:
    """Answer as the worker did."""
    exchange.status = refusal.head.status
    exchange.client.start(refusal.head.status_line, refusal.all_lines, has_length=True)
    exchange.client.write(refusal.body)
    exchange.client.end()


def told_by(refusal: Refusal) -> RequestError:
    """What the worker said, for a stream that has begun and can take no answer but an event.

    OpenAI's and Anthropic's shape have it under ``error``, older engines at the top.
    """
    status = refusal.head.status
    if status < 400:
        return UpstreamFailed(f"The worker answered {status}, but no stream.")
    try:
        said = msgspec.json.decode(refusal.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        said = said["error"]
    message, type_, code, param = (
        value if isinstance(value, str) else None
        for value in (said.get(name) if isinstance(said, dict) else None for name in _ERROR_FIELDS)
    )
    error = WorkerRefused(
        message or f"The worker answered {status}.", status=status, type_=type_, code=code, param=param
    )
    error.retry_after_seconds = _retry_after_seconds(refusal.head)
    return error


def _retry_after_seconds(head: AnswerHead) -> int | None:
    """What a worker asks for; a date is for clocks that agree, and left out."""
    found = _RETRY_AFTER.search(head.lines)
    return None if found is None else int(found[1])


def error_of(failure: Failure) -> RequestError:
    """What the client is told when no attempt brought an answer."""
    if failure.outcome is Outcome.NO_SOCKET:
        return NoWorker("The router cannot open another connection now.", code="no_socket")
    kind = UpstreamTimeout if failure.outcome is Outcome.TIMEOUT else UpstreamFailed
    return kind(f"No worker answered; last cause: {failure.cause}.")
