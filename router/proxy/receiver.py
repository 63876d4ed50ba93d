"""What a connection to a worker tells of an answer, and whom: its head, its body, how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.proxy.types import Outcome
from router.wire import http1


@dataclass(frozen=True, slots=True)
class Failure:
    """An exchange that did not end as HTTP says. ``cause`` is for people and names no address."""

    outcome: Outcome
    cause: str
    #: A connection used before turned out closed, so soon that most likely the worker has not seen the request.
    is_stale: bool = False


class AnswerHead:
    """The head of a worker's answer, but for the body's length. ``lines`` are the headers that go on to the client.

    Answers may share one: it is not changed.
    """

    __slots__ = ("content_type", "encoded", "ends_with_connection", "has_length", "lines", "status", "status_line")

    def __init__(self, status: int, status_line: bytes, lines: bytes) -> None:
        self.status = status
        self.status_line = status_line
        self.lines = lines
        self.content_type = b""
        #: Compressed or the like: its bytes are nobody's to look into.
        self.encoded = False
        #: The end of the body is known beforehand: by its length, or because there is none.
        self.has_length = http1.bodiless(status)
        #: The end of the connection is that of the body: a worker that dies looks like one that is done.
        self.ends_with_connection = False


class Receiver(Protocol):
    """Who is told of an answer, in this order: its head with the first byte of body, pieces of the body, the end."""

    #: Takes a piece of the body.
    on_body: Callable[[bytes], None]

    def on_answer(self, head: AnswerHead, length: int | None, begins: bytes) -> None:
        """The first byte of the answer's body has come, or the end of an answer that has none.

        ``length``: the body's, as the worker gives it. ``begins``: its first piece, which comes to ``on_body`` next.
        """

    def on_end(self, failure: Failure | None) -> None:
        """The exchange is over, at whatever point. Nothing is called after this."""

    def waits_on(self, silent_seconds: float, *, has_head: bool) -> bool:
        """Nothing of the answer's body has come in so long, but the head of a stream if ``has_head``: whether to wait
        on. Asked every few seconds.
        """
